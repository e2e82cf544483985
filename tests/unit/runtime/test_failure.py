"""Every process of a running server is killed, stopped and starved in turn: nobody waits for ever, nothing remains."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.unit.runtime.fake_engine import (
    NAN_TOKEN,
    alive,
    children,
    left_in_shared_memory,
    shared_memory,
    write_engine_plan,
)
from tests.unit.runtime.servers import LONG, Server, real_server
from tests.unit.runtime.stopwatch import Stopwatch
from tests.unit.runtime.test_server_core import with_tokenizer

#: What the issue of readiness allows: every client has an answer, and every process is gone.
WITHIN = 10.0
HANG_TOKEN = NAN_TOKEN  # in no answer
#: An answer that ends, after 4.5 s at least, and one that does not within a minute.
FEW, MANY = 90, 1200


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    return with_tokenizer(
        write_engine_plan(folder / "fake.plan", tp=2, max_seq_len=MANY + 3, step_us=50_000, hang_token=HANG_TOKEN)
    )


class Clients:
    """A stream and a whole answer, each read by a thread to its end, whatever that is."""

    def __init__(self, server: Server, tokens: int = MANY) -> None:
        self._tokens = tokens
        self.ends: list[str] = []
        self._url = f"{server.url}/v1/completions"
        self._threads = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in (True, False)]
        for thread in self._threads:
            thread.start()
        server.wait_for(lambda: server.metric("num_requests_running") == 2)

    def _read(self, stream: bool) -> None:
        ask = {"prompt": [3, 5, 8], "temperature": 0, "ignore_eos": True}
        body = {**ask, "max_tokens": self._tokens, "stream": stream}
        try:
            self.ends.append(httpx.post(self._url, json=body, timeout=LONG).text)
        except httpx.TransportError as error:
            self.ends.append(f"connection lost: {error!r}")

    def join(self, seconds: float) -> list[str]:
        ended = Stopwatch().wait(lambda: not any(thread.is_alive() for thread in self._threads), seconds)
        assert ended, "a client still waits"
        return self.ends


def processes(server: Server) -> dict[str, int]:
    core = server.core_pid()
    first, second = children(core)
    return {"http": server.process.pid, "core": core, "rank 0": first, "rank 1": second}


def wait_gone(pids: dict[str, int], seconds: float) -> None:
    """Fails unless every process ends within that time: the kernel kills each when its parent has gone."""
    gone = Stopwatch().wait(lambda: not any(map(alive, pids.values())), seconds)
    assert gone, f"still there: {[name for name, pid in pids.items() if alive(pid)]}"


def starve(pid: int) -> None:
    """Lets a process allocate no more: what a container's limit does to one that cannot be killed for it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("harm", [kill, stop])
@pytest.mark.parametrize("victim", ["http", "core", "rank 0", "rank 1"])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_the_end_of_one_process_is_the_end_of_all(
    plan: Path, victim: str, harm: Callable[[int], None], busy: bool
) -> None:
    before = shared_memory()
    with real_server(plan) as server:
        pids = processes(server)
        clients = Clients(server) if busy else None
        watch = Stopwatch()
        harm(pids[victim])
        for end in clients.join(WITHIN) if clients else ():
            assert "connection lost" in end if victim == "http" else "generation failed" in end
        code = server.finish(WITHIN)
        assert code == (-signal.SIGKILL if victim == "http" else 1)
        wait_gone(pids, WITHIN - watch.seconds())
        assert "Traceback" not in server.log
    assert left_in_shared_memory(before) == set()


@pytest.mark.parametrize("victim", ["http", "core", "rank 0"])
def test_memory_that_runs_out_leaves_nobody_waiting(plan: Path, victim: str) -> None:
    with real_server(plan) as server:
        pids = processes(server)
        clients = Clients(server, FEW)
        starve(pids[victim])
        greedy = {"prompt": "w3 " * 2_000_000}
        with contextlib.suppress(httpx.TransportError):
            assert httpx.post(f"{server.url}/v1/completions", json=greedy, timeout=LONG).status_code >= 400
        clients.join(30)  # whoever can do without more memory gives an answer
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        # A library that gets no memory may abort the process that it is in.
        assert server.finish(WITHIN) in (0, 1, -signal.SIGABRT)
        wait_gone(pids, 5)


def test_a_step_that_does_not_end(plan: Path) -> None:
    """Readiness is red within 10 s, then requests get an error, then the process ends with 1 for its supervisor."""
    with real_server(plan, "--step-timeout", "16") as server:
        pids = processes(server)
        clients = Clients(server)
        watch = Stopwatch()
        hung: list[httpx.Response] = []
        body = {"prompt": [HANG_TOKEN]}
        thread = threading.Thread(
            target=lambda: hung.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONG)), daemon=True
        )
        thread.start()
        server.wait_for(lambda: "has made no step" in server.http.get("/ready").text, WITHIN)
        assert watch.seconds() < WITHIN
        for end in clients.join(2 * WITHIN):
            assert "gave no answer" in end
        assert Stopwatch().wait(lambda: hung, WITHIN)
        assert hung[0].status_code == 500
        assert server.finish(WITHIN) == 1
        wait_gone(pids, 5)
