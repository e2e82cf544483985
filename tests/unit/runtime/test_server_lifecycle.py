"""Starting, stopping, clients that leave, cores that die: nobody waits for ever, and /ready tells the truth."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmc.artifacts.plan import Plan
from llmc.runtime import service
from llmc.runtime.options import CoreOptions
from tests.unit.runtime import servers
from tests.unit.runtime.fake_plan import write_plan
from tests.unit.runtime.servers import FAKE_CORE, Server, fake_server
from tests.unit.runtime.stopwatch import Stopwatch

LONG: dict[str, Any] = {"prompt": "one two three", "max_tokens": 400}


@pytest.fixture
def slow(fake_plan: Path) -> Iterator[Server]:
    """The longest answers take it 40 s, and longer on a busy machine: none ends before a test has done what it will."""
    with fake_server(fake_plan, FAKE_STEP_SECONDS="0.1") as running:
        yield running


class Background:
    """A request in a thread. `result` is its response or error."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(server, body), daemon=True)
        self._thread.start()

    def _run(self, server: Server, body: dict[str, Any]) -> None:
        try:
            self.result = httpx.post(f"{server.url}/v1/completions", json=body, timeout=servers.LONG)
        except httpx.HTTPError as error:
            self.result = error

    def join(self) -> Any:
        assert Stopwatch().wait(lambda: not self._thread.is_alive(), 20)
        return self.result


def raw_request(server: Server, body: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sock.sendall(f"{head}\r\n\r\n{body}".encode())
    return sock


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_frees_its_sequences(slow: Server, stream: str) -> None:
    sock = raw_request(slow, f'{{"prompt": ["one two", "three"], "n": 2, "max_tokens": 400, "stream": {stream}}}')
    slow.wait_for(lambda: slow.metric("num_requests_running") == 4)
    sock.close()
    slow.wait_for(lambda: slow.metric("num_requests_running") == 0)
    text = slow.http.get("/metrics").text
    assert 'llmc:request_success_total{finished_reason="abort",model_name="fake"} 4.0' in text


def test_a_client_that_leaves_its_stream_midway(slow: Server) -> None:
    with slow.client.completions.create(model="fake", stream=True, **LONG) as stream:
        for _ in range(3):
            next(iter(stream))
    slow.wait_for(lambda: slow.metric("num_requests_running") == 0)
    assert 'finished_reason="abort",model_name="fake"} 1.0' in slow.http.get("/metrics").text


def test_sigterm_drains(fake_plan: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # nothing ends before it opens
    with fake_server(fake_plan, FAKE_GATE=str(gate)) as server:
        request = Background(server, {**LONG, "max_tokens": 60})
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.status("/ready") == 503)
        assert server.http.get("/ready").json()["error"]["message"] == "the server is shutting down"
        assert server.status("/health") == 200
        late = server.http.post("/v1/completions", json=LONG)
        assert late.status_code == 503
        assert late.json()["error"]["type"] == "service_unavailable"
        gate.touch()
        response = request.join()
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 60
        assert server.finish() == 0


def test_draining_has_an_end(fake_plan: Path, tmp_path: Path) -> None:
    with fake_server(fake_plan, "--shutdown-timeout", "0.3", FAKE_GATE=str(tmp_path / "gate")) as server:
        request = Background(server, LONG)
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        response = request.join()
        assert response.status_code == 500
        assert "shutting down" in response.json()["error"]["message"]
        assert server.finish() == 0
        assert "did not finish in time" in server.log


def test_ctrl_c_exits_with_130(fake_plan: Path) -> None:
    with fake_server(fake_plan) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 130
        assert "Traceback" not in server.log


@pytest.mark.parametrize("kill", [True, False], ids=["core killed", "rank lost"])
def test_the_engines_death_ends_everything_within_5_seconds(slow: Server, kill: bool) -> None:
    request = Background(slow, LONG)
    stream = slow.client.completions.create(model="fake", stream=True, **LONG)
    next(iter(stream))
    slow.wait_for(lambda: slow.metric("num_requests_running") == 2)
    core = slow.core_pid()
    watch = Stopwatch()
    if kill:
        os.kill(core, signal.SIGKILL)
    else:
        Background(slow, {"prompt": "<|die|>"}).join()
    with pytest.raises(openai.APIError, match="generation failed"):
        list(stream)
    response = request.join()
    assert response.status_code == 500
    assert "generation failed" in response.json()["error"]["message"]
    assert slow.status("/ready") in (503, None)
    assert slow.finish(5) == 1
    assert watch.seconds() < 5
    how = "was killed by signal 9 (SIGKILL); if the kernel ran out of memory" if kill else "rank 1 died"
    assert how in slow.log


def test_a_stopped_core_takes_readiness_down(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--shutdown-timeout", "0", FAKE_PROGRESS_DEADLINE="0.5") as server:
        Background(server, {"prompt": "<|hang|>"})
        server.wait_for(lambda: "no step for" in server.http.get("/ready").text)
        assert server.status("/health") == 200


def test_a_core_that_makes_no_step_is_given_up(fake_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_STUCK_SECONDS", 0.0)

    async def ask() -> str | None:
        options = CoreOptions(step_timeout=1.0)
        running = await service.Service.start(Plan.open(fake_plan), options, command=(sys.executable, FAKE_CORE))
        try:
            await running.wait_ready()
            request = running.text.request(running.text.tokenizer.encode("<|hang|>"), running.text.params({}))
            deltas = [delta async for _, delta in running.front.submit([request])]
            return deltas[-1].error
        finally:
            await running.close()

    assert asyncio.run(ask()) == "the engine core has made no step for 1 s"


def test_it_listens_while_it_loads(fake_plan: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fake_server(fake_plan, ready=False, FAKE_LOAD_GATE=str(gate)) as server:
        server.wait_for(lambda: server.status("/health") == 200, 30)
        assert server.http.get("/ready").json()["error"]["message"] == "the engine is loading"
        assert server.http.post("/v1/completions", json=LONG).status_code == 503
        gate.touch()
        server.wait_ready()


def test_sigterm_while_it_loads(fake_plan: Path, tmp_path: Path) -> None:
    with fake_server(fake_plan, ready=False, FAKE_LOAD_GATE=str(tmp_path / "gate")) as server:
        server.wait_for(lambda: server.status("/health") == 200, 30)
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0


def test_a_core_that_cannot_load(fake_plan: Path) -> None:
    with fake_server(fake_plan, ready=False, FAKE_LOAD_ERROR="--kv-bytes 5 holds no block") as server:
        assert server.finish() == 2
        assert server.log.splitlines()[-1] == "error: --kv-bytes 5 holds no block"
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-num-seqs", "9"], 2, ["--max-num-seqs", "9", "8"]),
        (["--max-num-batched-tokens", "65"], 2, ["--max-num-batched-tokens", "65", "64"]),
        (["--kv-bytes", "0"], 2, ["--kv-bytes", "0"]),
        (["--model", "/nowhere"], 3, ["/nowhere"]),
        (["--lock", "/nowhere.lock"], 3, ["/nowhere.lock"]),
        (["--host", "203.0.113.1"], 2, ["203.0.113.1", "--host"]),
    ],
)
def test_options_that_cannot_be_honoured(fake_plan: Path, arguments: list[str], code: int, words: list[str]) -> None:
    with fake_server(fake_plan, *arguments, ready=False) as server:
        assert server.finish() == code
        (line,) = server.log.splitlines()
        assert line.startswith("error: ")
        for word in words:
            assert word in line


def test_a_port_in_use(server: Server, fake_plan: Path) -> None:
    with fake_server(fake_plan, port=server.port, ready=False) as second:
        assert second.finish() == 2
        assert f"127.0.0.1:{server.port}" in second.log


def test_names_in_the_api(fake_plan: Path) -> None:
    names = ("--served-model-name", "a", "--served-model-name", "org/b")
    with fake_server(fake_plan, *names) as server:
        assert [m.id for m in server.client.models.list()] == ["a", "org/b"]
        assert server.http.get("/v1/models/org/b").json()["id"] == "org/b"
        done = server.client.completions.create(model="org/b", prompt="one", max_tokens=1)
        assert done.model == "a"


def test_a_plan_without_a_chat_template(tmp_path: Path) -> None:
    with fake_server(write_plan(tmp_path / "p.plan", template="")) as server:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        response = server.http.post("/v1/chat/completions", json=chat)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert server.client.completions.create(model="fake", prompt="one", max_tokens=1).choices


def test_it_is_bound_to_this_machine_only(server: Server) -> None:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    local = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [a for a in local if int(a.split(":")[1], 16) == server.port] == [f"0100007F:{server.port:04X}"]


def test_an_event_loop_that_hangs_ends_the_server(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    with fake_server(write_plan(tmp_path / "p.plan", template=endless)) as server:
        with pytest.raises(httpx.TransportError):
            server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert server.finish() == 1
        assert "chat_template" in server.log


def test_a_core_that_says_nothing_is_given_up_within_10_seconds(fake_plan: Path) -> None:
    with fake_server(fake_plan) as server:
        request = Background(server, {"prompt": "<|hang|>"})
        watch = Stopwatch()
        assert "no sign of life" in request.join().json()["error"]["message"]
        assert watch.seconds() < 10
        assert server.finish() == 1
