"""A plan with a TensorRT engine inside, from the build to its steps, with stand-ins for TensorRT and for the driver:
what TensorRT is asked and told. Not built with TensorRT, not run on a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import llmc
from llmc.artifacts.errors import EnvironmentFault, UnsupportedError
from llmc.artifacts.plan import Plan
from llmc.artifacts.trt_program import ALIGN, TrtProgram, decode_trt_program
from llmc.artifacts.verify import verify_plan
from llmc.builder.trt import caches, library
from llmc.cli import main
from llmc.runtime.cuda import gpus
from llmc.runtime.cuda.gpus import Gpu, Survey
from tests.unit.cuda.recording import build_small, lines_of, run
from tests.unit.trt.numpy_plugins import MOST_SHARED
from tests.unit.trt.standin import RECORDER, BuildingTensorRT, UnrunPlugins

BLOCKS = 4
#: A mixed step, one without logits, decodes of one sequence and of three, blocks out and in.
SCRIPT = """
import sys
from array import array
from llmc.artifacts.plan import Plan
from llmc.runtime.executor import Executor
from llmc.runtime.step import Chunk, Copies, StepBatch

def chunk(start, count, block, rows=1):
    return Chunk(array("i", [5] * count), start, array("i", [block]), rows, 0)

with Executor(Plan.open(sys.argv[1]), num_blocks=int(sys.argv[2]), host_bytes=1 << 20, timed=True) as executor:
    executor.run(StepBatch([chunk(0, 9, 0), chunk(0, 3, 1, 0)]))
    executor.run(StepBatch([chunk(3, 4, 1, 0)]))
    executor.run(StepBatch([chunk(9, 1, 0)]))
    executor.run(StepBatch([chunk(10, 1, 0), chunk(7, 1, 1), chunk(0, 1, 2)]))
    print(executor.launch_seconds()[0].tolist())
    executor.copy(Copies(blocks_out=[(1, 0)], blocks_in=[(2, 0)]))
"""


@pytest.fixture(scope="module")
def building() -> Iterator[pytest.MonkeyPatch]:
    """A machine with TensorRT and a GPU, as a build sees it."""
    plugins = UnrunPlugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "tensorrt_module", lambda: BuildingTensorRT(plugins))
        patch.setattr(caches, "compile_ptx", plugins.compile)
        patch.setattr(gpus, "survey", lambda: Survey(13000, (Gpu("Fake 0", 90, 1 << 36, 1 << 36),)))
        yield patch


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, building: pytest.MonkeyPatch) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    report = build_small(folder, "tensorrt:sm_90")
    assert any("another build gives other bytes" in note for note in report.notes)
    return Plan.open(folder / "x.plan")


def run_plan(plan: Plan, driver: Path, blocks: int = BLOCKS, tensorrt: bool = True, **machine: str) -> Any:
    paths = [str(RECORDER)] if tensorrt else []
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return run(SCRIPT, [str(plan.path), str(blocks)], driver, PYTHONPATH=path, **machine)


@pytest.fixture(scope="module")
def logs(plan: Plan, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[list[Any]]]:
    """Lines of the driver, and calls of TensorRT."""
    folder = tmp_path_factory.mktemp("log")
    cuda, trt = folder / "cuda", folder / "trt"
    done = run_plan(plan, driver, FAKE_CUDA_LOG=str(cuda), FAKE_TRT_LOG=str(trt))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0.25e-3]  # the fake driver's time between two events: a step is one launch
    return lines_of(cuda), [json.loads(x) for x in trt.read_text().splitlines()]


def program_of(plan: Plan) -> TrtProgram:
    return decode_trt_program(plan.section("code/rank0.json"), "rank 0")


def test_a_plan_has_the_weights_once_and_says_who_built_it(plan: Plan) -> None:
    m = plan.manifest
    names = {section.name for section in m.sections}
    assert {"code/rank0.engine", "code/rank0.json", "code/host.so", "graph/rank0.ir"} <= names
    assert not [name for name in names if name.startswith("weights/")]
    assert (m.target.kind, m.target.isa, m.target.driver) == ("tensorrt", "sm_90", 13000)
    assert m.build.libraries["tensorrt"] == program_of(plan).tensorrt == "11.4.0"
    assert m.ranks[0].weights_bytes == len(plan.section(m.ranks[0].weights)) > 0
    assert m.ranks[0].arena_bytes == 4096
    assert all(finding.ok for finding in verify_plan(plan.path, plan.path.parent / "tiny"))


def test_inspect_shows_it(plan: Plan, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(plan.path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "tensorrt:sm_90" in shown.output
    assert "code/rank0.engine" in shown.output
    command = CliRunner().invoke(main, ["inspect", str(plan.path), "--command"])
    assert "--target tensorrt:sm_90" in command.output
    for arguments in (["--html", str(tmp_path / "x.html")], ["--kernels"]):
        refused = CliRunner().invoke(main, ["inspect", str(plan.path), *arguments])
        assert (refused.exit_code, "tensorrt:sm_90" in refused.output) == (2, True)


def test_every_tensor_lies_inside_an_allocation(plan: Plan, logs: Any) -> None:
    cuda, trt = logs
    program = program_of(plan)
    sizes_of = {"T": 32, "S": 8, "num_seqs": 8, "num_seqs_and_1": 9, "num_blocks": BLOCKS}
    allocations = [(int(line[1], 16), int(line[2])) for line in cuda if line[0] == "alloc"]
    places: dict[str, tuple[int, int]] = {}
    for tensor in program.tensors:
        first, *_ = tensor.shape
        size = (sizes_of[first] if isinstance(first, str) else first) * tensor.row_bytes
        given = [
            address for what, *rest in trt if what == "address" for _, name, address in [rest] if name == tensor.name
        ]
        assert len(given) == 2  # once for each profile
        assert len(set(given)) == 1
        assert given[0] % ALIGN == 0
        assert any(base <= given[0] and given[0] + size <= base + room for base, room in allocations), tensor.name
        places[tensor.name] = given[0], size
    pools = sorted(name for name in places if name.startswith("kv.") and not name.endswith(".out"))
    assert len(pools) == len(plan.manifest.ranks[0].kv_layers) == 2
    for name in pools:
        assert places.pop(f"{name}.out") == places[name]
    apart = sorted(places.values())
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(apart))
    arenas = [rest for what, *rest in trt if what == "arena"]
    assert len(arenas) == 2
    assert tuple(arenas[0]) == tuple(arenas[1]) in allocations
    assert arenas[0][1] == 4096


def test_the_engine_is_loaded_then_bound_then_run_by_profile(logs: Any) -> None:
    _, trt = logs
    order = [what for what, *_ in trt]
    assert order.count("deserialize") == 1
    assert order.index("deserialize") == 0 < order.index("address")
    assert "address" not in order[order.index("execute") :]
    steps = [(profile, shapes["ids"], shapes["rows"], shapes["context_len"], shapes["query_start"])
             for what, *rest in trt if what == "execute" for profile, shapes in [rest]]  # fmt: skip
    # A step that wants no logits has one row, as the engine has.
    assert steps == [
        (1, [12], [1], [2], [3]),
        (1, [4], [1], [1], [2]),
        (0, [1], [1], [1], [2]),
        (0, [3], [3], [3], [4]),
    ]
    assert all(rest[1]["kv.0"][0] == BLOCKS for what, *rest in trt if what == "execute")


def test_logits_come_to_the_host(plan: Plan, logs: Any) -> None:
    cuda, trt = logs
    logits = next(
        address for what, *rest in trt if what == "address" for _, name, address in [rest] if name == "logits"
    )
    rows = [(int(line[3], 16), int(line[5]), int(line[6])) for line in cuda if line[0] == "rows"]
    width = 4 * program_of(plan).vocab
    assert rows == [(logits, width, 1), (logits, width, 1), (logits, width, 3)]


def test_a_block_moves_layer_by_layer(plan: Plan, logs: Any) -> None:
    cuda, trt = logs
    pools = {t.name: t.row_bytes for t in program_of(plan).tensors if t.space == "kv" and not t.output}
    bases = {name: address for what, *rest in trt if what == "address" for _, name, address in [rest]}
    out = [(int(line[2], 16), int(line[3])) for line in cuda if line[0] == "download"]
    assert out == [(bases[name] + size, size) for name, size in pools.items()]
    hosts = [int(line[1], 16) for line in cuda if line[0] == "download"]
    back = [(int(line[1], 16), int(line[2], 16), int(line[3])) for line in cuda if line[0] == "upload"][-len(pools) :]
    assert back == [(bases[n] + 2 * size, host, size) for (n, size), host in zip(pools.items(), hosts, strict=True)]


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"FAKE_TRT_VERSION": "10.9.0"}, "built with TensorRT 11.4.0, and this machine has 10.9.0"),
        ({"FAKE_CUDA_SM": "89"}, "built for tensorrt:sm_90, and GPU 0 (Fake 0) is of sm_89: build it with --target"),
        ({"FAKE_CUDA_GPUS": "0"}, "this machine shows 0 GPU(s)"),
        ({"tensorrt": False}, "TensorRT, which runs this plan, cannot be used"),
        ({"blocks": 10**6, "FAKE_CUDA_FREE": str(1 << 45)}, "the plan's engines were built for 512 at most"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_is_allocated(
    plan: Plan, driver: Path, machine: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if machine.get("tensorrt") is False and importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT itself is installed here")
    cuda, trt = tmp_path / "cuda", tmp_path / "trt"
    done = run_plan(plan, driver, FAKE_CUDA_LOG=str(cuda), FAKE_TRT_LOG=str(trt), **machine)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
    assert "alloc" not in (cuda.read_text() if cuda.exists() else "")
    assert not trt.exists()


def test_other_builders_are_refused_with_what_to_use_instead(
    building: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "survey", lambda: Survey(13000, (Gpu("Fake 0", 89, 1, 1),)))
    with pytest.raises(EnvironmentFault, match=r"--target tensorrt:sm_90: .* which is sm_89 .*--target cuda:sm_90"):
        llmc.build(tmp_path, target="tensorrt:sm_90")
    monkeypatch.setattr(library, "tensorrt_module", lambda: SimpleNamespace(__version__="1.7"))
    with pytest.raises(EnvironmentFault, match=r"TensorRT-RTX 1.7 has no plug-ins.*--target cuda:sm_90.*llmc export"):
        llmc.build(tmp_path, target="tensorrt:sm_90")


def test_what_the_engines_lack_is_refused_before_they_are_built(
    building: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"a weight in .* has no TensorRT form"):
        llmc.build(plan.path.parent / "tiny", tmp_path / "x.plan", precision="int8", target="tensorrt:sm_90")
    refused = CliRunner().invoke(
        main, ["build", "--model", str(plan.path.parent / "tiny"), "--target", "tensorrt:sm_90", "--dry-run"]
    )
    assert (refused.exit_code, "--dry-run --target cuda:sm_90" in refused.output) == (4, True)


def test_plugins_that_need_more_shared_memory_than_they_get_are_refused(
    building: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    plugins = UnrunPlugins(stage_bytes=MOST_SHARED)
    monkeypatch.setattr(library, "tensorrt_module", lambda: BuildingTensorRT(plugins))
    monkeypatch.setattr(caches, "compile_ptx", plugins.compile)
    out = tmp_path / "x.plan"
    refused = CliRunner().invoke(
        main, ["build", "--model", str(plan.path.parent / "tiny"), "--target", "tensorrt:sm_90", "-o", str(out)]
    )
    assert refused.exit_code == 4
    assert "bytes of shared memory, and TensorRT launches a plug-in with 49152 at most" in refused.output
    assert not list(tmp_path.iterdir())
