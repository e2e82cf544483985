"""How the cuda targets call linear: tiles of a matrix product, with everything before and after it in the same launch.

Comes in: attributes and types. Goes out: `CudaCall`s, and a `Collective` for a sum over ranks. Must not know: builder,
runtime.

Beside bf16, FP8 and INT4 weights an f32 x is rounded to bf16; an FP8 x (of `quantize`) multiplies as FP8. INT4 numbers
less their zero points are exact in bf16: their scales multiply the sums of groups. An INT8 product rounds x in a launch
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import Arg, Collective, CudaCall, CudaEnv, Product, Temporary
from llmc.plugins.cuda.rows import power_of_two, row_stride, warps_of
from llmc.plugins.cuda.tiles import Tiles, rows_argument, tiles
from llmc.plugins.linear import FACTORS, Attrs, groups

#: FP8 products that sm_90's tensor cores sum in less than f32 before they are added in f32.
IMPRECISE_SUMS = 128
#: Numbers of a row that a program rounds at once, at most.
_ROUNDED_AT_ONCE = 8192

Constant = int | float | bool | str | None


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall | Collective, ...]:
    """Inputs as in `infer`. The bias of a sum over ranks is added by rank 0, before it."""
    x, w = inputs[0], inputs[1]
    if w.dtype == "f8e4m3" and (attrs.x_per_token or attrs.x_scale is not None):
        raise ValueError("an x that is rounded to FP8 on the way: split_quantize makes that an operator of its own")
    after = [Collective(0)] * attrs.all_reduce
    if w.dtype == "i8":
        return (_round_int8(attrs, x), _product(attrs, inputs, outputs, env), *after)
    return (_product(attrs, inputs, outputs, env), *after)


def row_bytes(depth: int) -> int:
    """Of an INT4 weight's row. Said as a constant, so that the compiler sees where rows lie."""
    return -(-depth // 2)


def imprecise_sums(x: str, depth: int, env: CudaEnv) -> int:
    """What a kernel is told of FP8 sums: 0 where the tensor cores sum in f32."""
    return min(IMPRECISE_SUMS, depth) if x == "f8e4m3" and env.sm == 90 else 0


def int8_scratch(rows: Dim, depth: int) -> tuple[Temporary, Temporary]:
    """Where the rounded x and its scales lie."""
    return (
        Temporary("x_int8", "i8", (Product((rows, depth)),)),
        Temporary("x_int8_scale", "f32", (Product((rows,)),)),
    )


def _round_int8(attrs: Attrs, x: TensorType) -> CudaCall:
    depth = int(x.shape[1])
    numbers, scale = int8_scratch(x.shape[0], depth)
    args: dict[str, Arg] = {"x": Pointer("in", 0), "y": numbers, "scale": scale, "K": depth}
    args["x_stride"] = row_stride("in", 0, x)
    if attrs.x_factors:
        args["factors"] = Pointer("in", FACTORS)
    block = min(_ROUNDED_AT_ONCE, power_of_two(depth))
    return CudaCall(
        kernel="linear.kernels:quantize_int8",
        args=args,
        constexprs={
            **({} if attrs.x_factors else {"factors": None}),
            "STATIC": None if attrs.x_scale is None else float(attrs.x_scale),
            "BLOCK": block,
        },
        grid=((Product(x.shape[:1]),),),
        num_warps=warps_of(block),
    )


def _product(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv) -> CudaCall:
    x, w = inputs[0], inputs[1]
    act, gate, _ = attrs.epilogue.partition("_gate")
    rows, width, depth = x.shape[0], int(outputs[0].shape[1]), int(w.shape[1])
    stored = "i8" if w.dtype == "i8" else env.stored.get(("in", 0), x.dtype)
    cut = tiles(rows, depth, stored, [w.dtype] * (2 if gate else 1), env)
    args: dict[str, Arg | None] = {
        "x": Pointer("in", 0),
        "x_stride": row_stride("in", 0, x),
        "w": Pointer("in", 1),
        "bias": _bias(attrs, inputs, env),
        "y": Pointer("out", 0),
        "y_stride": row_stride("out", 0, outputs[0]),
        "M": rows_argument(rows),
        "N": width,
        "K": depth,
    }
    constexprs: dict[str, Constant] = {
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "GATED": bool(gate),
        "ACTIVATION": act,
    }
    if w.dtype == "u4":
        args |= {"w_scale": Pointer("in", 2), "zero": Pointer("in", 3), "groups": groups(depth, attrs.group_start)}
        args["row_bytes"] = row_bytes(depth)
        return _call("gemm_int4", args, {**constexprs, "START": attrs.group_start}, rows, width, cut)
    args["w_scale"] = Pointer("in", 2) if w.dtype in ("f8e4m3", "i8") else None
    args["x_scale"] = args["x_scale_stride"] = None
    if x.dtype == "f8e4m3":
        last = len(inputs) - 1
        args |= {"x_scale": Pointer("in", last), "x_scale_stride": row_stride("in", last, inputs[last])}
    if w.dtype == "i8":
        numbers, scale = int8_scratch(rows, depth)
        args |= {"x": numbers, "x_stride": depth, "x_scale": scale, "x_scale_stride": 1}
    constexprs |= {"DEPTH": cut.depth, "EVEN_K": depth % cut.depth == 0}
    constexprs["IMPRECISE"] = imprecise_sums(x.dtype, cut.depth, env)
    narrow = frozenset({0}) if w.dtype not in ("f32", "i8") and x.dtype == "f32" else frozenset()
    return _call("gemm", args, constexprs, rows, width, cut, narrow)


def _bias(attrs: Attrs, inputs: Sequence[TensorType], env: CudaEnv) -> Arg | None:
    if not attrs.bias or (attrs.all_reduce and env.rank > 0):
        return None
    return Pointer("in", len(inputs) - 1 - (inputs[0].dtype == "f8e4m3"))


def _call(
    kernel: str,
    args: dict[str, Arg | None],
    constexprs: dict[str, Constant],
    rows: Dim,
    width: int,
    cut: Tiles,
    narrow: frozenset[int] = frozenset({0}),
) -> CudaCall:
    """What a launch lacks is a constant, None."""
    return CudaCall(
        kernel=f"linear.kernels:{kernel}",
        args={name: arg for name, arg in args.items() if arg is not None},
        constexprs={**constexprs, **{name: None for name, arg in args.items() if arg is None}},
        grid=((Product((rows,), cut.rows),), (Product((width,), cut.columns),)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        narrow=narrow,
    )
