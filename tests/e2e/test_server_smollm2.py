"""The real model over HTTP, as OpenAI's client sees it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.fake_engine import children
from tests.unit.runtime.servers import Server, real_server

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

MODEL = "smollm2"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
LIMIT_BYTES = 200e6


@pytest.fixture(scope="module")
def server(smollm2_plan: Path) -> Iterator[Server]:
    with real_server(smollm2_plan, "--served-model-name", MODEL) as running:
        yield running


def complete(server: Server, prompt: str, **options: Any) -> str:
    return server.client.completions.create(model=MODEL, prompt=prompt, **options).choices[0].text


def test_the_capital_of_france(server: Server) -> None:
    done = server.client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=64)
    assert "Paris" in (done.choices[0].message.content or "")
    assert done.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(server: Server) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64}
    whole = server.client.chat.completions.create(**arguments)
    chunks = list(server.client.chat.completions.create(**arguments, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_a_stop_string_cuts_the_same_answer(server: Server) -> None:
    text = complete(server, "One, two, three,", temperature=0, max_tokens=24)
    stop = text[8:11]
    assert complete(server, "One, two, three,", temperature=0, max_tokens=24, stop=stop) == text[: text.index(stop)]


def test_log_probabilities_are_those_of_the_choice(server: Server) -> None:
    done = server.client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    for entry in logprobs.content or []:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)


def test_a_seed_gives_the_same_answer_alone_and_among_others(server: Server) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    alone = complete(server, "Once upon a time", **options)
    prompts = ["Once upon a time", *(f"Tell me {i} things about the number {i}." for i in range(7))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt, **options), prompts))
    assert together[0] == alone
    done = server.client.completions.create(model=MODEL, prompt=prompts[0], n=3, **options)
    assert done.choices[0].text == alone
    assert len({choice.text for choice in done.choices}) == 3


def test_the_prompts_limit_is_the_profiles(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert model.model_extra is not None
    most = model.model_extra["max_model_len"]
    response = server.http.post("/v1/completions", json={"prompt": [5] * (most + 1)})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert str(most) in message
    assert str(most + 1) in message


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    with server.client.completions.create(
        model=MODEL, prompt="Count to a thousand:", stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))  # which comes long before the last
    server.wait_for(lambda: server.metric("num_requests_running") == server.metric("kv_cache_usage_perc") == 0)
    assert f'finished_reason="abort",model_name="{MODEL}"}} 1.0' in server.http.get("/metrics").text


def memory_without(path: Path, pids: list[int]) -> float:
    """Bytes of memory of some processes, shared pages counted once, without those of a mapped file."""
    total = 0
    for pid in pids:
        counted = True
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, *rest = line.split()
            if not name.endswith(":"):
                counted = rest[-1:] != [str(path.resolve())]
            elif name == "Pss:" and counted:
                total += int(rest[0]) * 1024
    return total


def test_serving_takes_little_memory_besides_the_weights(smollm2_plan: Path) -> None:
    with real_server(smollm2_plan, "--served-model-name", MODEL) as server:
        complete(server, "The capital of France is", temperature=0, max_tokens=8)
        core = server.core_pid()
        pids = [server.process.pid, core, *children(core)]
        used = memory_without(smollm2_plan, pids)
        assert used < LIMIT_BYTES, f"{used / 1e6:.0f} MB"


def test_sigterm_lets_an_answer_finish(smollm2_plan: Path) -> None:
    with real_server(smollm2_plan, "--served-model-name", MODEL) as server:
        stream = server.client.completions.create(
            model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=200, extra_body={"ignore_eos": True},
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        first = next(stream)
        server.process.send_signal(signal.SIGTERM)
        *_, last = [first, *stream]
        assert last.usage is not None
        assert last.usage.completion_tokens == 200
        assert server.finish() == 0
