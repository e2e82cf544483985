"""The end of a server that can go on no more: out of memory, or with an event loop that stands still.

Comes in: an ASGI application, an event loop. Goes out: nothing, or the end of the process. Must not know: endpoints.

The process ends at once, so that the kernel closes every connection. Whatever else would be done (an error response, a
log line, closing one connection) needs memory or the loop, fails half way, and leaves clients waiting for ever.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_LAST_WORDS = b"error: the server is out of memory and ends; give it more, or lower --kv-bytes\n"
#: An event loop that has not turned for so long counts as hung, in seconds.
LOOP_SECONDS = 20.0
_REARM_SECONDS = 1.0


def end_process() -> None:
    """Ends this process with exit code 1, allocating nothing. Its core and ranks end with it."""
    os.write(2, _LAST_WORDS)
    os._exit(1)


class EndWithoutMemory:
    """An application, any MemoryError of which ends the process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await self._app(scope, receive, send)
        except MemoryError:
            end_process()


def guard_loop(loop: asyncio.AbstractEventLoop) -> None:
    """The same for whatever runs in the loop outside of a request: the core's messages, timers."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), MemoryError):
            end_process()
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


async def watch_loop() -> None:
    """While it runs, a loop that hangs ends the process with code 1, and stderr says in which line it hung.

    The watch is a thread of the C library's: it needs neither the loop nor Python's lock.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(LOOP_SECONDS, exit=True)
            await asyncio.sleep(_REARM_SECONDS)
    except RuntimeError:  # no thread can be started
        end_process()
    finally:
        faulthandler.cancel_dump_traceback_later()
