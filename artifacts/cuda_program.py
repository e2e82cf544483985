"""The program of one rank of a plan for NVIDIA GPUs: which kernels are launched, in which order, on which memory.

Comes in: what lowering made, or the JSON of a plan's section. Goes out: the same. Must not know: graphs, Triton, the
driver.

A program is data that is replayed: every argument of a launch is a place in one of the SPACES, a number of the step, or
a constant. Spaces are device memory that the runtime allocates once; `null` is the null pointer. The arrays of a step
are i32 and stand in spaces of their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from llmc.artifacts.errors import PlanError
from llmc.artifacts.sampler_params import SAMPLER_FIELDS

#: Raised by one whenever a reader of the older number could misread the newer program.
VERSION = 2

#: Memory for the life of a rank. `shared`: weights that all ranks store alike, copied to each GPU. `logits`:
#: f32[rows, columns of this rank]. `tokens`: i32[rows], those that the GPU chooses. `constants`: what stands in the
#: program itself.
SPACES = ("weights", "shared", "constants", "arena", "kv", "states", "logits", "tokens", "null")
#: The arrays of a step. `positions` and `sequence` (which one a token belongs to) are [T], `context_len` is [num_seqs],
#: `query_start` [num_seqs+1], `block_tables` [num_seqs, table_stride], `state_slots` [num_seqs], `rows` [S],
#: `sampler_params` [S, len(SAMPLER_FIELDS)].
STEP_ARRAYS = (
    "ids", "positions", "sequence", "query_start", "context_len", "block_tables", "state_slots", "rows",
    "sampler_params",
)  # fmt: skip
#: Numbers of a step.
SYMBOLS = ("T", "S", "num_seqs", "max_context")


class Product(msgspec.Struct, frozen=True, array_like=True):
    """ceil(product of dims / divisor): dims are numbers and SYMBOLS."""

    dims: tuple[int | str, ...]
    divisor: int = 1

    def value(self, symbols: Mapping[str, int]) -> int:
        """The number, where SYMBOLS have these values."""
        result = 1
        for dim in self.dims:
            result *= symbols[dim] if isinstance(dim, str) else dim
        return -(-result // self.divisor)


class Address(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """A pointer: `offset` bytes behind the start of a space or of a step's array."""

    space: str
    offset: int = 0


class Symbol(msgspec.Struct, frozen=True, array_like=True, tag="symbol"):
    """One of SYMBOLS, as an i32."""

    name: str


class Int(msgspec.Struct, frozen=True, array_like=True, tag="i32"):
    """An i32."""

    value: int


class Float(msgspec.Struct, frozen=True, array_like=True, tag="f32"):
    """An f32."""

    value: float


Argument = Address | Symbol | Int | Float


class Kernel(msgspec.Struct, frozen=True):
    """A function of a cubin, which is the plan's section `section`. A block has `threads`, and `shared` bytes of
    dynamic shared memory; grid x counts `num_ctas` times. `parameters`: names, in the order of a launch's arguments.
    """

    section: str
    entry: str
    threads: int
    num_ctas: int
    shared: int
    parameters: tuple[str, ...]


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Kernel number `kernel` of the program. `grid`: x, y and z, each a sum; where one is 0 nothing is launched. `node`
    says what for: operator and module.
    """

    kernel: int
    args: tuple[Argument, ...]
    grid: tuple[tuple[Product, ...], tuple[Product, ...], tuple[Product, ...]]
    node: str

    def blocks(self, symbols: Mapping[str, int]) -> tuple[int, int, int]:
        """Grid x, y and z, where SYMBOLS have these values."""
        x, y, z = (sum(product.value(symbols) for product in axis) for axis in self.grid)
        return x, y, z


class AllReduce(msgspec.Struct, frozen=True, tag="all_reduce"):
    """`count` elements of `dtype` are summed over the ranks where they lie."""

    at: Address
    count: Product
    dtype: Literal["f32", "bf16"]
    node: str


class Steps(msgspec.Struct, frozen=True):
    """What a step of `least`..`most` tokens and up to `rows` wanted rows runs, in order. `decode`: each sequence has
    one token and its logits are wanted, so that T, S and num_seqs are the same; other steps may be of any mixture.
    """

    decode: bool
    least: int
    most: int
    rows: int
    launches: tuple[Launch | AllReduce, ...]


class CudaProgram(msgspec.Struct, frozen=True):
    """All of a rank. Sizes in bytes; `kv_block_bytes` and `state_slot_bytes` are one block's and one slot's.
    `constants` is what the space of that name holds. `columns`: first column and number of the logits that this rank
    computes; 0 where another rank's are taken. `vocab` is the width of all ranks' logits together.
    """

    version: int
    rank: int
    tp: int
    sm: int
    kernels: tuple[Kernel, ...]
    steps: tuple[Steps, ...]
    constants: bytes
    weights_bytes: int
    shared_bytes: int
    arena_bytes: int
    kv_block_bytes: int
    state_slot_bytes: int
    columns: tuple[int, int]
    vocab: int
    block_size: int
    max_num_seqs: int
    max_seq_len: int

    @property
    def table_stride(self) -> int:
        """i32s from one block table to the next."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def logits_width(self) -> int:
        """Columns of the logits in this rank's memory."""
        return self.columns[1]

    @property
    def max_tokens(self) -> int:
        """Of the largest step."""
        return max(steps.most for steps in self.steps)

    @property
    def launches(self) -> int:
        """Of the step that has most."""
        return max(len(steps.launches) for steps in self.steps)

    def step_arrays(self) -> dict[str, int]:
        """Elements of each of STEP_ARRAYS, at the largest step."""
        return step_arrays(self.max_tokens, self.max_num_seqs, self.table_stride)


def step_arrays(tokens: int, seqs: int, table_stride: int) -> dict[str, int]:
    """Elements of each of STEP_ARRAYS, at a step of so many tokens and sequences."""
    return {
        "ids": tokens,
        "positions": tokens,
        "sequence": tokens,
        "query_start": seqs + 1,
        "context_len": seqs,
        "block_tables": seqs * table_stride,
        "state_slots": seqs,
        "rows": seqs,
        "sampler_params": seqs * len(SAMPLER_FIELDS),
    }


def encode_program(program: CudaProgram) -> bytes:
    """As JSON, each launch on a line of its own, so that `diff` shows which ones changed."""
    return msgspec.json.encode(program).replace(b'{"type":', b'\n{"type":') + b"\n"


def decode_program(data: bytes | memoryview, where: str) -> CudaProgram:
    """From JSON. Raises PlanError, naming `where` it came from, for another version or what is no program."""
    try:
        found = msgspec.json.decode(data, type=_Version).version
        if found != VERSION:
            remedy = "update llmc" if found > VERSION else "rebuild the plan"
            raise PlanError(f"{where}: is a program of version {found}, this llmc reads version {VERSION}; {remedy}")
        return msgspec.json.decode(data, type=CudaProgram)
    except msgspec.DecodeError as error:
        raise PlanError(f"{where}: is not a program for a GPU ({error}); rebuild the plan") from error


class _Version(msgspec.Struct):
    version: int
