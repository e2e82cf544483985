"""What operators see: vLLM's names under llmc:, times that add up, goodput against service levels."""

from pathlib import Path

import pytest

from llmc.artifacts.errors import UsageError
from llmc.runtime.front import Times
from llmc.runtime.messages import SamplingParams
from llmc.runtime.sequence import Sequence
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.slo import Slo
from tests.unit.runtime.fake_engine import write_engine_plan
from tests.unit.runtime.servers import real_server
from tests.unit.runtime.test_front import TOKENIZER
from tests.unit.runtime.test_server_core import with_tokenizer


def ended(tokens: int, reason: str = "stop") -> Sequence:
    sequence = Sequence(SamplingParams(), 5, TOKENIZER.detokenizer())
    sequence.completion_tokens = tokens
    sequence.finish_reason = reason  # type: ignore[assignment]
    return sequence


def value(metrics: Metrics, line: str) -> float:
    (found,) = (text for text in metrics.scrape().decode().splitlines() if text.startswith(f"llmc:{line} "))
    return float(found.rsplit(" ", 1)[1])


def test_the_times_of_a_sequence() -> None:
    metrics = Metrics("m", {})
    metrics.on_finish(ended(5), Times(queued=0.25, first=1.0, last=3.0, end=3.5))
    metrics.on_finish(ended(0, "abort"), Times(end=9.0))
    label = '{model_name="m"}'
    for name, seconds in (
        ("time_to_first_token_seconds", 1.0),
        ("request_queue_time_seconds", 0.25),
        ("request_prefill_time_seconds", 0.75),
        ("request_decode_time_seconds", 2.0),
        ("request_inference_time_seconds", 3.25),
        ("request_time_per_output_token_seconds", 0.5),
    ):
        assert value(metrics, f"{name}_sum{label}") == seconds
        assert value(metrics, f"{name}_count{label}") == 1
    assert value(metrics, f"e2e_request_latency_seconds_count{label}") == 2


def test_goodput_counts_what_met_every_level() -> None:
    metrics = Metrics("m", {}, Slo.parse("ttft=500ms, tpot=0.1s"))
    metrics.on_finish(ended(3), Times(first=0.5, last=0.7, end=0.7))  # met, on the edge of both
    metrics.on_finish(ended(1), Times(first=0.1, last=0.1, end=0.1))  # one token: no tpot to miss
    metrics.on_finish(ended(3), Times(first=0.6, last=0.7, end=0.7))
    metrics.on_finish(ended(3), Times(first=0.6, last=2.0, end=2.0))
    metrics.on_finish(ended(0, "error"), Times(end=0.1))
    metrics.on_finish(ended(0, "abort"), Times(end=0.1))  # the client's own wish
    assert value(metrics, 'goodput_requests_total{model_name="m"}') == 2
    missed = {name: value(metrics, f'slo_violations_total{{model_name="m",slo="{name}"}}') for name in ("ttft", "tpot")}
    assert missed == {"ttft": 2, "tpot": 1}
    assert value(metrics, 'slo_violations_total{model_name="m",slo="error"}') == 1


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=5m", "itl=5ms", "ttft=1s,ttft=2s", "ttft=-1s"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        Slo.parse(text)


def test_the_engine_counts_its_steps(tmp_path: Path) -> None:
    plan = with_tokenizer(write_engine_plan(tmp_path / "engine.plan"))
    with real_server(plan, "--slo", "e2el=60s") as server:
        body = {"prompt": [3, 5, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        server.http.post("/v1/completions", json=body)
        server.wait_for(lambda: server.metric("num_requests_running") == 0)
        server.wait_for(lambda: server.metric("generation_tokens_total") == 6)
        assert server.metric("engine_steps_total") == 6
        assert server.metric("engine_step_tokens_total") == 3 + 5
        assert server.metric("engine_step_sequences_total") == 6
        assert server.metric("iteration_tokens_total_count") == 6
        assert server.metric("request_queue_time_seconds_count") == 1
        assert server.metric("goodput_requests_total") == 1
        assert server.metric("max_num_seqs") == 8
        server.http.post("/v1/completions", json={"prompt": 5})
        text = server.http.get("/metrics").text
        assert 'llmc:admission_rejections_total{model_name="fake",reason="invalid"} 1.0' in text
