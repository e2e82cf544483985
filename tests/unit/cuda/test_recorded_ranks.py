"""Two ranks on the recording driver and a library that stands in for NCCL: each sums where its program says, between
its own launches, in plain steps and in captured ones. Nothing is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from llmc.artifacts.cuda_program import Address, AllReduce, Launch, Steps, decode_program
from llmc.artifacts.plan import Plan
from tests.unit.cuda.recording import build_small, compile_nccl, lines_of, run
from tests.unit.cuda.test_recorded import SCRIPT

#: ncclDataType_t.
TYPES = {"f32": "7", "bf16": "9"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    build_small(folder, "cuda:sm_90", tp=2)
    return Plan.open(folder / "x.plan")


@pytest.fixture(scope="module")
def logs(plan: Plan, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[str]]]:
    """Rank -> what its driver was told."""
    nccl, log = compile_nccl(tmp_path_factory.mktemp("nccl")), tmp_path_factory.mktemp("log")
    environment = {"FAKE_CUDA_GPUS": "2", "FAKE_CUDA_LOG": f"{log}/", "PYTHONPATH": str(nccl)}
    script = SCRIPT.replace("    executor.begin(", "    assert not executor.samples\n    executor.begin(")
    script = script.replace(", sampler_params)", ")")  # ranks that hold parts of the logits leave tokens to the host
    done = run(script, [str(plan.path)], driver, **environment)
    assert done.returncode == 0, done.stderr
    found = {}
    for path in log.iterdir():
        lines = lines_of(path)
        if any(line[0] == "launch" for line in lines):
            found[int(next(line[1] for line in lines if line[0] == "device"))] = lines
    return found


def expected(steps: Steps, symbols: Mapping[str, int], arena: int) -> Iterator[tuple[str, ...]]:
    """Kernels and sums, in order."""
    for item in steps.launches:
        if isinstance(item, AllReduce):
            assert item.at.space == "arena"
            yield "reduce", f"{arena + item.at.offset:x}", str(item.count.value(symbols)), TYPES[item.dtype]
        elif all(item.blocks(symbols)):
            yield "launch", ",".join(map(str, item.blocks(symbols)))


def seen(line: list[str]) -> tuple[str, ...]:
    return ("launch", line[3]) if line[0] == "launch" else (line[0], *line[1:4])


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_sums_where_its_program_says(rank: int, plan: Plan, logs: dict[int, list[list[str]]]) -> None:
    program = decode_program(plan.section(f"code/rank{rank}.json"), "rank")
    lines = logs[rank]
    allocations = [int(line[1], 16) for line in lines if line[0] == "alloc"]
    arena = allocations[3]  # weights, shared, constants, arena
    decode, mixed = program.steps
    assert sum(isinstance(item, AllReduce) for item in decode.launches) == 4  # two layers, two sums each
    buckets = [{"T": n, "S": n, "num_seqs": n, "max_context": 64} for n in (1, 4)]
    plain = list(expected(mixed, {"T": 12, "S": 1, "num_seqs": 2, "max_context": 9}, arena))
    plain += [item for symbols in buckets for item in expected(decode, symbols, arena)]
    assert [seen(line) for line in lines if line[0] in ("launch", "reduce")] == plain
    captured = [line[1:] for line in lines if line[0] == "captured"]
    wanted = [item for symbols in buckets for item in expected(decode, symbols, arena)]
    assert [seen(line) for line in captured if line[0] in ("launch", "reduce")] == wanted
    assert {line[4] for line in captured if line[0] == "reduce"} == {str(rank)}


def test_ranks_sum_the_same_in_the_same_order(plan: Plan) -> None:
    programs = [decode_program(plan.section(f"code/rank{rank}.json"), "rank") for rank in (0, 1)]
    for first, second in zip(*(program.steps for program in programs), strict=True):
        sums = [[(x.count, x.dtype) for x in s.launches if isinstance(x, AllReduce)] for s in (first, second)]
        assert sums[0] == sums[1]


def test_a_sum_lies_in_no_argument_that_is_written_beside_it(plan: Plan) -> None:
    """Between two sums stands a launch: no sum is of what another one has just summed."""
    program = decode_program(plan.section("code/rank0.json"), "rank")
    for before, after in itertools.pairwise(program.steps[0].launches):
        if isinstance(after, AllReduce):
            assert isinstance(before, Launch)
            assert Address("arena", after.at.offset) in before.args
