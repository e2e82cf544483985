"""A plan "run" on a driver that only records: what cuda-python is handed, launch by launch. Not run on a GPU.

The whole runtime takes part, processes and all: the survey of GPUs, a rank, mixed steps, decodes as graphs, blocks that
move. The arguments are read back as the cubins' own parameter tables say.
"""

from __future__ import annotations

import itertools
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.cuda_program import Address, AllReduce, CudaProgram, Float, Int, Steps, Symbol, decode_program
from llmc.artifacts.plan import Plan
from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.builder.cuda.cubin import resources
from tests.unit.cuda.recording import build_small, lines_of, run

#: What runs on the recording driver: mixed, decodes in one bucket and another, blocks out and in.
SCRIPT = """
import sys
from array import array
import numpy as np
from llmc.artifacts.plan import Plan
from llmc.runtime.executor import Executor
from llmc.runtime.step import Chunk, Copies, StepBatch

def chunk(start, count, block, rows=1):
    return Chunk(array("i", [5] * count), start, array("i", [block]), rows, 0)

with Executor(Plan.open(sys.argv[1]), num_blocks=4, host_bytes=1 << 20) as executor:
    executor.run(StepBatch([chunk(0, 9, 0), chunk(0, 3, 1, 0)]))
    executor.run(StepBatch([chunk(9, 1, 0)]))
    executor.run(StepBatch([chunk(10, 1, 0), chunk(3, 1, 1), chunk(0, 1, 2)]))
    sampler_params = np.zeros((4, 8), np.int32)
    sampler_params[[0, 2], 0] = 1
    executor.begin(StepBatch([chunk(11, 1, 0), chunk(4, 1, 1), chunk(1, 1, 2), chunk(0, 1, 3)]), sampler_params)
    executor.finish()
    executor.copy(Copies(blocks_out=[(1, 0)], blocks_in=[(2, 0)]))
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    build_small(folder, "cuda:sm_90")
    return Plan.open(folder / "x.plan")


@dataclass
class Recorded:
    """The lines of a rank's log, and what they say of memory."""

    lines: list[list[str]]

    @property
    def allocations(self) -> list[tuple[int, int]]:
        return [(int(line[1], 16), int(line[2])) for line in self.lines if line[0] in ("alloc", "pinned")]

    def launches(self, captured: bool) -> list[list[str]]:
        """Those that were done, or those that were recorded."""
        first = ["captured", "launch"] if captured else ["launch"]
        return [line[len(first) - 1 :] for line in self.lines if line[: len(first)] == first]


@pytest.fixture(scope="module")
def recorded(plan: Plan, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    log = tmp_path_factory.mktemp("log") / "driver.log"
    done = run(SCRIPT, [str(plan.path)], driver, FAKE_CUDA_LOG=str(log))
    assert done.returncode == 0, done.stderr
    # The survey's process comes first: it allocates nothing.
    return Recorded(lines_of(log))


def program_of(plan: Plan) -> CudaProgram:
    return decode_program(plan.section("code/rank0.json"), "rank 0")


def spaces(plan: Plan, recorded: Recorded, program: CudaProgram) -> dict[str, tuple[int, int]]:
    """Address and size of each space and array, in the order in which a rank allocates them."""
    wanted = ("weights", "shared", "constants", "arena", "kv", "states", "logits", "tokens", "arrays")
    found = dict(zip(wanted, recorded.allocations, strict=False))
    base, _ = found.pop("arrays")
    for name, count in program.step_arrays().items():
        found[name] = base, 4 * count
        base += -(-4 * count // 256) * 256
    return found


def expected(steps: Steps, program: CudaProgram, symbols: dict[str, int], places: dict[str, tuple[int, int]]) -> Any:
    """(kernel's name, grid, threads, shared memory, (size, value) of each argument) of each launch."""
    for launch in steps.launches:
        assert not isinstance(launch, AllReduce)
        blocks = launch.blocks(symbols)
        if not all(blocks):
            continue
        kernel = program.kernels[launch.kernel]
        yield kernel.entry, blocks, kernel.threads, kernel.shared, [_value(a, symbols, places) for a in launch.args]


def _value(arg: Any, symbols: dict[str, int], places: dict[str, tuple[int, int]]) -> tuple[int, int]:
    match arg:
        case Address("null"):
            return 8, 0
        case Address(space, offset):
            base, size = places[space]
            assert 0 <= offset < max(size, 1), f"{arg} is outside of {size} bytes"
            return 8, base + offset
        case Symbol(name):
            return 4, symbols[name]
        case Int(value):
            return 4, value & 0xFFFFFFFF
        case Float(value):
            return 4, int(struct.unpack("<I", struct.pack("<f", value))[0])
    raise AssertionError(arg)


def seen(line: list[str]) -> Any:
    _, _, name, grid, threads, shared, *arguments = line
    values = [(int(size), int(value, 16)) for size, value in (a.split(":") for a in arguments)]
    blocks = tuple(int(n) for n in grid.split(","))
    return name, blocks, int(threads.split(",")[0]), int(shared), values


def test_every_launch_is_what_the_program_says(plan: Plan, recorded: Recorded) -> None:
    program = program_of(plan)
    places = spaces(plan, recorded, program)
    decode, mixed = program.steps
    first = {"T": 12, "S": 1, "num_seqs": 2, "max_context": 9}
    buckets = [{"T": n, "S": n, "num_seqs": n, "max_context": 64} for n in (1, 4)]
    want = list(expected(mixed, program, first, places))
    for symbols in buckets:  # each is launched once as it is, and then recorded
        want += expected(decode, program, symbols, places)
    assert [seen(line) for line in recorded.launches(captured=False)] == want
    captured = [launch for symbols in buckets for launch in expected(decode, program, symbols, places)]
    assert [seen(line) for line in recorded.launches(captured=True)] == captured


def test_graphs_are_recorded_once_and_replayed(recorded: Recorded) -> None:
    order = [line for line in recorded.lines if line[-2:-1] in (["end"], ["replay"]) or line == ["begin"]]
    # One sequence: recorded. Three are padded to four, and recorded; four are that graph again.
    assert order == [["begin"], ["end", "0"], ["begin"], ["end", "1"], ["replay", "1"]]


@pytest.mark.parametrize(
    ("most", "order"),
    [
        # The second graph does not fit beside the first, which goes; nor the first beside the second.
        (1, ["begin", "end 0", "begin", "end 1", "full", "drop 0", "replay 1", "begin", "end 2", "full", "drop 1"]),
        # None fits: each kind of step is recorded once, in vain, and launched from then on.
        (0, ["begin", "end 0", "full", "begin", "end 1", "full"]),
    ],
)
def test_graphs_go_where_memory_is_short(most: int, order: list[str], plan: Plan, driver: Path, tmp_path: Path) -> None:
    script = SCRIPT[: SCRIPT.index("    executor.copy")] + "    executor.run(StepBatch([chunk(11, 1, 0)]))\n"
    log = tmp_path / "log"
    done = run(script, [str(plan.path)], driver, FAKE_CUDA_LOG=str(log), FAKE_CUDA_GRAPHS=str(most))
    assert done.returncode == 0, done.stderr
    words = ("begin", "end", "full", "drop", "replay")
    found = [" ".join(line).removeprefix("captured ") for line in lines_of(log)]
    assert [line for line in found if line.startswith(words)] == order


def test_weights_are_there_before_the_first_launch(recorded: Recorded) -> None:
    kinds = [line[0] for line in recorded.lines]
    last_fill = max(i for i, kind in enumerate(kinds) if kind == "fill")
    assert last_fill < kinds.index("synchronize") < kinds.index("launch")


def test_a_copy_that_fails_is_the_ranks_end_in_the_drivers_words(plan: Plan, driver: Path) -> None:
    block = plan.manifest.ranks[0].kv_block_bytes
    done = run(SCRIPT, [str(plan.path)], driver, FAKE_CUDA_LOST=str(block))
    assert done.returncode == 1
    assert "RankLost" in done.stderr.splitlines()[-1]
    assert "rank 0 of 1: the GPU's driver: cuMemcpyDtoHAsync: the fake driver refuses" in done.stderr


def test_a_graph_uploads_its_arrays_and_downloads_its_tokens(plan: Plan, recorded: Recorded) -> None:
    program = program_of(plan)
    places = spaces(plan, recorded, program)
    inside = [line[1:] for line in recorded.lines if line[0] == "captured"]
    second = inside[len(inside) // 2 :]
    uploads = {int(line[1], 16): int(line[3]) for line in second if line[0] == "upload"}
    sizes = {"ids": 4, "positions": 4, "sequence": 4, "query_start": 5, "context_len": 4, "state_slots": 4, "rows": 4,
             "block_tables": 4 * program.table_stride, "sampler_params": 4 * len(SAMPLER_FIELDS)}  # fmt: skip
    assert uploads == {places[name][0]: 4 * count for name, count in sizes.items()}
    (tokens,) = [line for line in second if line[0] == "download"]
    assert (int(tokens[2], 16), int(tokens[3])) == (places["tokens"][0], 16)


def test_logits_come_to_the_host_where_it_chooses(plan: Plan, recorded: Recorded) -> None:
    program = program_of(plan)
    width, device = 4 * program.vocab, spaces(plan, recorded, program)["logits"][0]
    found = [line for line in recorded.lines if line[0] == "rows"]
    assert not [line for line in recorded.lines if line[:2] == ["captured", "rows"]]
    # Of the steps without sampler_params all rows, as many as there are; of the last one rows 1 and 3.
    rows = [(int(line[3], 16) - device, int(line[5]), int(line[6])) for line in found]
    assert rows == [(0, width, 1), (0, width, 1), (0, width, 3), (width, width, 1), (3 * width, width, 1)]
    assert int(found[-1][1], 16) - int(found[-2][1], 16) == 2 * width


def test_no_space_overlaps_another_and_each_is_as_large_as_planned(plan: Plan, recorded: Recorded) -> None:
    program = program_of(plan)
    rank = plan.manifest.ranks[0]
    sizes = [max(n, 1) for n in (rank.weights_bytes, plan.manifest.shared_bytes, len(program.constants),
             rank.arena_bytes, 4 * rank.kv_block_bytes, 0, 4 * program.max_num_seqs * program.vocab,
             4 * program.max_num_seqs)]  # fmt: skip
    assert [size for _, size in recorded.allocations][: len(sizes)] == sizes
    ordered = sorted(recorded.allocations)
    for (start, size), (following, _) in itertools.pairwise(ordered):
        assert start + size <= following


def test_blocks_go_out_before_others_come_in(plan: Plan, recorded: Recorded) -> None:
    block = plan.manifest.ranks[0].kv_block_bytes
    kv = spaces(plan, recorded, program_of(plan))["kv"][0]
    (out,) = [line for line in recorded.lines if line[0] == "download" and int(line[3]) == block]
    back = recorded.lines[recorded.lines.index(out) + 1]
    host, pool, size = int(out[1], 16), int(out[2], 16), int(out[3])
    assert (pool, size) == (kv + block, block)
    assert back[0] == "upload"
    assert [int(back[1], 16), int(back[2], 16), int(back[3])] == [kv + 2 * block, host, block]


def test_cubins_say_themselves_what_programs_pass(plan: Plan) -> None:
    program = program_of(plan)
    for kernel in program.kernels:
        found = resources(bytes(plan.section(kernel.section)))
        assert (found.entry, found.threads) == (kernel.entry, kernel.threads)
        assert len(found.parameters) == len(kernel.parameters)
    used = {kernel.section for kernel in program.kernels}
    assert used == {s.name for s in plan.manifest.sections if s.name.endswith(".cubin")}


def test_timed_steps_are_launched_one_by_one_between_events(plan: Plan, driver: Path, tmp_path: Path) -> None:
    decode = "    executor.run(StepBatch([chunk(9, 1, 0)]))\n    print(executor.launch_seconds()[0].tolist())\n"
    script = SCRIPT[: SCRIPT.index("with Executor")] + (
        "with Executor(Plan.open(sys.argv[1]), num_blocks=4, timed=True) as executor:\n" + decode
    )
    log = tmp_path / "log"
    done = run(script, [str(plan.path)], driver, FAKE_CUDA_LOG=str(log))
    assert done.returncode == 0, done.stderr
    # The driver says 0.25 ms between any two events.
    assert json.loads(done.stdout) == [0.25e-3, *[0.0] * (plan.manifest.ranks[0].launches - 1)]
    assert "begin" not in log.read_text()


def test_tuning_times_steps_between_events(plan: Plan, driver: Path) -> None:
    script = "import sys, json, llmc.tune as t; print(json.dumps(t._gpu_seconds(sys.argv[1], 2)))"
    done = run(script, [str(plan.path)], driver)
    assert done.returncode == 0, done.stderr
    # Decodes of 1, 4 and the most sequences, and a prefill as long as the plan takes.
    assert json.loads(done.stdout) == {"1": 0.25e-3, "4": 0.25e-3, "8": 0.25e-3, "32": 0.25e-3}


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"FAKE_CUDA_DRIVER": "12080"}, "driver is of CUDA 12.8, and this plan needs 13.0 or later"),
        ({"FAKE_CUDA_SM": "89"}, "built for cuda:sm_90, and GPU 0 (Fake 0) is of sm_89"),
        ({"FAKE_CUDA_GPUS": "0"}, "has 1 ranks, each on a GPU of its own, and this machine shows 0 GPU(s)"),
        ({"FAKE_CUDA_FREE": "1000000"}, "does not fit GPU 0 (Fake 0)"),
    ],
)
def test_what_the_driver_says_is_refused_before_anything_is_allocated(
    plan: Plan, driver: Path, machine: dict[str, str], words: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = run(SCRIPT, [str(plan.path)], driver, FAKE_CUDA_LOG=str(log), **machine)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
    assert "alloc" not in (log.read_text() if log.exists() else "")
