"""Request bodies: bounded in size, read strictly as JSON.

Comes in: bytes. Goes out: Python objects, or 400 and 413. Must not know: what the members mean.

RFC 8259 leaves open what two equal names in one object mean; readers differ, so that a proxy may have checked another
value than the one that is used here. They are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: A prompt of 128k tokens, every character escaped, is under 2 MiB.
MAX_BODY_BYTES = 8 * 2**20


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413, before they are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._max:
                    raise HTTPException(
                        413, f"the body is over the limit of {self._max} bytes; shorten it, or raise --max-body-bytes"
                    )
            return message

        await self._app(scope, counted, send)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        shown = json.dumps(twice[:40])
        raise HTTPException(400, f"the body names {shown} twice in one object; which value holds is unclear, give one")
    return found


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), object_pairs_hook=_object)
        return self._json


class JsonRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strict
