"""One line of log a request, with an id that the client may give and always gets back as X-Request-Id.

Comes in: an ASGI application; what endpoints leave in `scope["state"]`. Goes out: log records, response headers, the
status to whoever counts. Must not know: endpoints. Nothing of a prompt, an answer or a key is logged.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.front import Group

log = logging.getLogger("llmc.requests")
#: What is asked every few seconds by a machine.
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
#: The status of a request whose client left before the answer began.
CLIENT_GONE = 499


class RequestLog:
    """`count` is told the path and status of every request that has ended."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None], lines: bool = True) -> None:
        self._app = app
        self._count = count
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        status, began = CLIENT_GONE, time.monotonic()

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            self._count(scope["path"], status)
            if self._lines and scope["path"] not in _PROBES:
                fields = {"request_id": identity, "method": scope["method"], "path": scope["path"], "status": status}
                fields["seconds"] = round(time.monotonic() - began, 6)
                _write({**fields, **_of_group(state.get("group"))})


def _of_group(group: Group | None) -> dict[str, Any]:
    if group is None:
        return {}
    sequences = group.sequences
    return {
        "group": group.id,
        "prompt_tokens": sum(s.prompt_tokens for s in sequences),
        "completion_tokens": sum(s.completion_tokens for s in sequences),
        "cached_tokens": sum(s.cached_tokens for s in sequences),
        "finish_reasons": sorted({s.finish_reason or "abort" for s in sequences}),
    }


def _write(fields: dict[str, Any]) -> None:
    text = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
    log.info("%s", text, extra={"fields": fields})


def _plain(value: object) -> str:
    # A path may hold anything, line ends among it.
    text = ",".join(value) if isinstance(value, list) else str(value)
    return text.encode("unicode_escape").decode()
