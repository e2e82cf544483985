"""What surrounds the TensorRT engine of one rank: its tensors and where they lie. The engine is a section of its own.

Comes in: what a build made, or the JSON of a plan's section. Goes out: the same. Must not know: graphs, TensorRT, the
driver.

Tensors lie in the spaces and arrays of a step that programs of the cuda targets have (cuda_program.py). The KV pool is
cut otherwise: the blocks of one layer lie side by side, and the layers one behind the other.
"""

from __future__ import annotations

from math import prod

import msgspec

from llmc.artifacts.cuda_program import step_arrays
from llmc.artifacts.errors import PlanError
from llmc.artifacts.types import NUMPY_DTYPES

#: Raised by one whenever a reader of the older number could misread the newer program.
VERSION = 1
#: Optimization profiles of an engine: of decode steps, and of any mixture.
DECODE, MIXED = 0, 1
#: TensorRT wants every tensor on such a boundary, in bytes.
ALIGN = 256
#: TensorRT's names of dtypes.
DTYPES = {"f32": "FLOAT", "bf16": "BF16", "f8e4m3": "FP8", "i32": "INT32"}


class TrtTensor(msgspec.Struct, frozen=True):
    """A tensor of an engine. `shape`: numbers, and those of a step (T, S, num_seqs, num_seqs_and_1) or of the pool
    (num_blocks). It lies at the start of `space`; a layer of the pool behind `block_offset` bytes of every block.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    space: str
    output: bool = False
    block_offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first axis, whose others are known."""
        return prod(int(dim) for dim in self.shape[1:]) * NUMPY_DTYPES[self.dtype].itemsize


class TrtProgram(msgspec.Struct, frozen=True):
    """All of a rank. `engine`: the section that holds it, for TensorRT `tensorrt` alone. Sizes in bytes; `arena_bytes`
    is what an execution context needs. `columns`: first column and number of the logits that this rank writes, of
    `logits_width` that it computes; `vocab` all ranks'. `max_blocks`: of the largest pool.
    """

    version: int
    rank: int
    tp: int
    sm: int
    tensorrt: str
    engine: str
    tensors: tuple[TrtTensor, ...]
    arena_bytes: int
    kv_block_bytes: int
    columns: tuple[int, int]
    logits_width: int
    vocab: int
    block_size: int
    max_tokens: int
    max_num_seqs: int
    max_seq_len: int
    max_blocks: int

    @property
    def constants(self) -> bytes:
        """None beside those in the engine."""
        return b""

    @property
    def state_slot_bytes(self) -> int:
        """No recurrence has layers."""
        return 0

    @property
    def table_stride(self) -> int:
        """i32s from one block table to the next."""
        return -(-self.max_seq_len // self.block_size)

    def step_arrays(self) -> dict[str, int]:
        """Elements of each array of a step, at the largest one."""
        return step_arrays(self.max_tokens, self.max_num_seqs, self.table_stride)


def encode_trt_program(program: TrtProgram) -> bytes:
    """As JSON, each field and tensor on a line of its own."""
    return msgspec.json.format(msgspec.json.encode(program), indent=1) + b"\n"


def decode_trt_program(data: bytes | memoryview, where: str) -> TrtProgram:
    """From JSON. Raises PlanError, naming `where` it came from, for another version or what is no such program."""
    try:
        program = msgspec.json.decode(data, type=TrtProgram)
    except msgspec.DecodeError as error:
        raise PlanError(f"{where}: does not describe a TensorRT engine ({error}); rebuild the plan") from error
    if program.version != VERSION:
        raise PlanError(f"{where}: is of version {program.version}, this llmc reads {VERSION}; rebuild the plan")
    return program
