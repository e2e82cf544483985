"""Targets: what machines code is generated for, one text file each. Comes in: `cpu`, `cpu:ISA`, `cuda`, `cuda:sm_XX`,
`tensorrt` or `tensorrt:sm_XX`. Goes out: `CpuTarget`, `CudaTarget` or `TensorRtTarget`, which is of the same GPUs.
Must not know: the live machine.

Plain `cpu` is x86-64-v3, wherever the build runs: a plan's bytes must not depend on the machine that wrote it. Building
for a level, or for a GPU, that the build machine lacks works; only running such a plan needs the machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import Target
from llmc.profiles.reading import Fields, suggestion
from llmc.profiles.tactics import Tactics

_FOLDER = Path(__file__).parent
_COMMON_KEYS = ("kind", "isa", "block_sizes", "fp8_activations", "tactics")
_CPU_KEYS = (*_COMMON_KEYS, "cxx_flags", "features")
_CUDA_KEYS = (*_COMMON_KEYS, "driver", "gpu")
#: Levels by speed where they were measured, the fastest first; x86-64-v4-bf16 is slower than -vnni on Intel.
_FASTEST = ("x86-64-amx", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v3")
_DEFAULTS = {"cpu": "x86-64-v3", "cuda": "sm_90", "tensorrt": "sm_90"}
#: E4M3 is known to GPUs from this one on (Ada).
_FIRST_FP8 = 89

#: Operator -> name of a choice -> its numbers.
CudaTactics = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True)
class TargetDescription(ABC):
    """What all targets say. `block_sizes`: tokens of a KV block that the kernels are written for; `fp8_activations`
    token|static|none: what an FP8 build makes of inputs unless it is told.
    """

    kind: str
    isa: str
    block_sizes: tuple[int, ...]
    fp8_activations: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.isa}"

    @property
    @abstractmethod
    def fingerprint(self) -> Target:
        """What the manifest says."""


@dataclass(frozen=True)
class CpuTarget(TargetDescription):
    """`isa_flags` select the ISA in g++; `features` are the /proc/cpuinfo flags that a machine must show; `tactics`:
    how kernels cut their work unless a file says otherwise.
    """

    isa_flags: tuple[str, ...]
    features: tuple[str, ...]
    tactics: Tactics

    @property
    def tiles(self) -> bool:
        """Whether it has AMX."""
        return "amx_tile" in self.features

    @property
    def cxx_flags(self) -> tuple[str, ...]:
        """What g++ is told of the target."""
        return (*self.isa_flags, *self.tactics.cxx_flags)

    @property
    def fingerprint(self) -> Target:
        """What the manifest says."""
        return Target(self.kind, self.isa, self.features)


@dataclass(frozen=True)
class GpuTarget(TargetDescription):
    """`sm`: 90 for sm_90; `driver`: the least version of the driver, as cuDriverGetVersion counts (13000 is CUDA 13.0);
    `host`: what the code beside the kernels, the sampler, is compiled for.
    """

    sm: int
    driver: int
    host: CpuTarget

    @property
    def fp8(self) -> bool:
        """Whether its instructions multiply E4M3."""
        return self.sm >= _FIRST_FP8

    @property
    def fingerprint(self) -> Target:
        """What the manifest says."""
        return Target(self.kind, self.isa, self.host.features, self.driver)


@dataclass(frozen=True)
class CudaTarget(GpuTarget):
    """`gpu`: one of this architecture (llmc.profiles.gpus), for estimates; `tactics`: numbers that kernels are compiled
    with, by operator and name.
    """

    gpu: str
    tactics: CudaTactics


@dataclass(frozen=True)
class TensorRtTarget(GpuTarget):
    """A GPU whose engine TensorRT builds, of which it chooses all but the kernels of keys and values."""


def target_names() -> list[str]:
    """All that `load_target` takes, without defaults."""
    files = [f"{path.parent.name}:{path.stem}" for path in _FOLDER.glob("*/*.yaml")]
    return sorted([*files, *(name.replace("cuda:", "tensorrt:") for name in files if name.startswith("cuda:"))])


def load_target(name: str, tactics: Path | None = None) -> CpuTarget | CudaTarget | TensorRtTarget:
    """The target `kind` or `kind:isa`, with the tactics of a file or its own. Raises UsageError with the names for any
    other, and for tactics that this target does not have.
    """
    full = _full(name)
    kind, _, isa = full.partition(":")
    if kind == "cpu":
        return _cpu(Fields.read(_FOLDER / kind / f"{isa}.yaml", _CPU_KEYS), tactics)
    if kind == "tensorrt":
        return _tensorrt(isa, tactics)
    return _cuda(isa, tactics)


def load_cpu_target(name: str = "cpu", tactics: Path | None = None) -> CpuTarget:
    """The same, of a target of kind cpu alone; any other is a UsageError."""
    target = load_target(name, tactics)
    if not isinstance(target, CpuTarget):
        raise UsageError(f"target {name!r} is not of kind cpu, which this needs")
    return target


def best_level(features: Collection[str]) -> CpuTarget:
    """The fastest level of those that a machine with these /proc/cpuinfo flags can run. Raises UsageError for none."""
    for isa in _FASTEST:
        target = load_cpu_target(f"cpu:{isa}")
        if set(target.features) <= set(features):
            return target
    raise UsageError(f"this machine has not all of {_FASTEST[-1]}, the least that llmc compiles for")


def faster_level(target: Target, features: Collection[str]) -> str | None:
    """The ISA for which a plan would be faster on a machine with these flags than one for `target`; None for none."""
    if target.on_gpu:
        return None
    best = best_level(features)
    return best.isa if set(target.features) < set(best.features) else None


def _full(name: str) -> str:
    kind, _, isa = name.partition(":")
    full = f"{kind}:{isa or _DEFAULTS.get(kind, '')}"
    if full not in target_names():
        known = [*_DEFAULTS, *target_names()]
        raise UsageError(f"target {name!r} is not one of {', '.join(known)}{suggestion(name, known)}")
    return full


def _cpu(fields: Fields, tactics: Path | None) -> CpuTarget:
    own = Tactics.of(fields.values.get("tactics"), f"{fields.where}: tactics")
    return CpuTarget(
        kind=fields.text("kind"),
        isa=fields.text("isa"),
        block_sizes=fields.sequence("block_sizes", int),
        fp8_activations=fields.text("fp8_activations"),
        isa_flags=fields.sequence("cxx_flags", str),
        features=fields.sequence("features", str),
        tactics=own if tactics is None else Tactics.read(tactics),
    )


def _cuda(isa: str, tactics: Path | None) -> CudaTarget:
    fields = Fields.read(_FOLDER / "cuda" / f"{isa}.yaml", _CUDA_KEYS)
    own = read_cuda_tactics(Fields.of(fields.values.get("tactics"), f"{fields.where}: tactics"), None)
    return CudaTarget(
        kind=fields.text("kind"),
        isa=fields.text("isa"),
        block_sizes=fields.sequence("block_sizes", int),
        fp8_activations=fields.text("fp8_activations"),
        sm=int(isa.removeprefix("sm_")),
        driver=_driver(fields),
        gpu=fields.text("gpu"),
        tactics=own if tactics is None else read_cuda_tactics(Fields.read(tactics, tuple(own)), own),
        host=load_cpu_target(),
    )


def _tensorrt(isa: str, tactics: Path | None) -> TensorRtTarget:
    """Inputs of FP8 layers are scaled by calibration: a network has no scales by token."""
    if tactics is not None:
        raise UsageError(f"--tactics {tactics}: tensorrt:{isa} has none, TensorRT measures its kernels; leave it out")
    gpu = _cuda(isa, None)
    activations = "static" if gpu.fp8 else "none"
    return TensorRtTarget("tensorrt", isa, gpu.block_sizes, activations, gpu.sm, gpu.driver, gpu.host)


def _driver(fields: Fields) -> int:
    major, _, minor = fields.text("driver").partition(".")
    if not major.isdigit() or not minor.isdigit():
        raise fields.fail("driver", "a CUDA version such as '13.0' is needed")
    return int(major) * 1000 + int(minor) * 10


def read_cuda_tactics(given: Fields, own: CudaTactics | None) -> CudaTactics:
    """Numbers by operator and name. Those of a file replace the target's `own`, and must be among them. Raises
    UsageError naming the field.
    """
    found = {op: dict(choices) for op, choices in (own or {}).items()}
    for op in given.values:
        choices = Fields.of(given.values[op], f"{given.where}: {op}", own and own.get(op, {}))
        for name in choices.values:
            have = found.get(op, {}).get(name, {})
            numbers = Fields.of(choices.values[name], f"{choices.where}: {name}", own and have)
            found.setdefault(op, {})[name] = {**have, **{key: _size(numbers, key) for key in numbers.values}}
    return found


def _size(numbers: Fields, key: str) -> int:
    """Triton cuts tiles, and blocks into warps, by powers of two; there can be any number of stages."""
    value = numbers.integer(key)
    if key != "stages" and value & (value - 1):
        raise numbers.fail(key, "a power of two is needed")
    return value


def changed_tactics(target: CudaTarget) -> CudaTactics:
    """The numbers of a target's tactics that a file has replaced."""
    own = load_target(str(target))
    assert isinstance(own, CudaTarget)
    changed: dict[str, dict[str, dict[str, int]]] = {}
    for op, choices in target.tactics.items():
        for name, numbers in choices.items():
            for key, value in numbers.items():
                if value != own.tactics[op][name][key]:
                    changed.setdefault(op, {}).setdefault(name, {})[key] = value
    return changed
