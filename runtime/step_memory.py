"""A step's arrays in memory that the core and every rank map: where each lies, how they are filled, how they are read.

Comes in: sizes, a file descriptor, `StepBatch`es. Goes out: the filled memory on one side, views of it on the other.
Must not know: sequences, plans, messages. Standard library and numpy only, as ranks import it.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.runtime.native import StepArrays
from llmc.runtime.step import Chunk, StepBatch

C = TypeVar("C", bound=Chunk)
_PAGE = 4096
_ITEM_BYTES = {"stamps": 8, "comm": 1}
#: T, num_seqs, S: what a rank has to be told of a step whose arrays are in place.
COUNTS = struct.Struct("<3i")


@dataclass(frozen=True)
class StepLayout:
    """The sizes that fix every place. `max_seqs` bounds the rows too; `table_stride` is a block table's row length."""

    max_tokens: int
    max_seqs: int
    table_stride: int
    vocab: int
    comm_bytes: int
    #: Times of a step that each rank writes, 0 where steps are not timed; `ranks` of them stand in turn.
    stamps: int = 0
    ranks: int = 1
    #: Whether a GPU chooses tokens where it is asked to.
    samples: bool = False

    def places(self) -> dict[str, tuple[int, int]]:
        """Each part's (offset, elements), 4 bytes an element but for stamps (8) and comm (1). Offsets are on page
        boundaries.
        """
        elements = {
            "ids": self.max_tokens,
            "positions": self.max_tokens,
            "query_start": self.max_seqs + 1,
            "context_len": self.max_seqs,
            "block_tables": self.max_seqs * self.table_stride,
            "state_slots": self.max_seqs,
            "rows": self.max_seqs,
            "sampler_params": self.max_seqs * len(SAMPLER_FIELDS) * self.samples,
            "tokens": self.max_seqs * self.samples,
            "logits": self.max_seqs * self.vocab,
            "stamps": self.stamps * self.ranks,
            "comm": self.comm_bytes,
        }
        found, offset = {}, 0
        for name, count in elements.items():
            found[name] = offset, count
            offset += -(-count * _ITEM_BYTES.get(name, 4) // _PAGE) * _PAGE
        return found

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        offset, count = self.places()["comm"]
        return offset + max(count, 1)


class StepMemory:
    """The mapped memory, zeros at first. The core calls `write` and reads `logits`; the ranks call `arrays`."""

    def __init__(self, layout: StepLayout, descriptor: int) -> None:
        self.layout = layout
        self._data = mmap.mmap(descriptor, layout.size)
        self._ints = {name: self._view(name, np.int32) for name in list(layout.places())[:7]}
        self._tables = self._ints["block_tables"].reshape(layout.max_seqs, layout.table_stride)
        #: i32[max_seqs, len(SAMPLER_FIELDS)] and i32[max_seqs]: see `StepArrays`; empty where no GPU chooses.
        self.sampler_params = self._view("sampler_params", np.int32).reshape(-1, len(SAMPLER_FIELDS))
        self.tokens = self._view("tokens", np.int32)
        self._logits = self._view("logits", np.float32).reshape(layout.max_seqs, layout.vocab)
        #: i64[ranks, stamps]: when each launch of the last step began, and the last ended, in nanoseconds.
        self.stamps = self._view("stamps", np.int64).reshape(layout.ranks, layout.stamps)
        #: u8[comm_bytes]: where the ranks' compiled code meets.
        self.comm = self._view("comm", np.uint8)
        # Small writes are several times faster through memoryview than through numpy.
        self._out = {name: memoryview(values.data) for name, values in self._ints.items()}

    @property
    def extent(self) -> tuple[int, int]:
        """Where the whole memory starts in this process, and its bytes: whole pages."""
        address = np.frombuffer(self._data, np.uint8).ctypes.data
        return address, -(-self.layout.size // _PAGE) * _PAGE

    def _view(self, name: str, dtype: type) -> np.ndarray:
        offset, count = self.layout.places()[name]
        return np.frombuffer(self._data, dtype, count, offset)

    def write(self, batch: StepBatch[C]) -> tuple[int, int, int]:
        """Fills the arrays; returns (T, num_seqs, S). Raises ValueError for a batch that is larger than the layout."""
        counts = batch.num_tokens, len(batch.chunks), batch.num_rows
        most = self.layout.max_tokens, self.layout.max_seqs, self.layout.max_seqs
        if counts[0] < 1 or any(count > limit for count, limit in zip(counts, most, strict=True)):
            raise ValueError(f"a step of (tokens, sequences, rows) {counts}; this plan takes from 1 token to {most}")
        out, stride = self._out, self.layout.table_stride
        ids, positions, tables, rows = out["ids"], out["positions"], out["block_tables"], out["rows"]
        query_start, context_len, state_slots = out["query_start"], out["context_len"], out["state_slots"]
        token = row = 0
        query_start[0] = 0
        for index, chunk in enumerate(batch.chunks):
            n, start = len(chunk.tokens), chunk.start
            end = token + n
            ids[token:end] = chunk.tokens
            if n == 1:
                positions[token] = start
            else:
                positions[token:end] = array("i", range(start, start + n))
            tables[index * stride : index * stride + len(chunk.blocks)] = chunk.blocks
            context_len[index] = start + n
            state_slots[index] = chunk.state_slot
            query_start[index + 1] = end
            for place in range(end - chunk.rows, end):
                rows[row] = place
                row += 1
            token = end
        return counts

    def arrays(self, num_tokens: int, num_seqs: int, num_rows: int) -> StepArrays:
        """The step as the compiled code takes it."""
        ints = self._ints
        return StepArrays(
            ids=ints["ids"][:num_tokens],
            positions=ints["positions"][:num_tokens],
            query_start=ints["query_start"][: num_seqs + 1],
            context_len=ints["context_len"][:num_seqs],
            block_tables=self._tables[:num_seqs],
            state_slots=ints["state_slots"][:num_seqs],
            rows=ints["rows"][:num_rows],
            logits=self._logits[:num_rows],
            sampler_params=self.sampler_params[:num_rows] if self.layout.samples else None,
            tokens=self.tokens[:num_rows] if self.layout.samples else None,
        )

    def logits(self, num_rows: int) -> np.ndarray:
        """f32[num_rows, vocab], a view that the next step overwrites."""
        return self._logits[:num_rows]
