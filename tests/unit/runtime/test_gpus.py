"""What a plan for GPUs is refused for, before anything is allocated, and how many blocks it gets: no GPU is needed."""

from __future__ import annotations

import dataclasses
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.errors import EnvironmentFault, UnsupportedError, UsageError
from llmc.artifacts.schema import Manifest, RankProgram, ShapeProfile, Target, TokenRange
from llmc.runtime.cuda import gpus
from llmc.runtime.cuda.buckets import LAUNCH_BYTES, MOST_GRAPHS, graphs_bytes
from llmc.runtime.cuda.gpus import RESERVE, RESERVE_NCCL, Gpu, Survey, check, choose_gpu_blocks, fixed_bytes
from llmc.runtime.options import CoreOptions

GIB = 1 << 30
BLOCK = 1 << 20
PROFILE = ShapeProfile("p", (TokenRange(1, 1, 512),), 8, 1024, 16)


def manifest(tp: int = 1, weights: int = 10 * GIB, block: int = BLOCK) -> Manifest:
    ranks = tuple(
        RankProgram(r, "code", "weights", "graph", weights, GIB, block, (), 0, 1000, 1, 1.0, state_slot_bytes=0)
        for r in range(tp)
    )
    fields: dict[str, Any] = {f.name: None for f in dataclasses.fields(Manifest)}
    target = Target("cuda", "sm_90", (), 13000)
    return Manifest(**{**fields, "target": target, "profile": PROFILE, "ranks": ranks, "shared_bytes": GIB})


def gpu(free: int = 70 * GIB, sm: int = 90) -> Gpu:
    return Gpu("H100", sm, 80 * GIB, free)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Survey(12080, (gpu(),)), r"driver is of CUDA 12\.8, and this plan needs 13\.0 or later: update the driver"),
        (Survey(13000, ()), r"has 2 ranks, each on a GPU of its own, and this machine shows 0 GPU\(s\)"),
        (Survey(13000, (gpu(),)), r"has 2 ranks, .* shows 1 GPU\(s\); build it with --tp 1"),
        (
            Survey(13000, (gpu(sm=86), gpu())),
            r"GPU 0 \(H100\) is of sm_86: the targets are cuda:sm_100, cuda:sm_120, cuda:sm_80, cuda:sm_89, cuda:sm_90",
        ),
        (Survey(13000, (gpu(), gpu(sm=89))), r"GPU 1 \(H100\) is of sm_89: build it with --target cuda:sm_89"),
    ],
)
def test_machines_that_cannot_run_it_are_refused_with_the_reason(machine: Survey, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        check(manifest().target, 2, machine)


def test_a_machine_that_can_is_taken() -> None:
    check(manifest().target, 2, Survey(13010, (gpu(), gpu(), gpu(sm=80))))


def test_no_more_graphs_are_counted_than_are_held() -> None:
    assert graphs_bytes(256, 1 << 17, 300) == MOST_GRAPHS * 300 * LAUNCH_BYTES
    assert graphs_bytes(1, 100, 300) == 300 * LAUNCH_BYTES


def test_no_driver_and_no_bindings_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "has_gpu_driver", lambda: False)
    with pytest.raises(EnvironmentFault, match=r"no driver of an NVIDIA GPU \(libcuda.so.1 is not found\)"):
        gpus.survey()
    monkeypatch.setattr(gpus, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"cuda-python, .* is not installed: pip install 'llmc\[cuda\]'"):
        gpus.survey()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (SimpleNamespace(returncode=0, stdout='{"error": "cuInit: no device"}\n', stderr=""), "cuInit: no device"),
        (SimpleNamespace(returncode=-11, stdout="", stderr="x\nSegmentation fault\n"), "asked: Segmentation fault"),
        (subprocess.TimeoutExpired("x", 60), "gave no answer for 60 s"),
    ],
)
def test_a_driver_that_fails_is_a_fault_of_the_machine(
    answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **options: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(gpus, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus.subprocess, "run", run)
    with pytest.raises(EnvironmentFault, match=words):
        gpus.survey()


def test_the_fullest_gpu_decides_how_many_blocks_there_are() -> None:
    two = manifest(tp=2)
    fixed = fixed_bytes(two, two.ranks[0], PROFILE.max_num_seqs)
    # Decodes of 1, 2, 4 and 8 sequences, of up to 256, 512 and 1024 tokens.
    graphs = 12 * two.ranks[0].launches * LAUNCH_BYTES
    assert graphs_bytes(8, 1024, two.ranks[0].launches) == graphs
    assert fixed > 12 * GIB + RESERVE + RESERVE_NCCL + graphs
    free = fixed + 100 * BLOCK + BLOCK // 2
    assert choose_gpu_blocks(two, (gpu(), gpu(free))) == 100
    # No more than all sequences at full length can use, unless it is asked for.
    assert choose_gpu_blocks(two, (gpu(), gpu())) == 8 * 64
    assert choose_gpu_blocks(two, (gpu(), gpu()), max_num_seqs=2) == 2 * 64
    assert choose_gpu_blocks(two, (gpu(), gpu()), kv_bytes=2 * 1000 * BLOCK) == 1000
    assert choose_gpu_blocks(two, (gpu(), gpu()), num_blocks=7) == 7


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    one = manifest()
    fixed = fixed_bytes(one, one.ranks[0], PROFILE.max_num_seqs)
    with pytest.raises(EnvironmentFault) as caught:
        choose_gpu_blocks(one, (gpu(fixed + 60 * BLOCK),))
    assert str(caught.value) == (
        f"the plan does not fit GPU 0 (H100): 64 KV blocks x {BLOCK} bytes = {64 * BLOCK} bytes, beside {fixed} of "
        f"weights, activations and the driver's own, is {4 * BLOCK} bytes more than the {fixed + 60 * BLOCK} of "
        f"{80 * GIB} that are free; --kv-bytes {60 * BLOCK} would fit"
    )
    with pytest.raises(EnvironmentFault, match=r"is \d+ bytes more than .* build for more ranks"):
        choose_gpu_blocks(one, (gpu(fixed - 1),), num_blocks=1)
    with pytest.raises(UsageError, match=f"--kv-bytes 5 holds no block: one of 16 tokens takes {BLOCK} bytes"):
        choose_gpu_blocks(one, (gpu(),), kv_bytes=5)


def test_a_model_without_attention_has_blocks_that_hold_nothing() -> None:
    bare = manifest(block=0)
    assert choose_gpu_blocks(bare, (gpu(),)) == 8 * 64
    with pytest.raises(EnvironmentFault, match="does not fit GPU 0"):
        choose_gpu_blocks(bare, (gpu(GIB),))


def test_blocks_of_a_gpu_are_kept_on_no_disk() -> None:
    with pytest.raises(UnsupportedError, match=r"--kv-disk: a plan for cuda:sm_90 keeps no blocks on disk; leave"):
        CoreOptions(kv_disk="/tmp", kv_disk_bytes=GIB).check_disk(manifest())
    CoreOptions(kv_host_bytes=GIB).check_disk(manifest())
    with pytest.raises(UsageError, match=r"--no-mmap: a plan for cuda:sm_90 has its weights in the GPU's"):
        CoreOptions(mmap=False).check_mmap(manifest())
