"""How a plug-in says which Triton kernels to launch: `CudaCall`, data that is compiled ahead of time and replayed.

Comes in: a launch's attributes and types. Goes out: `CudaCall`, `Collective`, `CudaEnv`. Must not know: builder,
runtime, operators, Triton.

`plugins/<operator>/cuda.py` has `launch(attrs, input types, output types, CudaEnv) -> tuple[CudaCall | Collective,
...]`: the launches of one node, in order. `plugins/<operator>/kernels.py` has the kernels, functions under
`@triton.jit`; nobody imports it but the compiler and the interpreter.

How values lie in memory. A graph value is f32, i32 or a weight, by its type. An f32 result lies in memory in the
dtype that `CudaEnv.stored` names: f32, or bf16 where all that read it said so (`CudaCall.narrow`). So a kernel
converts what it loads to f32 and what it stores to the element type of its pointer (`tl.load(x).to(tl.float32)`,
`value.to(y.dtype.element_ty)`). Rows lie `RowStride` elements apart; weights lie row by row as their recipe has them.

Steps. A program is compiled for `CudaEnv.decode`: every sequence has exactly one token, so T, S and the number of
sequences are the same, and the launches are replayed as a graph that was captured for a bucket of T and is padded to
it; or for steps of any mixture. A padded sequence has one token, context_len 0 and a position of -1: kernels must
read no block table of it, write no cache, and may leave anything in its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal as OneOf

from llmc.artifacts.cuda_program import STEP_ARRAYS as STEP_ARRAYS
from llmc.artifacts.cuda_program import SYMBOLS as SYMBOLS
from llmc.artifacts.cuda_program import Product as Product
from llmc.plugins.cpu.call import Pointer, RowStride

#: What Triton calls the elements that a pointer leads to. Two numbers of 4 bits lie in a byte, the even column low.
TRITON_TYPES = {
    "f32": "fp32",
    "bf16": "bf16",
    "f16": "fp16",
    "f8e4m3": "fp8e4nv",
    "u4": "u8",
    "i8": "i8",
    "i32": "i32",
    "i64": "i64",
}


@dataclass(frozen=True)
class StepArray:
    """A pointer to one of STEP_ARRAYS, all i32."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """One of SYMBOLS, or `table_stride` (i32s from one block table to the next), as an i32."""

    name: str


@dataclass(frozen=True)
class Pool:
    """A pointer into the KV pool: to the first block's part of `layer`, `offset` bytes into it. `dtype` is that of the
    elements. Number b's part lies b * `CudaEnv.kv_block_bytes` further.
    """

    layer: int
    offset: int
    dtype: str


@dataclass(frozen=True)
class States:
    """A pointer into the recurrent states: to slot 0's state number `state`, f32."""

    state: int


@dataclass(frozen=True)
class Temporary:
    """A pointer to memory that launches of one node share, and that nothing survives: `dtype`, so many elements."""

    name: str
    dtype: str
    elements: tuple[Product, ...]


@dataclass(frozen=True)
class Space:
    """A pointer to the start of one of the program's SPACES, of `dtype`: what belongs to no node."""

    name: str
    dtype: str


Arg = Pointer | RowStride | StepArray | Symbol | Pool | States | Temporary | Space | int | float


@dataclass(frozen=True)
class CudaCall:
    """One launch. `kernel` is "linear.kernels:gemm", the function `gemm` in plugins/linear/kernels.py; or a function in
    `source`, the text of a module that was generated for these attributes.

    `args`: the function's parameters by name, without its constexprs; an int is an i32, a float an fp32.
    `constexprs`: the others. `grid`: up to three sums of products of numbers and SYMBOLS. `narrow`: which inputs
    the launch rounds to bf16 anyway. `multiples_of_16` names i32 arguments that are always such (constants and
    strides are recognised without it).
    """

    kernel: str
    args: Mapping[str, Arg]
    constexprs: Mapping[str, int | float | bool | str | None]
    grid: tuple[tuple[Product, ...], ...]
    num_warps: int = 4
    num_stages: int = 2
    narrow: frozenset[int] = frozenset()
    source: str | None = None
    multiples_of_16: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Collective:
    """An output is summed over ranks where it lies, in its stored dtype. Nothing is launched at tp 1."""

    output: int


@dataclass(frozen=True)
class CudaEnv:
    """What launches may depend on beside attributes and types. `sm`: 90 for sm_90. `tokens`: the least and the most T.
    `stored` gives the dtype in which an f32 input or output lies, by ("in", index) or ("out", index); what is not there
    lies as its type says. `tactics`: the target's or file's blocking for this operator, by name.
    """

    sm: int
    tokens: tuple[int, int]
    decode: bool
    rank: int = 0
    tp: int = 1
    block_size: int = 16
    kv_dtype: str = "bf16"
    kv_block_bytes: int = 0
    max_sequences: int = 1
    max_context: int = 1
    slot_bytes: int = 0
    stored: Mapping[tuple[OneOf["in", "out"], int], str] = field(default_factory=dict)
    tactics: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
