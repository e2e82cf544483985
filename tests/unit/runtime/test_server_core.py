"""The server over the real core and two real ranks, whose compiled model is a hash of the tokens in KV memory."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmc.artifacts.plan import Plan, PlanWriter
from tests.unit.runtime.fake_engine import VOCAB, alive, children, greedy, write_engine_plan
from tests.unit.runtime.servers import Server, real_server
from tests.unit.runtime.stopwatch import Stopwatch

FULL = 1200


def with_tokenizer(path: Path) -> Path:
    """The plan with a tokenizer whose words are w0, w1, and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    plan = Plan.open(path)
    with PlanWriter(path.with_name("server.plan")) as writer:
        for section in plan.manifest.sections:
            writer.add(section.name, bytes(plan.section(section.name)))
        writer.add("tokenizer/tokenizer.json", tokenizer.to_str().encode())
        writer.seal(plan.manifest)
        return writer.publish()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An answer of full length takes it a minute at least: none ends before a test has done what it will."""
    folder = tmp_path_factory.mktemp("engine")
    return with_tokenizer(write_engine_plan(folder / "fake.plan", tp=2, max_seq_len=FULL, step_us=50_000))


@pytest.fixture
def engine(plan: Path) -> Iterator[Server]:
    with real_server(plan) as running:
        yield running


def all_gone(pids: list[int]) -> bool:
    """Whether the processes end. A rank notices its core's end a moment later."""
    return Stopwatch().wait(lambda: not any(map(alive, pids)), 5)


def test_answers_are_the_cores(engine: Server) -> None:
    prompt = [3, 5, 8]
    done = engine.client.completions.create(
        model="fake", prompt=prompt, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert done.choices[0].text == "".join(f"w{token}" for token in greedy(prompt, 12))
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_answered_429_with_retry_after(plan: Path, stream: bool) -> None:
    with real_server(plan, "--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        ask = {"model": "fake", "prompt": [3, 5], "temperature": 0, "ignore_eos": True, "stream": stream}
        ahead = leave(server, {**ask, "max_tokens": FULL - 2})
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(server.http.post, "/v1/completions", json={**ask, "max_tokens": 20}) for _ in range(3)]
            server.wait_for(lambda: sum(future.done() for future in found) == 2)
            ahead.close()
            answers = [future.result() for future in found]
        turned = [answer for answer in answers if answer.status_code == 429]
        assert len(turned) == 2
        for answer in turned:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert {answer.status_code for answer in answers} == {200, 429}
        # What could never be taken is not told to come again.
        never = server.http.post("/v1/completions", json={**ask, "n": 3})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert "at most 2 at once" in never.json()["error"]["message"]


def test_how_a_request_is_treated(engine: Server) -> None:
    prompt = [7] * 40

    def ask(**given: object) -> tuple[str, int]:
        body = {"model": "fake", "prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True, **given}
        answer = engine.http.post("/v1/completions", json=body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    text = "".join(f"w{token}" for token in greedy(prompt, 2))
    assert ask() == (text, 0)
    assert ask(priority="batch") == (text, 36)
    assert ask(priority=0, cache_salt="x") == (text, 0)
    assert ask(cache_salt="x") == (text, 36)
    assert ask(skip_reading_prefix_cache=True) == (text, 0)
    for param, value in (("priority", "urgent"), ("priority", 3), ("cache_salt", ""), ("cache_salt", "\ud800")):
        answer = engine.http.post(
            "/v1/completions",
            content=json.dumps({"prompt": [1], param: value}),
            headers={"Content-Type": "application/json"},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_client_that_leaves_frees_the_blocks(engine: Server) -> None:
    with engine.client.completions.create(
        model="fake", prompt=[3, 5, 8], stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    engine.wait_for(lambda: engine.metric("num_requests_running") == 0)
    engine.wait_for(lambda: engine.metric("kv_cache_usage_perc") == 0)


def test_sigterm_ends_the_core_and_its_ranks(engine: Server) -> None:
    core = engine.core_pid()
    ranks = children(core)
    assert len(ranks) == 2
    engine.process.send_signal(signal.SIGTERM)
    assert engine.finish() == 0
    assert all_gone([core, *ranks])


def test_a_core_that_is_stopped_dies_with_its_front_end(engine: Server) -> None:
    core = engine.core_pid()
    ranks = children(core)
    os.kill(core, signal.SIGSTOP)
    engine.process.kill()
    assert all_gone([core, *ranks])


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_any_state_frees_everything(plan: Path, state: str, stream: bool) -> None:
    with real_server(plan, "--max-num-seqs", "1", "--max-num-batched-tokens", "2") as server:
        body = {"prompt": [3, 5, 8], "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": stream}
        ahead = leave(server, body) if state == "queued" else None
        if ahead is not None:
            server.wait_for(lambda: server.metric("num_requests_running") == 1)
        # Two tokens a step of 50 ms: a prompt of 1120 takes half a minute.
        long = {"prompt": list(range(40)) * 28, "max_tokens": 10} if state == "prefilling" else {}
        client = leave(server, {**body, **long})
        gauge = "num_requests_waiting" if state == "queued" else "num_requests_running"
        server.wait_for(lambda: server.metric(gauge) == 1)
        if state == "decoding":
            server.wait_for(lambda: server.metric("generation_tokens_total") > 1)
        client.close()
        server.wait_for(lambda: server.metric(gauge) == 0)
        if state == "prefilling":
            assert server.metric("generation_tokens_total") == 0
        if ahead is not None:
            ahead.close()
        server.wait_for(lambda: server.metric("kv_cache_usage_perc") == server.metric("num_requests_running") == 0)
        done = server.http.post("/v1/completions", json={**body, "stream": False, "max_tokens": 5})
        assert done.json()["choices"][0]["text"] == "".join(f"w{token}" for token in greedy(body["prompt"], 5))


@pytest.mark.parametrize("state", ["preempted", "swapped"])
def test_a_client_that_leaves_while_set_back_frees_everything(plan: Path, state: str) -> None:
    # Blocks of 4 tokens for one sequence of full length, so the younger of two has to give way; to compute its prompt
    # anew would take a second, to copy it takes milliseconds.
    host = ["--kv-host-bytes", str(FULL // 4 * 64)] if state == "swapped" else []
    with real_server(plan, "--kv-bytes", str(FULL // 4 * 64), *host) as server:
        body = {"max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
        elder = leave(server, {**body, "prompt": [1] * 580, "cache_salt": "a"})
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        younger = leave(server, {**body, "prompt": [2] * 580, "cache_salt": "b"})
        server.wait_for(
            lambda: server.metric("num_requests_waiting") == server.metric("num_preemptions_total") == 1, 20
        )
        assert (server.metric("kv_host_blocks_used") > 0) == (state == "swapped")
        younger.close()
        server.wait_for(lambda: server.metric("num_requests_waiting") == server.metric("kv_host_blocks_used") == 0)
        assert server.metric("num_requests_running") == 1
        elder.close()
        server.wait_for(lambda: server.metric("kv_cache_usage_perc") == server.metric("num_requests_running") == 0)


def leave(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection over which a request was sent; closing it is the client's leaving."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(head.encode() + b"\r\n\r\n" + data)
    return sock
