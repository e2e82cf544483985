"""How the cuda targets call head_linear: linear's tiles, once a head. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.rows import row_stride
from llmc.plugins.cuda.tiles import rows_argument, tiles
from llmc.plugins.head_linear import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """Beside a bf16 weight x is rounded to bf16."""
    x, w = inputs
    heads, width, depth = (int(d) for d in w.shape)
    rows = x.shape[0]
    cut = tiles(rows, depth, env.stored.get(("in", 0), x.dtype), [w.dtype], env)
    call = CudaCall(
        kernel="head_linear.kernels:head_gemm",
        args={
            "x": Pointer("in", 0),
            "w": Pointer("in", 1),
            "y": Pointer("out", 0),
            "M": rows_argument(rows),
            "N": width,
            "K": depth,
            "x_stride": row_stride("in", 0, x),
            "y_stride": row_stride("out", 0, outputs[0]),
            "x_head": int(x.shape[1]) // heads,
            "start": attrs.start,
        },
        constexprs={
            "ROWS": cut.rows,
            "COLUMNS": cut.columns,
            "DEPTH": cut.depth,
            "EVEN_K": depth % cut.depth == 0,
        },
        grid=((Product((rows,), cut.rows),), (Product((width,), cut.columns),), (Product((heads,)),)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        narrow=frozenset({0} if w.dtype == "bf16" else ()),
    )
    return (call,)
