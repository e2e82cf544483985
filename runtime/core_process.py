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

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import ShapeProfile
from llmc.runtime.messages import Abort, FromCore, Shutdown, Submit

CORE_COMMAND = (sys.executable, "-P", "-m", "llmc.runtime.core_main")
_HEADER = 4  # bytes of a frame's length, little endian
#: How long a core that was told to stop may take before it is killed, in seconds.
STOP_SECONDS = 2.0


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a core may be told besides its plan. None: what the profile (or for `kv_bytes` the machine) allows."""

    kv_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    threads: int | None = None

    def check(self, profile: ShapeProfile) -> None:
        """Raises UsageError unless every option is positive and no larger than what the plan was built for."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name, most in (
            ("max_num_seqs", profile.max_num_seqs),
            ("max_num_batched_tokens", profile.max_num_batched_tokens),
        ):
            value = getattr(self, name)
            if value is not None and value > most:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}; profile {profile.name!r} of the plan allows at "
                    f"most {most}. Lower it, or build with a profile that allows more"
                )


class _Link(asyncio.Protocol):
    """Cuts the byte stream into frames."""

    def __init__(self, receive: Callable[[FromCore], None], gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER:
            size = int.from_bytes(buffer[start : start + _HEADER], "little")
            end = start + _HEADER + size
            if len(buffer) < end:
                break
            self._receive(self._decoder.decode(buffer[start + _HEADER : end]))
            start = end
        del buffer[:start]

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
        self._pidfd = os.pidfd_open(self.process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def connect(self, receive: Callable[[FromCore], None], gone: Callable[[], None]) -> None:
        """From now on messages go to `receive`; `gone` is called once, after the last, unless `stop` was called."""
        self._gone = gone
        self._transport, _ = await self._loop.create_connection(lambda: _Link(receive, self._on_gone), sock=self._ours)

    def send(self, message: Submit | Abort | Shutdown) -> None:
        """Queues a message; one to a core that has gone is dropped, as its requests have been failed already."""
        if self._transport is not None and not self._transport.is_closing():
            data = self._encoder.encode(message)
            self._transport.write(len(data).to_bytes(_HEADER, "little") + data)

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
        # What it had sent is still to be read; if something keeps its socket open, its end will not show there.
        self._loop.call_later(0.2, self._on_gone)

    def _on_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()
