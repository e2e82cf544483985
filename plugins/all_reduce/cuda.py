"""How the cuda targets call all_reduce: the partial is copied, and the copies are summed where they lie.

Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.all_reduce import Attrs
from llmc.plugins.cuda.call import Collective, CudaCall, CudaEnv
from llmc.plugins.cuda.move import move, strides_of


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall | Collective, ...]:
    """At tp 1 the copy alone."""
    x, y = inputs[0], outputs[0]
    return move(0, y.shape, strides_of("in", 0, x), strides_of("out", 0, y)), Collective(0)
