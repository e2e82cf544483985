"""`llmc bench serve`: what it asks, what it measures of a real server, what it writes."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from llmc.bench.serving.client import Measured, Target
from llmc.bench.serving.frontier import draw
from llmc.bench.serving.run import result
from llmc.bench.serving.workload import Workload, asks
from llmc.cli import main
from llmc.runtime.server.slo import Slo
from tests.unit.runtime.fake_plan import write_plan
from tests.unit.runtime.servers import Server, fake_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fake_server(write_plan(tmp_path_factory.mktemp("plan") / "fake.plan"), FAKE_STEP_SECONDS="0.005") as running:
        yield running


def test_the_same_seed_asks_the_same() -> None:
    one, two, other = (asks(Workload(seed=seed, range_ratio=0.5, request_rate=5)) for seed in (1, 1, 2))
    assert one == two != other


def test_lengths_and_prefixes_are_as_asked() -> None:
    found = asks(Workload(200, 20, 10, range_ratio=0.5, prefix_len=7, num_prefixes=2))
    lengths = {len(ask.prompt.split()) - 7 for ask in found}
    assert lengths == set(range(10, 31))
    assert {ask.max_tokens for ask in found} == set(range(5, 16))
    prefixes = [" ".join(ask.prompt.split()[:7]) for ask in found]
    assert len(set(prefixes)) == 2
    assert prefixes[0] == prefixes[2] != prefixes[1]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = [ask.at for ask in asks(Workload(20_000, 1, 1, request_rate=50, burstiness=burstiness))]
    gaps = np.diff(times)
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # A gamma distribution of shape b deviates by 1 / sqrt(b) of its mean.
    assert statistics.pstdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.1)


def test_all_at_once() -> None:
    assert {ask.at for ask in asks(Workload(10))} == {0.0}


def test_the_keys_are_those_of_vllm() -> None:
    measured = [
        Measured(0.0, 0.1, [0.02, 0.04], 0.16, 10, 3),
        Measured(0.1, 0.3, [0.1], 0.4, 12, 2),
        Measured(0.2, error="HTTP 500: no"),
    ]
    slo = Slo.parse("ttft=200ms,tpot=30ms")
    run = result(Workload(3), Target("x", "m"), measured, 2.0, max_concurrency=2, label=None, slo=slo, detailed=True)
    assert (run["completed"], run["failed"], run["num_prompts"]) == (2, 1, 3)
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (22, 5)
    assert (run["request_throughput"], run["output_throughput"], run["total_token_throughput"]) == (1.0, 2.5, 13.5)
    assert run["request_goodput"] == 0.5
    assert run["mean_ttft_ms"] == pytest.approx(200)
    assert run["mean_tpot_ms"] == pytest.approx((30 + 100) / 2)
    assert run["median_itl_ms"] == pytest.approx(40)
    assert run["p99_e2el_ms"] == pytest.approx(397.6)
    assert run["max_concurrent_requests"] == 2
    assert run["errors"] == ["", "", "HTTP 500: no"]
    assert run["request_rate"] == "inf"


def test_a_sweep_of_a_server(server: Server, tmp_path: Path) -> None:
    out, plot = tmp_path / "runs.jsonl", tmp_path / "frontier.svg"
    arguments = ["bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--input-len", "4"]
    arguments += ["--output-len", "8", "--ignore-eos", "--max-concurrency", "1,3", "--slo", "e2el=60s"]
    arguments += ["--result-filename", str(out), "--save-detailed", "--plot", str(plot), "--label", "fake"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    one, three = map(json.loads, out.read_text().splitlines())
    for run, most in ((one, 1), (three, 3)):
        assert (run["completed"], run["failed"], run["max_concurrency"]) == (6, 0, most)
        assert run["total_output_tokens"] == 6 * 8
        assert run["max_concurrent_requests"] == most  # the first ones begin before anything is answered
        assert run["request_goodput"] == pytest.approx(run["request_throughput"])
        # Eight steps of 5 ms; pieces of an answer may come together.
        assert run["median_ttft_ms"] >= 4
        assert run["median_e2el_ms"] >= 35
        assert 0 <= run["median_tpot_ms"] <= run["median_e2el_ms"]
    assert "3 at once" in plot.read_text()
    again = CliRunner().invoke(main, [*arguments[:-1], "again", "--compare", str(out), "--num-prompts", "1"])
    assert again.exit_code == 0, again.output
    assert {"fake", "again"} <= {text.text for text in ElementTree.parse(plot).iter() if text.text}


def test_chat(server: Server) -> None:
    arguments = ["bench", "serve", "--base-url", server.url, "--endpoint", "chat", "--num-prompts", "2"]
    found = CliRunner().invoke(main, [*arguments, "--input-len", "4", "--output-len", "4", "--request-rate", "100"])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--base-url", "http://127.0.0.1:1"], 6, "ConnectError"),
        (["--model", "other"], 6, "HTTP 404"),
        (["--plot", "x.png"], 2, "--plot"),
        (["--extra-body", "[]"], 2, "--extra-body"),
        (["--compare", "/nowhere"], 2, "--compare"),
        (["--slo", "soon"], 2, "--slo"),
        (["--request-rate", "0"], 2, "--request-rate"),
        (["--max-concurrency", "1,x"], 2, "--max-concurrency"),
    ],
)
def test_what_cannot_be_measured(server: Server, arguments: list[str], code: int, words: str) -> None:
    found = CliRunner().invoke(main, ["bench", "serve", "--base-url", server.url, *arguments])
    assert found.exit_code == code, found.output
    assert words in found.output
    assert "Traceback" not in found.output


def test_there_is_nothing_to_draw_without_a_second_token() -> None:
    run = result(Workload(1), Target("x", "m"), [], 1.0, max_concurrency=None, label=None, slo=None)
    with pytest.raises(ValueError, match="time per token"):
        draw([run])


def test_a_plan_is_measured_by_name_or_by_default() -> None:
    for arguments in (["bench", "/nowhere.plan"], ["bench", "plan", "/nowhere.plan"]):
        found = CliRunner().invoke(main, arguments)
        assert found.exit_code == 3
        assert "/nowhere.plan" in found.output
