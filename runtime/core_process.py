"""The core's process and the socket to it: started, spoken with, watched, ended.

Comes in: a plan's path, options, a callback for messages and one for the end. Goes out: framed MessagePack.
Must not know: requests, text.

The end of the core is noticed twice over: its socket closes, and its process id becomes readable (a pidfd).
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from llmc.runtime.channel import Frames, frame
from llmc.runtime.messages import Abort, FromCore, Shutdown, Submit
from llmc.runtime.options import CoreOptions

CORE_COMMAND = (sys.executable, "-P", "-m", "llmc.runtime.core_main")
#: How long a core that was told to stop may take before it is killed, in seconds.
STOP_SECONDS = 2.0
#: The socket's end and the process's come within this time of each other, in seconds.
_GRACE = 0.5


class _Link(asyncio.Protocol):
    """Hands on the messages that arrive. Garbage closes the connection, which counts as the core's end."""

    def __init__(self, receive: Callable[[FromCore], None], gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone
        self._frames: Frames[FromCore] = Frames(FromCore)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()


class CoreProcess:
    """A running core; made within the event loop that watches it."""

    def __init__(self, plan: Path, options: CoreOptions, command: Seq[str] | None = None) -> None:
        """Starts `command PLAN FD OPTIONS`; its socket is inherited as FD and nothing is read before `connect`."""
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        arguments = [str(plan), str(theirs.fileno()), msgspec.json.encode(options).decode()]
        # A session of its own: Ctrl-C in the terminal is the front end's to handle. What a core prints goes to stderr.
        with theirs:
            self.process = subprocess.Popen(
                [*(command or CORE_COMMAND), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._gone: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._closed = False
        self._pidfd = os.pidfd_open(self.process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def connect(self, receive: Callable[[FromCore], None], gone: Callable[[], None]) -> None:
        """From now on messages go to `receive`; `gone` is called once, after the last, unless `stop` was called."""
        self._gone = gone
        self._transport, _ = await self._loop.create_connection(
            lambda: _Link(receive, self._on_closed), sock=self._ours
        )

    def send(self, message: Submit | Abort | Shutdown) -> None:
        """Queues a message; one to a core that has gone is dropped, as its requests have been failed already."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._encoder, (message,)))

    @property
    def exit_code(self) -> int | None:
        """The core's exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    async def stop(self) -> None:
        """Tells the core to end, and kills it if it does not within STOP_SECONDS."""
        self._gone = None
        self.send(Shutdown(drain=False))
        if not await self.wait_exit(STOP_SECONDS):
            self.process.kill()
            await self._exited.wait()
        if self._transport is None:
            self._ours.close()
        else:
            self._transport.close()

    async def wait_exit(self, seconds: float) -> bool:
        """Waits for the process to end; False if it takes longer than `seconds`."""
        try:
            await asyncio.wait_for(self._exited.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.process.wait()
        self._exited.set()
        self._on_end(both=self._closed)

    def _on_closed(self) -> None:
        self._closed = True
        self._on_end(both=self._exited.is_set())

    def _on_end(self, both: bool) -> None:
        # Having seen both, nothing is left to read and the exit code is known. One without the other may stay away: the
        # socket can live on in a rank, and a process can hang with its socket closed.
        if both:
            self._on_gone()
        else:
            self._loop.call_later(_GRACE, self._on_gone)

    def _on_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()
