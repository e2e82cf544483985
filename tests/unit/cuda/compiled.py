"""Compiles the launches of a plug-in and says what became of them; what the tests of compiled kernels share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llmc.artifacts.types import TensorType
from llmc.builder.cuda.compile import CudaCompiler, cubin_cache
from llmc.builder.cuda.cubin import Cubin, resources
from llmc.builder.cuda.sass import tensor_cores as tensor_cores_of
from llmc.builder.cuda.variant import Variant, variant
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.tiles import SHARED_MEMORY
from llmc.plugins.operator import Operator
from tests.unit.cuda.harness import launches


def variants(operator: Operator, attrs: Any, types: Sequence[TensorType], env: CudaEnv) -> list[Variant]:
    """Of a plug-in's launches, rows side by side."""
    outputs = operator.infer(attrs, types)
    kinds = {("in", i): t for i, t in enumerate(types)} | {("out", i): t for i, t in enumerate(outputs)}
    dtypes = {Pointer(*place): env.stored.get(place, kind.dtype) for place, kind in kinds.items()}
    strides = {RowStride(*place): int(kind.shape[-1]) for place, kind in kinds.items() if kind.rank > 1}
    calls = launches(operator, attrs, types, env)
    return [variant(call, env.sm, dtypes, strides) for call in calls if isinstance(call, CudaCall)]


def compiled(made: Sequence[Variant]) -> list[Cubin]:
    """From the cache where nothing has changed."""
    return CudaCompiler(cubin_cache()).cubins(made)


def check_cubin(cubin: Cubin, sm: int, tensor_cores: str | None = None) -> None:
    """Fits the architecture and spills nothing; with `tensor_cores`, a pattern, uses such instructions."""
    found = resources(cubin.code)
    assert found.local == 0, f"{cubin.entry} for sm_{sm} spills: {found.local} bytes a thread"
    assert cubin.shared + found.shared <= SHARED_MEMORY[sm]
    assert len(found.parameters) == len(cubin.parameters)
    assert found.threads == 32 * cubin.num_warps
    if tensor_cores is not None:
        used = tensor_cores_of(cubin.code)
        assert any(re.match(tensor_cores, name) for name in used), f"{cubin.entry} for sm_{sm} has {used or 'none'}"
