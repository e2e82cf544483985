"""Clients that open many connections, or send slowly, cost themselves and nobody else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.server.connections import RESERVE
from tests.unit.runtime.servers import Server, fake_server
from tests.unit.runtime.stopwatch import Stopwatch

BODY = b'{"prompt": "one", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def bounded(fake_plan: Path) -> Iterator[Server]:
    with fake_server(fake_plan, "--max-connections", "4", "--request-timeout", "1") as server:
        yield server


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


def read(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection; what came of it when that is by force."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


@pytest.mark.parametrize(
    "start",
    [b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n" + BODY],
    ids=["request line", "head", "body"],
)
def test_a_request_that_does_not_arrive_is_given_up(bounded: Server, start: bytes) -> None:
    with connect(bounded) as sock:
        sock.sendall(start)
        watch = Stopwatch()
        answer = read(sock)
        assert watch.seconds() < 5
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_bytes_that_trickle_in_do_not_prolong_it(bounded: Server) -> None:
    with connect(bounded) as sock:
        sock.settimeout(0.2)
        watch = Stopwatch()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD * 20:
                sock.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if sock.recv(100).startswith(b"HTTP/1.1 408") or watch.seconds() > 8:
                        break
        assert watch.seconds() < 8


def test_a_slow_answer_is_not_a_slow_request(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--request-timeout", "4", FAKE_STEP_SECONDS="1") as server:
        body = {"prompt": "one two", "max_tokens": 6, "ignore_eos": True}
        for _ in range(2):  # the second over the same connection
            assert server.http.post("/v1/completions", json=body).status_code == 200


def test_beyond_the_bound_requests_are_told_to_come_again(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--max-connections", "4") as server:  # which waits for requests while this goes on
        turned_away(server)


def turned_away(bounded: Server) -> None:
    assert bounded.http.post("/v1/completions", content=BODY, headers={"Content-Type": "application/json"}).is_success
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(bounded))
        bounded.wait_for(lambda: bounded.http.get("/v1/models").status_code == 503)
        refused = bounded.http.get("/v1/models")
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["Retry-After"] == "1"
        for path in ("/health", "/ready", "/metrics"):
            assert bounded.http.get(path).status_code == 200
        last = [stack.enter_context(connect(bounded)) for _ in range(RESERVE + 1)][-1]
        assert read(last) == b""  # closed at once, though nothing was sent
    bounded.wait_for(lambda: bounded.http.get("/v1/models").status_code == 200)
