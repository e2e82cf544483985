"""Operators that kernels exist for, one folder each. Comes in: the folders. Goes out: `OPERATORS`, `cpu_launch`,
`cuda_launch`.

A folder with an `OPERATOR` is a plug-in of the graph. Its `cpu.py` has `launch(attrs, input types, output types,
KernelEnv) -> CpuCall`, its `cuda.py` the same of a `CudaEnv`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from llmc.plugins.cpu.call import CpuCall
from llmc.plugins.cuda.call import Collective, CudaCall
from llmc.plugins.operator import Operator

#: What the compiler gives g++ as -I: the folder that holds `plugins/`.
INCLUDE_ROOT = Path(__file__).parent.parent


def _find() -> dict[str, Operator]:
    packages = [m.name for m in iter_modules(__path__) if m.ispkg]
    found = [getattr(import_module(f"{__name__}.{name}"), "OPERATOR", None) for name in packages]
    return {operator.name: operator for operator in found if operator is not None}


#: Operator name -> operator, for every folder that has one.
OPERATORS: dict[str, Operator] = _find()


def cpu_launch(name: str) -> Callable[..., CpuCall]:
    """The `launch` of a plug-in's cpu.py: (attrs, input types, output types, KernelEnv) -> CpuCall."""
    launch: Callable[..., CpuCall] = import_module(f"{__name__}.{name}.cpu").launch
    return launch


def cuda_launch(name: str) -> Callable[..., tuple[CudaCall | Collective, ...]] | None:
    """The `launch` of a plug-in's cuda.py: (attrs, input types, output types, CudaEnv) -> its launches in order. None
    for an operator that no GPU has kernels for.
    """
    module = f"{__name__}.{name}.cuda"
    if find_spec(module) is None:
        return None
    launch: Callable[..., tuple[CudaCall | Collective, ...]] = import_module(module).launch
    return launch
