"""Targets: plain cpu is one fixed ISA level, and the files say what kernels and compiler know."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import Target
from llmc.plugins.cpu.blocks import BLOCK_SIZES
from llmc.profiles import (
    best_level,
    faster_level,
    gpu_names,
    gpu_of_device,
    load_cpu_target,
    load_gpu,
    load_target,
    target_names,
)


def test_plain_cpu_does_not_depend_on_the_machine() -> None:
    assert load_target("cpu") == load_target("cpu:x86-64-v3")


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith("cpu:")])
def test_files_agree_with_their_names_and_with_the_kernels(name: str) -> None:
    target = load_cpu_target(name)
    assert str(target) == name
    level = "x86-64-v3" if target.isa == "x86-64-v3" else "x86-64-v4"
    assert target.isa_flags[0] == f"-march={level}"
    extensions = {flag[2:].replace("-", "_") for flag in target.isa_flags if flag.startswith(("-mavx", "-mamx"))}
    assert extensions <= {feature.replace("avx512_", "avx512") for feature in target.features}
    assert target.block_sizes == BLOCK_SIZES
    assert target.fingerprint.features == tuple(sorted(set(target.features)))


def test_a_higher_level_needs_all_of_the_lower() -> None:
    levels = ("v3", "v4", "v4-vnni", "v4-bf16", "amx")
    needs = [set(load_cpu_target(f"cpu:x86-64-{level}").features) for level in levels]
    assert all(lower < higher for lower, higher in itertools.pairwise(needs))


def test_the_best_level_is_the_fastest_that_the_machine_has_all_of() -> None:
    features = {
        name: load_cpu_target(f"cpu:x86-64-{name}").features for name in ("v3", "v4", "v4-vnni", "v4-bf16", "amx")
    }
    best = {name: best_level([*flags, "sse"]).isa for name, flags in features.items()}
    vnni = "x86-64-v4-vnni"
    assert best == {"v3": "x86-64-v3", "v4": "x86-64-v4", "v4-vnni": vnni, "v4-bf16": vnni, "amx": "x86-64-amx"}
    with pytest.raises(UsageError, match="has not all of x86-64-v3"):
        best_level(["sse", "avx2"])


def test_a_level_that_would_be_faster_here_is_named() -> None:
    amx, bf16, v3 = (load_cpu_target(f"cpu:x86-64-{name}") for name in ("amx", "v4-bf16", "v3"))
    assert faster_level(v3.fingerprint, amx.features) == "x86-64-amx"
    assert faster_level(v3.fingerprint, v3.features) is None
    assert faster_level(bf16.fingerprint, bf16.features) is None
    assert faster_level(amx.fingerprint, amx.features) is None
    assert faster_level(load_target("cuda:sm_90").fingerprint, amx.features) is None


@pytest.mark.parametrize("name", ["gpu", "cpu:x86-64-v9", "cpu:native", "", "cuda:sm_70", "cuda:90"])
def test_unknown_targets_are_refused_with_the_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not one of cpu, cuda, tensorrt, cpu:x86-64-amx, .*cuda:sm_80, "):
        load_target(name)


def test_plain_cuda_is_hopper() -> None:
    assert load_target("cuda") == load_target("cuda:sm_90")


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith("cuda:")])
def test_files_of_gpus_agree_with_their_names(name: str) -> None:
    target = load_target(name)
    assert str(target) == name == f"cuda:sm_{target.sm}"
    assert target.fp8 == (target.fp8_activations == "token") == (target.sm >= 89)
    assert target.fingerprint == Target("cuda", f"sm_{target.sm}", load_target("cpu").features, 13000)
    gpu = load_gpu(target.gpu)
    assert gpu.sm == target.sm
    assert (gpu.fp8_flops is not None) == target.fp8


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith("tensorrt:")])
def test_engines_of_tensorrt_are_for_the_same_gpus(name: str) -> None:
    target, gpu = load_target(name), load_target(name.replace("tensorrt:", "cuda:"))
    assert str(target) == name
    assert (target.sm, target.fp8, target.block_sizes, target.host) == (gpu.sm, gpu.fp8, gpu.block_sizes, gpu.host)
    assert target.fp8 == (target.fp8_activations == "static")
    with pytest.raises(UsageError, match=r"tensorrt:.* has none, TensorRT measures its kernels"):
        load_target(name, Path("tactics.yaml"))


def test_only_a_cpu_target_is_taken_where_one_is_needed() -> None:
    with pytest.raises(UsageError, match="target 'cuda:sm_90' is not of kind cpu"):
        load_cpu_target("cuda:sm_90")


@pytest.mark.parametrize("name", gpu_names())
def test_gpus_have_a_target_and_sensible_rates(name: str) -> None:
    gpu = load_gpu(name)
    assert f"cuda:sm_{gpu.sm}" in target_names()
    assert gpu_of_device(gpu.device) == name
    assert 20e9 < gpu.memory < 200e9
    assert 20 < gpu.bf16_flops / gpu.bandwidth < 500  # the batch from which a decode step is bound by arithmetic
    assert gpu.fp8_flops is None or gpu.fp8_flops / gpu.bf16_flops == pytest.approx(2, rel=0.02)


def test_a_device_that_nobody_described_has_no_name() -> None:
    assert gpu_of_device("NVIDIA H200") == "h200-sxm"
    assert gpu_of_device("NVIDIA H200 NVL") is None


def test_an_unknown_gpu_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match=r"GPU 'h100' is not one of a100-sxm-80gb, .*; did you mean 'h100-sxm'"):
        load_gpu("h100")
