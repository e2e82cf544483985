"""GPUs: what an estimate needs to know of one, a text file each. Comes in: a GPU's name. Goes out: `Gpu`. Must not
know: the live machine, kernels.

Several GPUs share an architecture, and so the same plans: these numbers decide about estimates alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.profiles.reading import Fields, suggestion

_FOLDER = Path(__file__).parent
_KEYS = ("name", "device", "sm", "memory_gb", "bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "link_gb_s")


@dataclass(frozen=True)
class Gpu:
    """`device`: what the driver calls it. `memory` in bytes; `bandwidth` of it, and `link` to another GPU of the
    machine in one direction, in bytes a second; `bf16_flops` and `fp8_flops` a second, dense, a multiply-add counted as
    two and summed in float32; `fp8_flops` is None where its instructions know no FP8.
    """

    name: str
    sm: int
    memory: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: float
    device: str = ""


def gpu_names() -> list[str]:
    """All that `load_gpu` takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_gpu(name: str) -> Gpu:
    """A GPU by name. Raises UsageError with the names for any other."""
    if name not in gpu_names():
        raise UsageError(f"GPU {name!r} is not one of {', '.join(gpu_names())}{suggestion(name, gpu_names())}")
    fields = Fields.read(_FOLDER / f"{name}.yaml", _KEYS)
    return Gpu(
        name=fields.text("name"),
        device=fields.text("device"),
        sm=fields.integer("sm"),
        memory=int(fields.number("memory_gb") * 1e9),
        bandwidth=fields.number("bandwidth_gb_s") * 1e9,
        bf16_flops=fields.number("bf16_tflops") * 1e12,
        fp8_flops=fields.number("fp8_tflops") * 1e12 if "fp8_tflops" in fields.values else None,
        link=fields.number("link_gb_s") * 1e9,
    )


def gpu_of_device(device: str) -> str | None:
    """The name for `load_gpu` of what the driver calls `device`, if it is described."""
    return next((name for name in gpu_names() if load_gpu(name).device == device), None)
