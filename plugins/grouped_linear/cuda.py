"""How the cuda targets call grouped_linear: lists of each expert's rows, linear's tiles over them, the weighted sums.

Comes in: attributes and types. Goes out: `CudaCall`s, and a `Collective` for a sum over ranks. Must not know: builder,
runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, Collective, CudaCall, CudaEnv, Product, Temporary
from llmc.plugins.cuda.rows import power_of_two, row_stride
from llmc.plugins.cuda.tiles import most_rows, rows_argument, tiles
from llmc.plugins.grouped_linear import Attrs
from llmc.plugins.linear import groups
from llmc.plugins.linear.cuda import imprecise_sums, row_bytes
from llmc.plugins.pointwise.cuda import formula

#: Rows that a program of `route` looks at together, and columns of one of `combine`.
_BLOCK = 1024


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall | Collective, ...]:
    """Inputs as in `infer`. Raises UnsupportedError for INT8 weights."""
    w = inputs[2]
    if w.dtype == "i8":
        raise UnsupportedError(
            "INT8 weights of experts are for cpu targets alone; build with --fp8, --int4 or --dtype bf16"
        )
    if w.dtype == "f8e4m3" and (attrs.x_per_token or attrs.x_scale is not None):
        raise ValueError("an x that is rounded to FP8 on the way: split_quantize makes that an operator of its own")
    calls: list[CudaCall | Collective] = [_route(inputs), _products(attrs, inputs, outputs, env)]
    if attrs.combine:
        calls.append(_combine(inputs, outputs))
    return (*calls, *[Collective(0)] * attrs.all_reduce)


def _lists(index: TensorType, experts: int) -> tuple[Temporary, Temporary]:
    """How many rows each expert has, and which, one list behind the other."""
    return Temporary("counts", "i32", (Product((experts,)),)), Temporary("order", "i32", (Product(index.shape),))


def _parts(index: TensorType, width: int) -> Temporary:
    """Results that are combined: a row for each token and expert."""
    return Temporary("parts", "f32", (Product((*index.shape, width)),))


def _route(inputs: Sequence[TensorType]) -> CudaCall:
    index, experts = inputs[1], int(inputs[2].shape[0])
    counts, order = _lists(index, experts)
    return CudaCall(
        kernel="grouped_linear.kernels:route",
        args={
            "index": Pointer("in", 1),
            "index_stride": RowStride("in", 1),
            "counts": counts,
            "order": order,
            "T": rows_argument(index.shape[0]),
            "E": experts,
        },
        constexprs={"SLOTS": int(index.shape[1]), "BLOCK": _BLOCK},
        grid=((Product((experts,)),),),
    )


def _products(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv) -> CudaCall:
    x, index, w = inputs[:3]
    experts, size, depth = (int(d) for d in w.shape)
    slots, width = int(index.shape[1]), size // 2 if attrs.gated else size
    usual = -(-most_rows(index.shape[0], env) * slots // experts)  # rows of an expert
    cut = tiles(usual, depth, env.stored.get(("in", 0), x.dtype), [w.dtype] * (1 + attrs.gated), env)
    counts, order = _lists(index, experts)
    last = len(inputs) - 1
    args: dict[str, Arg | None] = {
        "x": Pointer("in", 0),
        "x_scale": Pointer("in", last) if x.dtype == "f8e4m3" else None,
        "w": Pointer("in", 2),
        "w_scale": Pointer("in", 3) if w.dtype in ("f8e4m3", "u4") else None,
        "zero": Pointer("in", 4) if w.dtype == "u4" else None,
        "bias": Pointer("in", last - attrs.combine - (x.dtype == "f8e4m3")) if attrs.bias else None,
        "counts": counts,
        "order": order,
        "y": _parts(index, size) if attrs.combine else Pointer("out", 0),
        "E": experts,
        "N": width,
        "K": depth,
        "groups": groups(depth, attrs.group_start) if w.dtype == "u4" else None,
        "row_bytes": row_bytes(depth) if w.dtype == "u4" else None,
        "x_stride": row_stride("in", 0, x),
        "x_scale_stride": row_stride("in", last, inputs[last]) if x.dtype == "f8e4m3" else None,
    }
    constexprs: dict[str, int | bool | None] = {
        "SLOTS": slots,
        "ONE_ROW": x.rank == 2,
        "EXPERTS": power_of_two(experts),
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "EVEN_K": depth % cut.depth == 0,
        "START": attrs.group_start,
        "GATED": attrs.gated,
        "IMPRECISE": imprecise_sums(x.dtype, cut.depth, env),
    }
    return CudaCall(
        kernel="grouped_linear:experts",
        args={name: arg for name, arg in args.items() if arg is not None},
        constexprs={**constexprs, **{name: None for name, arg in args.items() if arg is None}},
        grid=((Product(index.shape, cut.rows), Product((experts,))), (Product((width,), cut.columns),)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        narrow=frozenset({0} if x.dtype == "f32" and w.dtype != "f32" else ()),
        source=_source(attrs.expr, [*args, *constexprs]),
    )


def _source(expr: str, parameters: Sequence[str]) -> str:
    """A kernel whose results go through the formula."""
    value, imports = formula(expr, "i{}".format, "ROWS, COLUMNS")
    named = [f"{name}: tl.constexpr" if name.isupper() and len(name) > 1 else name for name in parameters]
    passed = "SLOTS, ONE_ROW, ROWS, COLUMNS, DEPTH, EVEN_K, START, GATED, IMPRECISE"
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "from llmc.plugins.grouped_linear.kernels import expert_products, rows_of_tile",
        imports,
        "",
        "@triton.jit",
        f"def experts({', '.join(named)}):",
        "    expert, row, rows_inside = rows_of_tile(counts, order, E, EXPERTS, ROWS)",
        "    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)",
        "    column = tl.minimum(columns, N - 1)",
        "    i0, i1 = expert_products(x, x_scale, w, w_scale, zero, bias, expert, row, column, N, K, groups,",
        f"                             row_bytes, x_stride, x_scale_stride, {passed})",
        f"    value = {value}",
        "    inside = rows_inside[:, None] & (columns < N)[None, :]",
        "    tl.store(y + row[:, None] * N + columns[None, :], value.to(y.dtype.element_ty), mask=inside)",
        "",
    ]
    return "\n".join(lines)


def _combine(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> CudaCall:
    index, width = inputs[1], int(outputs[0].shape[1])
    slots, experts = int(index.shape[1]), int(inputs[2].shape[0])
    last = len(inputs) - 1 - (inputs[0].dtype == "f8e4m3")
    block = min(_BLOCK, power_of_two(width))
    return CudaCall(
        kernel="grouped_linear.kernels:combine",
        args={
            "parts": _parts(index, width),
            "index": Pointer("in", 1),
            "weights": Pointer("in", last),
            "y": Pointer("out", 0),
            "N": width,
            "E": experts,
            "index_stride": RowStride("in", 1),
            "weights_stride": RowStride("in", last),
            "y_stride": row_stride("out", 0, outputs[0]),
        },
        constexprs={"SLOTS": slots, "PADDED": power_of_two(slots), "BLOCK": block},
        grid=((Product(index.shape[:1]),), (Product((width,), block),)),
    )
