"""Messages over a socket: whole whatever the pieces, and a clean end."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.channel import MAX_MESSAGE, Channel, ChannelClosed, ChannelError, Frames, frame
from llmc.runtime.messages import Abort, FromCore, Output, SamplingParams, Shutdown, Submit, ToCore

MESSAGES = (Submit("a", list(range(300)), SamplingParams(logit_bias={3: -1.5})), Abort("b"), Shutdown(drain=False))


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left, FromCore), Channel(right, ToCore)


def encoded(*messages: object) -> bytes:
    return bytes(frame(msgspec.msgpack.Encoder(), messages))


@given(st.lists(st.integers(1, 200), max_size=30))
def test_pieces_of_any_size_give_the_same_messages(sizes: list[int]) -> None:
    data = encoded(*MESSAGES)
    frames: Frames = Frames(ToCore)
    found = []
    for size in [*sizes, len(data)]:
        found += frames.feed(data[:size])
        data = data[size:]
    assert tuple(found) == MESSAGES
    assert frames.pending == 0


def test_a_message_larger_than_the_socket_buffer() -> None:
    front, core = pair()
    big = Submit("big", list(range(400_000)), SamplingParams())
    sender = threading.Thread(target=front.send, args=(big, Abort("big")))
    sender.start()
    found: list = []
    while len(found) < 2:
        found += core.receive()
    sender.join()
    assert found == [big, Abort("big")]


def test_both_directions_and_no_wait() -> None:
    front, core = pair()
    assert core.receive(0) == []
    front.send(*MESSAGES)
    assert tuple(core.receive()) == MESSAGES
    core.send(Output("a", [1, 2], finish_reason="stop"))
    assert front.receive(1) == [Output("a", [1, 2], finish_reason="stop")]


def test_a_closed_peer() -> None:
    front, core = pair()
    front.send(Abort("a"))
    front.close()
    assert core.receive() == [Abort("a")]
    with pytest.raises(ChannelClosed, match=r"closed the channel$"):
        core.receive()
    with pytest.raises(ChannelClosed, match="has gone"):
        core.send(Abort("b"))


def test_a_peer_that_dies_inside_a_message() -> None:
    left, right = socket.socketpair()
    core: Channel = Channel(right, ToCore)
    left.sendall(encoded(Abort("a"))[:7])
    left.close()
    assert core.receive() == []
    with pytest.raises(ChannelClosed, match="7 bytes into a message"):
        core.receive()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\2\0\0\0\xff\xff", "cannot be read"),
        (encoded(Output("a", [])), "Invalid value"),
        ((MAX_MESSAGE + 1).to_bytes(4, "little"), f"at most {MAX_MESSAGE}"),
    ],
)
def test_garbage_is_refused(data: bytes, message: str) -> None:
    frames: Frames = Frames(ToCore)
    with pytest.raises(ChannelError, match=message):
        frames.feed(data)
