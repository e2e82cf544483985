"""How a plug-in says which kernel to call: `CpuCall`, plain data that a code emitter turns into one C++ statement.

Comes in: a launch's attributes and types. Goes out: `CpuCall`, `KernelEnv`. Must not know: builder, runtime, operators.

A call is emitted as

    <function>(c, tid, <args>);

inside `namespace llmc`, in `static void step_r0(const Ctx& c, int tid)`, which all threads of a rank run at once. After
it every thread meets in `c.next(tid, n)`: a kernel leaves without a barrier. The emitter knows for each graph value a
typed pointer, the distance of its rows in elements and each symbol's value, and needs to know nothing about operators:

    Pointer("in", i)     (const T*) input i, T = C_TYPES[dtype]       Pointer("out", j)    (T*) output j
    RowStride("in", i)   int64_t, elements between rows of input i    RowStride("out", j)  the same of output j
    Product(("T", 64))   int64_t, T * 64                              Literal("1.5f")      as it is
    Call("A<int>", ...)  A<int>{...}

Only values listed in `strided` may have rows that lie further apart than they are wide (`RowStride` of others is their
width); the emitter refuses anything else. Rows are what the first axis counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal as OneOf

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType

#: dtype -> the C++ type of its elements in kernels. Narrow floats are raw bits, 4-bit numbers lie two in a byte.
C_TYPES = {
    "f32": "float",
    "bf16": "llmc::bf16",
    "f16": "uint16_t",
    "f8e4m3": "uint8_t",
    "u4": "uint8_t",
    "i8": "int8_t",
    "i32": "int32_t",
    "i64": "int64_t",
}

#: Outputs that kernels read side by side: weights are packed in panels of so many rows (see linear/formats.h).
PANEL = 64

Side = OneOf["in", "out"]


@dataclass(frozen=True)
class Pointer:
    """The first element of an input or output."""

    side: Side
    index: int


@dataclass(frozen=True)
class RowStride:
    """Elements from one row of an input or output to the next."""

    side: Side
    index: int


@dataclass(frozen=True)
class Product:
    """The product of dimensions, numbers and symbols, as int64_t; empty: 1."""

    dims: tuple[Dim, ...]

    def text(self, symbols: Mapping[str, str]) -> str:
        """C++ for it; `symbols` gives an int64_t expression for T and S."""
        number = prod(d for d in self.dims if isinstance(d, int))
        names = [symbols[d] for d in self.dims if isinstance(d, str)]
        return " * ".join(([str(number)] if number != 1 or not names else []) + names)


@dataclass(frozen=True)
class Literal:
    """C++ text."""

    text: str


@dataclass(frozen=True)
class Call:
    """An aggregate: `type{args}`."""

    type: str
    args: tuple[Pointer | RowStride | Product | Literal, ...]


Simple = Pointer | RowStride | Product | Literal
Arg = Simple | Call


def render(arg: Arg, value: Callable[[Pointer | RowStride], str], symbols: Mapping[str, str]) -> str:
    """C++ for an argument: `value` gives it for what memory decides, `symbols` for T and S."""
    match arg:
        case Literal(text):
            return text
        case Product():
            return f"int64_t({arg.text(symbols)})"
        case Call(kind, args):
            return f"{kind}{{{', '.join(render(a, value, symbols) for a in args)}}}"
    return value(arg)


@dataclass(frozen=True)
class Scratch:
    """Bytes that a launch needs beside its tensors, at the largest T and S of the range: `shared` once a rank
    (`c.scratch()`), `per_thread` once a thread (`c.scratch(tid)`). Nothing survives the launch.
    """

    shared: int = 0
    per_thread: int = 0


@dataclass(frozen=True)
class CpuCall:
    """`header` is relative to `INCLUDE_ROOT`. `function` is the complete template, as `namespace llmc` sees it.
    `prelude` is C++ that must stand before the function that calls it, in the same namespace, once for each distinct
    text. `packing`: input -> the recipe around that input's recipe, with `{}` in its place; an input without an entry
    is stored as it is. `sums_ranks`: output bytes a row that travel between ranks.
    """

    header: str
    function: str
    args: tuple[Arg, ...]
    prelude: str = ""
    packing: Mapping[int, str] = field(default_factory=dict)
    strided: frozenset[Pointer] = frozenset()
    scratch: Scratch = Scratch()
    sums_ranks: int = 0


@dataclass(frozen=True)
class KernelEnv:
    """What a launch may depend on beside its own attributes and types. `tokens` and `rows` are the smallest and the
    largest T and S that this code runs with. `kv_offsets`: layer -> bytes from a block's start to the layer's part.
    `state_offsets`: state -> bytes from the start of a slot of `slot_bytes` to that state. `tiles`: the target has AMX.
    """

    tokens: tuple[int, int]
    rows: tuple[int, int]
    tp: int = 1
    block_size: int = 16
    kv_dtype: str = "f32"
    kv_block_bytes: int = 0
    kv_offsets: Mapping[int, int] = field(default_factory=dict)
    max_sequences: int = 1
    max_context: int = 1
    slot_bytes: int = 0
    state_offsets: Mapping[int, int] = field(default_factory=dict)
    tiles: bool = False

    def bounds(self, dim: Dim) -> tuple[int, int]:
        """Smallest and largest value of a dimension."""
        return (dim, dim) if isinstance(dim, int) else {"T": self.tokens, "S": self.rows}[dim]

    def kv_place(self, layer: int) -> tuple[Literal, Literal]:
        """The arguments that say where a layer's part of the cache lies: its offset, and the bytes of a block."""
        return Literal(str(self.kv_offsets[layer])), Literal(str(self.kv_block_bytes))

    def state_place(self, state: int) -> tuple[Literal, Literal]:
        """The arguments that say where a recurrent state lies: its offset, and the bytes of a slot."""
        return Literal(str(self.state_offsets[state])), Literal(str(self.slot_bytes))


def row_bytes(*types: TensorType) -> int:
    """Bytes of one row of each type together: all axes but the first."""
    return sum(NUMPY_DTYPES[t.dtype].itemsize * prod(d for d in t.shape[1:] if isinstance(d, int)) for t in types)


def row_stride(side: Side, index: int, kind: TensorType) -> RowStride | Product:
    """The `RowStride` of a matrix; of anything else the length of its last axis (1 without one): rows side by side."""
    return RowStride(side, index) if kind.rank == 2 else Product(kind.shape[-1:])


def strided_rows(inputs: Sequence[TensorType], but: Sequence[int] = ()) -> frozenset[Pointer]:
    """The inputs that are matrices, for `CpuCall.strided`, without those numbered `but`."""
    return frozenset(Pointer("in", i) for i, kind in enumerate(inputs) if kind.rank == 2 and i not in but)
