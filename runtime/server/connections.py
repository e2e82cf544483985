"""Bounds on connections: how many there are, and how long a request may take to arrive.

Comes in: uvicorn's protocol events, ASGI requests. Goes out: 503 and 408, closed connections. Must not know: endpoints
beyond those that are open to everybody.

A client that opens connections, or sends a head or a body byte by byte, costs its own connection and nothing else:
beyond the bound requests get 503 and a time to come again, except for health, readiness and metrics; far beyond it a
connection is closed at once; one that takes too long to send is answered 408.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmc.runtime.server.access import OPEN_PATHS
from llmc.runtime.server.errors import ApiError, response_of

#: Below the 1024 open files that a process usually may have.
MAX_CONNECTIONS = 900
#: Connections beyond the bound that are still listened to: /health must answer while the bound is reached.
RESERVE = 32
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ConnectionLimit:
    """Answers 503 to requests while there are more than `most` connections; `count` tells how many there are."""

    def __init__(self, app: ASGIApp, most: int, count: Callable[[], int]) -> None:
        self._app = app
        self._most = most
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and self._count() > self._most:
            text = f"there are more than {self._most} connections (--max-connections); close some, or come again"
            await response_of(ApiError(503, text, code="too_many_connections"))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def bounded_protocol(most: int, request_seconds: float, idle_seconds: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with bounds: a request, head and body, must be there `request_seconds` after its first byte,
    the first byte of the first request `idle_seconds` after the connection; beyond `most` connections and RESERVE
    another one is closed.
    """

    class Bounded(HttpToolsProtocol):
        _arrival: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most + RESERVE:
                transport.close()
            else:
                self._expect(idle_seconds)

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect(None)
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._expect(request_seconds)
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._expect(None)
            super().on_message_complete()

        def _expect(self, seconds: float | None) -> None:
            if self._arrival is not None:
                self._arrival.cancel()
            self._arrival = None if seconds is None else self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            cycle: Any = self.cycle
            if not self.transport.is_closing():
                if cycle is None or not cycle.response_started or cycle.response_complete:
                    self.transport.write(_TOO_SLOW)
                self.transport.close()

    return Bounded
