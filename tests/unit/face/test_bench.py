"""`llmc bench`: which works are timed, in what order, what they must cost, and what is printed and drawn of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmc.artifacts.errors import CheckpointError, EnvironmentFault, PlanError, UsageError
from llmc.artifacts.plan import Plan
from llmc.bench import llama_cpp
from llmc.bench.engine import engine
from llmc.bench.machine import Memory, Rates
from llmc.bench.peer import parse_peer, peer
from llmc.bench.picture import Axis, Box, Point, _labels, draw
from llmc.bench.roofline import Costs, Demand, bound
from llmc.bench.run import Report, SystemRow, run
from llmc.bench.work import Timing, Work, measure, prompt, works
from llmc.builder.build import Progress, compile_plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.options import BuildOptions
from llmc.builder.page.costs import Cost
from llmc.builder.verdict import Verdict
from llmc.cli import main
from llmc.plugins.cpu.products import Products
from tests.models import save_checkpoint

torch.set_num_threads(1)
RATES = Rates(2, 10e9, {Products.FLOATS: 100e9, Products.INT8_PAIRS: 200e9})


def floats(**cost: int) -> Demand:
    return Demand(Cost(**cost), {Products.FLOATS: cost["flops"]})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Path:
    """A tiny model at bf16 on two ranks."""
    path = checkpoint.parent / "tiny.plan"
    options = BuildOptions(precision="bf16", tp=2)
    compile_plan(open_checkpoint(checkpoint), options, None, path, Progress(), lambda path: Verdict({}, {}))
    return path


class Fake:
    """A system that notes what it is asked."""

    load = 0.5
    processes = "none"

    def __init__(self, name: str, log: list[tuple[str, str, int]]) -> None:
        self.name, self._log = name, log

    def run(self, work: Work, steps: int) -> float:
        self._log.append((self.name, work.kind, steps))
        return float(len(self._log))

    def memory(self) -> Memory:
        return Memory(1, 2)


def test_chosenare_lowered_to_the_plan_and_none_comes_twice() -> None:
    found = works((1, 4, 64), (128, 2048, 8192), (512,), max_num_seqs=8, longest=1000)
    assert [work.name for work in found] == [
        "prefill 512",
        "decode batch 1, context 128",
        "decode batch 4, context 128",
        "decode batch 8, context 128",
        "decode batch 1, context 1000",
    ]
    assert [work.tokens for work in found] == [512, 1, 4, 8, 1]


def test_systems_take_turns_and_the_first_round_does_not_count() -> None:
    log: list[tuple[str, str, int]] = []
    rounds: list[int] = []
    chosen = [Work("prefill", 1, 8), Work("decode", 2, 8)]
    found = measure([Fake("a", log), Fake("b", log)], chosen, 2, 5, lambda: rounds.append(len(log)))
    kinds = [("a", "prefill"), ("b", "prefill"), ("a", "decode"), ("b", "decode")]
    assert [entry[:2] for entry in log] == kinds * 3
    assert [entry[2] for entry in log] == [1] * 4 + [5] * 8
    assert rounds == [0, 4, 8]
    decode = next(t for t in found if (t.system, t.work.kind) == ("b", "decode"))
    assert decode.seconds == (8.0, 12.0)
    assert decode.rate == (2 / 10, 2 / 12, 2 / 8)


def test_a_bound_is_the_longer_of_reads_and_flops() -> None:
    read = bound(floats(weights=900, activations=10**9, kv=100, flops=1000), RATES)
    assert (read.reads, read.by, read.seconds) == (1000, "reads", 1000 / 10e9)
    multiplied = bound(floats(weights=900, kv=100, flops=100_000), RATES)
    assert (multiplied.by, multiplied.seconds) == ("FLOPs", 1e-6)
    assert multiplied.share(4e-6) == 0.25


def test_every_operation_counts_at_the_rate_of_its_products() -> None:
    whole = Demand(Cost(weights=900, flops=400_000), {Products.INT8_PAIRS: 400_000})
    alone = bound(whole, RATES)
    assert (alone.flops, alone.by, alone.seconds, alone.products) == (400_000, "FLOPs", 2e-6, Products.INT8_PAIRS)
    both = bound(whole + floats(kv=100, flops=100_000) + floats(flops=100_000), RATES)
    assert (both.reads, both.flops, both.products) == (1000, 600_000, Products.INT8_PAIRS)
    assert both.seconds == pytest.approx(2e-6 + 2e-6)
    half = RATES.part(2)
    assert (half.threads, half.reads, half.flops[Products.INT8_PAIRS]) == (1, 5e9, 100e9)
    assert RATES.multiplies == "100 GFLOP/s (float32), 200 GFLOP/s (INT8 pairs)"


def test_costs_of_a_plan(plan: Path) -> None:
    costs = Costs(Plan.open(plan))
    one, four = costs.of(Work("decode", 1, 64)), costs.of(Work("decode", 4, 64))
    layer = 9 * 8 * 72 + 2 * 3 * 8 * 72 + 72 * 9 * 8 + 3 * 100 * 72  # q, k and v, o, gate, up and down
    assert one.cost.flops > 2 * (2 * layer + 72 * 300)
    assert one.cost.flops < 2.5 * (2 * layer + 72 * 300)
    assert four.cost.flops == 4 * one.cost.flops
    assert four.cost.kv == 4 * one.cost.kv
    assert four.cost.weights < 1.1 * one.cost.weights  # read once; only rows of the embedding are more
    assert one.flops == {Products.FLOATS: one.cost.flops}  # x86-64-v3, bf16
    # A prompt in two steps reads all weights twice, and costs no more operations than in one but for its logits.
    most = Plan.open(plan).manifest.profile.max_num_batched_tokens
    assert costs._steps(Work("prefill", 1, most + 8))[1].tokens == 8
    assert [step.rows for step in costs._steps(Work("prefill", 1, most + 8))] == [0, 1]


def test_costs_refuse_a_plan_that_is_lowered_otherwise(plan: Path) -> None:
    opened = Plan.open(plan)
    rank = opened.manifest.ranks[0]
    object.__setattr__(rank, "launches", rank.launches + 1)
    with pytest.raises(PlanError, match=r"tiny\.plan: rank 0 has \d+ launches.*rebuild the plan"):
        Costs(opened)


def test_an_engine_is_timed_launch_by_launch(plan: Path) -> None:
    work = Work("decode", 3, 40)
    with engine(plan, [work], 4, threads=1, timed=True) as system:
        seconds = system.run(work, 4)
        ranks = system.launch_seconds()
        memory = system.memory()
        assert 1 << 20 < memory.held <= memory.peak
        assert system.processes == "2 rank processes, without the one that hands out steps"
    assert [len(times) for times in ranks] == [rank.launches for rank in Plan.open(plan).manifest.ranks]
    assert all(time >= 0 for times in ranks for time in times)
    assert 0 < sum(ranks[0]) < 100 * seconds
    rows = Costs(Plan.open(plan)).operators(work, ranks[0])
    assert sum(row.launches for row in rows) == len(ranks[0])
    assert sum(row.seconds for row in rows) == pytest.approx(sum(ranks[0]))
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert any(row.op == "linear" and row.demand.cost.weights > 0 for row in rows)


def test_an_engine_that_is_not_timed_has_no_times(plan: Path) -> None:
    with engine(plan, [Work("prefill", 1, 8)], 1, threads=1) as system, pytest.raises(ValueError, match="not timed"):
        system.launch_seconds()


def test_the_engine_knows_the_machine(plan: Path) -> None:
    with engine(plan, [Work("prefill", 1, 8)], 1, threads=1) as system:
        raw = np.ones((16 << 20) + 64, np.uint8)
        start = -raw.ctypes.data % 64
        data = raw[start : start + (16 << 20)]
        # Milliseconds each. The best of some: other work on the machine only takes from a rate.
        reads = max(system.library.read_rate(data, 2) for _ in range(20))
        flops = [
            max(system.library.product_rate(kind, 100_000, 1) for _ in range(20))
            for kind in (Products.FLOATS, Products.INT8_PAIRS)
        ]
        with pytest.raises(PlanError, match="no instructions for products of kind 4"):
            system.library.product_rate(Products.INT8_TILES, 100_000, 1)
    assert 1e8 < reads < 1e13
    assert all(1e9 < rate < 1e13 for rate in flops)


def test_a_run_as_json_and_as_a_picture(plan: Path, tmp_path: Path) -> None:
    picture = tmp_path / "roofline.svg"
    options = ["--prefill", "32", "--batch", "1,2", "--context", "64", "--repeats", "1", "--decode-tokens", "2"]
    done = CliRunner().invoke(main, ["bench", str(plan), *options, "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["systems"][0]["peak_memory"] > 0
    assert data["limits"][-1]["reads"] > 0
    assert data["limits"][-1]["flops"]["float32"] > 0
    assert [(w["kind"], w["batch"], w["context"]) for w in data["works"]] == [
        ("prefill", 1, 32),
        ("decode", 1, 128),
        ("decode", 2, 128),
        ("decode", 1, 64),
    ]
    for work in data["works"]:
        assert work["share_of_bound"] > 0
        assert work["tokens_per_second"]["min"] <= work["tokens_per_second"]["median"]
    assert [table["kind"] for table in data["operators"]] == ["prefill", "decode"]
    texts = [element.text for element in ElementTree.parse(picture).iter() if element.text]
    assert any(re.match(r"decode batch 2, context 128 · \d+%", text) for text in texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--against", "llama.cpp"], "--against llama.cpp=PATH"),
        (["--against", "ollama=x"], "'ollama' is not one of"),
        (["--against", "llama.cpp=/nowhere.gguf"], "/nowhere.gguf does not exist"),
        (["--model", "x"], "--model is for --against transformers"),
        (["--plot", "picture.png"], "ends in .svg"),
        (["--batch", "1,two"], "not a list of numbers"),
        (["--prefill", "", "--batch", "", "--context", ""], "nothing to time"),
    ],
)
def test_what_cannot_be_timed_is_refused(plan: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["bench", str(plan), *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_peers_by_name(tmp_path: Path) -> None:
    assert parse_peer(f"llama.cpp={tmp_path}", None) == ("llama.cpp", tmp_path)
    assert parse_peer("transformers", tmp_path) == ("transformers", tmp_path)
    with pytest.raises(UsageError, match="or --model"):
        parse_peer("transformers", None)


def test_transformers_beside_the_plan(plan: Path, checkpoint: Path) -> None:
    chosen = [Work("prefill", 1, 16), Work("decode", 2, 16)]
    report = run(plan, chosen, [("transformers", checkpoint)], repeats=1, steps=2)
    assert [row.name for row in report.systems] == ["llmc bf16 tp 2", "transformers fp32 eager"]
    assert {(t.system, t.work) for t in report.timings} == {(r.name, w) for r in report.systems for w in chosen}
    assert all(t.median > 0 for t in report.timings)
    for row in report.systems:
        assert row.memory.held > 1 << 20
        assert row.memory.peak > 1 << 20
    assert report.systems[1].processes == "its one process"


def test_memory_that_was_given_back_is_in_the_peak() -> None:
    code = "b = bytearray(64 << 20); b[::4096] = b[::4096]; del b; print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        one, two = Memory.of([process.pid]), Memory.of([process.pid, process.pid])
        process.communicate("\n")
    assert one.peak > one.held + (50 << 20)
    assert two.peak == 2 * one.peak
    assert one.most(Memory(1 << 40, 0)) == Memory(1 << 40, one.peak)


def fake_library(package: Path, text: str) -> Path:
    """A package of that name in place of a peer's library."""
    package.mkdir()
    (package / "__init__.py").write_text(text)
    return package


@pytest.mark.parametrize(
    ("without", "words"),
    [("", "not laid out as in .*'n_ctx': 511"), ("llama_decode", "exports no llama_decode")],
)
def test_another_llama_cpp_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, words: str
) -> None:
    """Instead of reading a struct that has changed."""
    package = fake_library(tmp_path / "xllamacpp", "")
    names = set(llama_cpp._SIGNATURES) - {"llama_context_default_params", without}
    code = "void llama_context_default_params(int *p) { p[0] = 511; }\n"
    code += "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(package / "xllamacpp.abi3.so")]
    subprocess.run(command, input=code, text=True, check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=rf"^llama\.cpp: .*{words}"), peer("llama.cpp", tmp_path, 1):
        pass


def test_a_file_that_openvino_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(
        tmp_path / "openvino_genai",
        "class SchedulerConfig: pass\n"
        "def LLMPipeline(path, device, scheduler_config, INFERENCE_NUM_THREADS):\n"
        "    assert scheduler_config.enable_prefix_caching is False\n"
        "    raise RuntimeError('Exception from core.cpp:1\\nno such architecture')\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = r"^openvino: .*OpenVINO cannot load it: no such architecture"
    with pytest.raises(CheckpointError, match=words), peer("openvino", tmp_path / "model.gguf", 1):
        pass


def test_vllm_runs_in_the_python_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_library(
        tmp_path / "vllm",
        "from types import SimpleNamespace as Space\n"
        "SamplingParams = lambda **fields: Space(**fields)\n"
        "class LLM:\n"
        "    def __init__(self, path, enable_prefix_caching, seed):\n"
        "        if path.endswith('bad'): raise ValueError('first\\nno such architecture')\n"
        "        assert enable_prefix_caching is False\n"
        "        config = Space(dtype='torch.bfloat16', get_vocab_size=lambda: 99)\n"
        "        self.llm_engine = Space(model_config=config)\n"
        "    def generate(self, prompts, params, use_tqdm):\n"
        "        assert all(max(p['prompt_token_ids']) < 99 for p in prompts) and params.ignore_eos\n"
        "        text = f'{len(prompts)} of {len(prompts[0][\"prompt_token_ids\"])}, {params.max_tokens} more'\n"
        "        print(text, file=open(__file__ + '.calls', 'a'))\n",
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("LLMC_VLLM_PYTHON", str(python))
    with peer("vllm", tmp_path / "good", 2) as system:
        assert system.name == "vLLM bfloat16"
        assert system.run(Work("prefill", 1, 16), 1) > 0
        system.run(Work("decode", 3, 16), 4)
    calls = (package / "__init__.py.calls").read_text().splitlines()
    assert calls == ["1 of 1, 1 more", "1 of 16, 1 more", "3 of 16, 1 more", "3 of 16, 5 more"]
    with pytest.raises(CheckpointError, match="no such architecture"), peer("vllm", tmp_path / "bad", 2):
        pass
    monkeypatch.setenv("LLMC_VLLM_PYTHON", str(tmp_path / "nothing"))
    with (
        pytest.raises(EnvironmentFault, match=r"nothing cannot be run: No such file.*LLMC_VLLM_PYTHON must name"),
        peer("vllm", tmp_path, 2),
    ):
        pass
    monkeypatch.setenv("LLMC_VLLM_PYTHON", "/bin/false")
    with pytest.raises(EnvironmentFault, match="ended with code 1; LLMC_VLLM_PYTHON must"), peer("vllm", tmp_path, 2):
        pass
    monkeypatch.delenv("LLMC_VLLM_PYTHON")
    with pytest.raises(EnvironmentFault, match="LLMC_VLLM_PYTHON names the Python"), peer("vllm", tmp_path, 2):
        pass


def test_prompts_have_no_short_period() -> None:
    ids = prompt(1000, 5003)
    assert len(set(ids)) == 1000
    assert min(ids) >= 3
    assert max(ids) < 5003


def test_an_axis_is_logarithmic() -> None:
    axis = Axis(1, 100, 0, 200)
    assert [axis.at(value) for value in (1, 10, 100)] == [0, 100, 200]
    assert [(text, whole) for _, text, whole in axis.ticks()] == [
        ("1", True), ("2", False), ("5", False), ("10", True), ("20", False), ("50", False), ("100", True)
    ]  # fmt: skip


def test_labels_keep_off_each_other_and_the_points() -> None:
    points = [Point("decode", 300 + 7 * i, 300 + 5 * i, 200, f"decode batch {i}, context 128 · 50%") for i in range(9)]
    labels = _labels(points, [])
    boxes = [Box(label.x, label.y - 11, len(label.text) * 6.5, 15) for label in labels]
    dots = [Box(point.x - 5, point.y - 5, 10, 10) for point in points]
    assert len(boxes) == 9
    for i, box in enumerate(boxes):
        assert box.inside()
        assert not any(box.meets(other) for other in boxes[:i] + dots)


def test_the_picture_names_the_roofs() -> None:
    chosen = [Work("prefill", 1, 512), Work("decode", 1, 128)]
    bounds = {
        chosen[0]: bound(floats(weights=10**8, flops=10**11), RATES),
        chosen[1]: bound(floats(weights=10**8, flops=10**8), RATES),
    }
    timings = tuple(Timing("llmc fp8", work, (2 * limit.seconds,)) for work, limit in bounds.items())
    systems = (SystemRow("llmc fp8", 0.1, Memory(1, 2), "none"),)
    text = draw(Report("m<1>", "cpu", (Rates(1, 6e9, {Products.FLOATS: 50e9}), RATES), systems, timings, bounds, ()))
    words = " ".join(element.text or "" for element in ElementTree.fromstring(text).iter())
    for word in (
        "m<1>, llmc fp8",
        "reads 10.0 GB/s, 2 threads",
        "multiply-adds (float32) 50 GFLOP/s, 1 thread",
        "prefill 512 · 50%",
    ):
        assert word in words


def test_a_llama_cpp_that_is_named_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "libllama.so"
    monkeypatch.setenv("LLMC_LLAMA_CPP", str(named))
    with pytest.raises(
        EnvironmentFault, match=rf"LLMC_LLAMA_CPP={named}: no such file; name a libllama.so, or unset it"
    ):
        llama_cpp.prepare()
    named.write_bytes(b"no library")
    with pytest.raises(EnvironmentFault, match=f"{named}: cannot be loaded: "):
        llama_cpp.prepare()
