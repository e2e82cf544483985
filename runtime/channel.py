"""Messages over a stream socket: each is its length in 4 bytes, little endian, and that much MessagePack.

Comes in: a connected socket, msgspec structs. Goes out: the same on the other side. Must not know: what they mean.

`Frames` cuts a byte stream into messages and does no reading itself, so it serves blocking and asyncio code alike;
`Channel` is the blocking kind.
"""

from __future__ import annotations

import select
import socket
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")

_HEADER = 4
_READ = 1 << 20
#: A longer message is taken for garbage: no prompt, batch of tokens or list of log-probabilities comes near it.
MAX_MESSAGE = 1 << 28


class ChannelClosed(Exception):
    """The other side has closed the channel or died."""


class ChannelError(Exception):
    """What came over the channel is not a message."""


def frame(encoder: msgspec.msgpack.Encoder, messages: tuple[Any, ...]) -> bytearray:
    """The bytes of some messages, in order."""
    data = bytearray()
    for message in messages:
        start = len(data)
        data += b"\0\0\0\0"
        encoder.encode_into(message, data, start + _HEADER)
        data[start : start + _HEADER] = (len(data) - start - _HEADER).to_bytes(_HEADER, "little")
    return data


class Frames(Generic[M]):
    """Bytes in, in pieces of any size; messages of the given type (or union) out."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that these bytes complete. Raises ChannelError for bytes that are none."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        try:
            while len(buffer) - start >= _HEADER:
                size = int.from_bytes(buffer[start : start + _HEADER], "little")
                if size > MAX_MESSAGE:
                    raise ChannelError(f"a message of {size} bytes is announced; at most {MAX_MESSAGE} are allowed")
                end = start + _HEADER + size
                if len(buffer) < end:
                    break
                messages.append(self._decoder.decode(memoryview(buffer)[start + _HEADER : end]))
                start = end
        except msgspec.DecodeError as error:
            raise ChannelError(f"a message cannot be read: {error}") from error
        del buffer[:start]
        return messages

    @property
    def pending(self) -> int:
        """Bytes of a message whose rest has not come yet."""
        return len(self._buffer)


class Channel(Generic[M]):
    """A blocking channel that receives messages of type M. It owns the socket."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._frames: Frames[M] = Frames(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, *messages: Any) -> None:
        """Sends messages, waiting for room where the other side is slow. Raises ChannelClosed."""
        try:
            self._socket.sendall(frame(self._encoder, messages))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other side of the channel has gone") from error

    def receive(self, timeout: float | None = None) -> list[M]:
        """The messages that have come, after waiting for the first bytes for `timeout` seconds (None: for ever).

        Empty when no message is complete by then. Raises ChannelClosed at the end, ChannelError for garbage.
        """
        if not self._poll.poll(None if timeout is None else timeout * 1000):
            return []
        try:
            data = self._socket.recv(_READ)
        except ConnectionResetError as error:
            raise ChannelClosed("the other side of the channel has gone") from error
        if not data:
            cut = self._frames.pending
            raise ChannelClosed(
                "the other side has closed the channel" + (f", {cut} bytes into a message" if cut else "")
            )
        return self._frames.feed(data)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
