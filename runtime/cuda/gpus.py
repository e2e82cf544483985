"""Whether a plan can run on the GPUs of this machine, found out before anything is allocated, and how many KV blocks
they hold.

Comes in: a manifest. Goes out: a number of blocks, or EnvironmentFault with the reason and the numbers. Must not know:
how an engine runs. The GPUs are asked in a process of its own: this one stays without a driver and its context.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.artifacts.schema import Manifest, RankProgram, Target
from llmc.profiles import target_names
from llmc.runtime.cuda.buckets import graphs_bytes
from llmc.runtime.machine import has_gpu_driver

#: What the driver and loaded kernels take beside what is allocated, and NCCL's buffers where there are several ranks;
#: rounded up from what such processes are known to use. Graphs: see `buckets`.
RESERVE, RESERVE_NCCL = 768 << 20, 512 << 20
_INSTALL = "pip install 'llmc[cuda]'"
_SURVEY_SECONDS = 60


@dataclass(frozen=True)
class Gpu:
    """As `driver.Device`."""

    name: str
    sm: int
    total: int
    free: int


@dataclass(frozen=True)
class Survey:
    """`driver`: its version as cuDriverGetVersion counts."""

    driver: int
    gpus: tuple[Gpu, ...]


def survey() -> Survey:
    """Asks the driver. Raises EnvironmentFault where there is none, where cuda-python is missing, or where it fails."""
    if not has_gpu_driver():
        raise EnvironmentFault(
            "this machine has no driver of an NVIDIA GPU (libcuda.so.1 is not found): install it, or serve a plan that "
            "was built with --target cpu"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise EnvironmentFault(f"cuda-python, which runs plans on a GPU, is not installed: {_INSTALL}")
    found = _ask("llmc.runtime.cuda.survey")
    return Survey(found["driver"], tuple(Gpu(**gpu) for gpu in found["gpus"]))


def _ask(module: str) -> dict[str, Any]:
    """What a program of this folder prints. Raises EnvironmentFault for its `error`, and where it does not answer."""
    command = [sys.executable, "-P", "-m", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SURVEY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"the GPU's driver gave no answer for {_SURVEY_SECONDS} s; `nvidia-smi` may say why"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines()
        raise EnvironmentFault(f"the GPU's driver cannot be asked: {words[-1] if words else f'exit {done.returncode}'}")
    found = json.loads(lines[-1])
    if "error" in found:
        raise EnvironmentFault(found["error"])
    return dict(found)


def check(target: Target, tp: int, machine: Survey) -> None:
    """Raises EnvironmentFault for a driver that is too old, too few GPUs for `tp` ranks, or GPUs of another kind."""
    if machine.driver < target.driver:
        raise EnvironmentFault(
            f"the GPU's driver is of CUDA {_words(machine.driver)}, and this plan needs {_words(target.driver)} or "
            "later: update the driver"
        )
    if len(machine.gpus) < tp:
        raise EnvironmentFault(
            f"the plan has {tp} ranks, each on a GPU of its own, and this machine shows {len(machine.gpus)} GPU(s); "
            f"build it with --tp {max(len(machine.gpus), 1)}, or see CUDA_VISIBLE_DEVICES"
        )
    for number, gpu in enumerate(machine.gpus[:tp]):
        if target.isa != f"sm_{gpu.sm}":
            own = f"{target.kind}:sm_{gpu.sm}"
            known = [name for name in target_names() if name.startswith(f"{target.kind}:")]
            remedy = f"build it with --target {own}" if own in known else f"the targets are {', '.join(known)}"
            raise EnvironmentFault(
                f"the plan was built for {target.kind}:{target.isa}, and GPU {number} ({gpu.name}) is of "
                f"sm_{gpu.sm}: {remedy}"
            )


def check_tensorrt(built: str | None) -> None:
    """Raises EnvironmentFault where there is no TensorRT, or another version than `built`, which has made the plan's
    engines (None: any will do).
    """
    found = str(_ask("llmc.runtime.cuda.trt_library")["tensorrt"])
    if built not in (None, found):
        raise EnvironmentFault(
            f"the plan's engines were built with TensorRT {built}, and this machine has {found}, which loads none but "
            f"its own: rebuild the plan here, or pip install tensorrt=={built}"
        )


def _words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def fixed_bytes(manifest: Manifest, rank: RankProgram, num_slots: int) -> int:
    """What a rank takes of its GPU beside the KV pool."""
    profile = manifest.profile
    arrays = 4 * (
        3 * profile.max_num_batched_tokens
        + profile.max_num_seqs * (5 + len(SAMPLER_FIELDS) + _blocks_of_sequence(manifest))
    )
    logits = 4 * profile.max_num_seqs * rank.vocab_size
    reserve = RESERVE + (RESERVE_NCCL if len(manifest.ranks) > 1 else 0)
    if manifest.target.kind == "cuda":
        reserve += graphs_bytes(profile.max_num_seqs, profile.max_seq_len, rank.launches)
    weights = rank.weights_bytes + manifest.shared_bytes
    return weights + rank.arena_bytes + logits + arrays + num_slots * rank.state_slot_bytes + reserve


def choose_gpu_blocks(
    manifest: Manifest,
    gpus: Sequence[Gpu],
    *,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
) -> int:
    """Blocks of the pool, of which each rank holds its share on its own GPU; `gpus` in the order of ranks. By default
    as many as fit the fullest one, but no more than `max_num_seqs` sequences of full length can use. Raises
    EnvironmentFault with the sum and a value that would fit, UsageError for `kv_bytes` of less than a block.
    """
    slots = max_num_seqs or manifest.profile.max_num_seqs
    each = _blocks_of_sequence(manifest)
    left = [gpu.free - fixed_bytes(manifest, r, slots) for gpu, r in zip(gpus, manifest.ranks, strict=False)]
    room = [
        max(free, 0) // rank.kv_block_bytes
        for free, rank in zip(left, manifest.ranks, strict=True)
        if rank.kv_block_bytes
    ]
    if kv_bytes is not None:
        if not room or kv_bytes < manifest.kv_block_bytes:
            raise UsageError(
                f"--kv-bytes {kv_bytes} holds no block: one of {manifest.profile.block_size} tokens takes "
                f"{manifest.kv_block_bytes} bytes over {len(manifest.ranks)} rank(s)"
            )
        num_blocks = kv_bytes // manifest.kv_block_bytes
    wanted = num_blocks if num_blocks is not None else min([slots * each, *room])
    needed = num_blocks if num_blocks is not None else min(each, slots * each)
    for number, (free, rank) in enumerate(zip(left, manifest.ranks, strict=True)):
        if needed * rank.kv_block_bytes > free:
            raise EnvironmentFault(_shortage(manifest, number, gpus[number], slots, needed, min(room, default=0)))
    return wanted


def _blocks_of_sequence(manifest: Manifest) -> int:
    return -(-manifest.profile.max_seq_len // manifest.profile.block_size)


def _shortage(manifest: Manifest, number: int, gpu: Gpu, slots: int, blocks: int, fits: int) -> str:
    rank = manifest.ranks[number]
    fixed, pool = fixed_bytes(manifest, rank, slots), blocks * rank.kv_block_bytes
    remedy = (
        f"--kv-bytes {fits * manifest.kv_block_bytes} would fit"
        if fits
        else "free some of it, build for more ranks (--tp) or for less memory (--fp8, a profile with fewer tokens)"
    )
    return (
        f"the plan does not fit GPU {number} ({gpu.name}): {blocks} KV blocks x {rank.kv_block_bytes} bytes = {pool} "
        f"bytes, beside {fixed} of weights, activations and the driver's own, is {pool + fixed - gpu.free} bytes more "
        f"than the {gpu.free} of {gpu.total} that are free; {remedy}"
    )
