"""Shape profiles, targets and GPUs as YAML, and their loaders. Must not know: the live machine, builder, plugins.

Comes in: names or paths. Goes out: `ShapeProfile`, `TargetDescription`, `Tactics`, `Gpu`.
"""

from llmc.profiles.gpus import Gpu, gpu_names, gpu_of_device, load_gpu
from llmc.profiles.loader import load_profile, profile_names
from llmc.profiles.tactics import Tactics
from llmc.profiles.targets import (
    CpuTarget,
    CudaTarget,
    GpuTarget,
    TargetDescription,
    TensorRtTarget,
    best_level,
    changed_tactics,
    faster_level,
    load_cpu_target,
    load_target,
    target_names,
)

__all__ = [
    "CpuTarget",
    "CudaTarget",
    "Gpu",
    "GpuTarget",
    "Tactics",
    "TargetDescription",
    "TensorRtTarget",
    "best_level",
    "changed_tactics",
    "faster_level",
    "gpu_names",
    "gpu_of_device",
    "load_cpu_target",
    "load_gpu",
    "load_profile",
    "load_target",
    "profile_names",
    "target_names",
]
