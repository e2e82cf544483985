"""Runs whole programs of the cuda targets as the harness runs kernels: every launch of a step, on the planned memory.

Comes in: `CudaLowered`, a model's tensors, steps of a `Batch`. Goes out: logits. It stands where the engine of
`runtime/cuda` stands on a machine with GPUs, with the ranks of a plan side by side in one memory.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

from llmc.artifacts.cuda_program import STEP_ARRAYS, Address, Float, Int, Symbol
from llmc.artifacts.sampler_params import GREEDY, SAMPLER_FIELDS
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.arena import aligned
from llmc.builder.cuda.interpret import Address as Extent
from llmc.builder.cuda.interpret import Launch
from llmc.builder.cuda.program import BoundCall, BoundReduce, CudaLowered, CudaRank, StepCode
from llmc.builder.cuda.variant import Variant
from llmc.builder.weights.stream import write_weights
from llmc.plugins.cuda.call import TRITON_TYPES
from llmc.plugins.operator import StepContext
from tests.unit.builder.weights_of import Tensors
from tests.unit.cuda.backend import memory, run

#: By precision, the root mean square of the difference from the CPU engine's logits, in that of those, that rounding
#: explains: of an input that lies between two E4M3 numbers, 6 % apart, either side may take another one; of two INT8
#: numbers they lie 1 % of the largest apart.
BOUNDS = {"fp32": 0.01, "bf16": 0.02, "int4": 0.02, "int8": 0.05, "fp8": 0.07}
#: Between any two spaces: what runs over the end of one meets no other.
_GUARD = 4096
_UNWRITTEN = 0xFF
_DTYPES = {f"*{triton}": dtype for dtype, triton in TRITON_TYPES.items()}


class _Rank:
    """One rank's spaces in the shared memory; `starts` says where each begins."""

    def __init__(self, program: CudaRank, lowered: CudaLowered, blocks: int, slots: int, start: int) -> None:
        profile = lowered.profile
        self.program = program
        tokens, seqs = profile.max_num_batched_tokens, profile.max_num_seqs
        stride = -(-profile.max_seq_len // profile.block_size)
        sizes = {
            "weights": program.weights.nbytes,
            "shared": lowered.shared.nbytes,
            "constants": len(program.constants),
            "arena": program.arena_bytes,
            "kv": program.kv_block_bytes * blocks,
            "states": program.state_slot_bytes * slots,
            "logits": 4 * seqs * max(program.vocab[1], 1),
            "tokens": 4 * seqs,
            **dict.fromkeys(("ids", "positions", "sequence"), 4 * tokens),
            **dict.fromkeys(("context_len", "state_slots", "rows"), 4 * seqs),
            "query_start": 4 * (seqs + 1),
            "sampler_params": 4 * seqs * len(SAMPLER_FIELDS),
            "block_tables": 4 * seqs * stride,
        }
        self.starts: dict[str, int] = {}
        self.sizes = sizes
        for name, size in sizes.items():
            self.starts[name] = start
            start += aligned(size, 256) + _GUARD
        self.end = start


class WholeProgram:
    """All ranks of a model. `memory` is what the ranks' GPUs would hold."""

    def __init__(self, lowered: CudaLowered, tensors: Tensors, blocks: int, slots: int = 8):
        self.lowered = lowered
        self.memory = memory()
        self.ranks: list[_Rank] = []
        start = 0
        for program in lowered.programs:
            self.ranks.append(_Rank(program, lowered, blocks, slots, start))
            start = self.ranks[-1].end
        assert start <= self.memory.size
        self.memory[:start] = _UNWRITTEN
        for rank in self.ranks:
            for name, member in (("weights", rank.program.weights), ("shared", lowered.shared)):
                data = io.BytesIO()
                write_weights(member, tensors, data)
                self._bytes(rank, name)[:] = np.frombuffer(data.getvalue(), np.uint8)
            self._bytes(rank, "constants")[:] = np.frombuffer(rank.program.constants, np.uint8)

    def run(self, inputs: Mapping[str, np.ndarray], context: StepContext, padded: int = 0) -> np.ndarray:
        """f32[S, vocab]: as `runtime.native.Engine.run`; the tokens that one rank chooses are held against them. A
        decode step runs the decode program, with `padded` sequences beside its own as a captured graph has them.
        """
        tokens, rows, seqs = len(inputs["ids"]), len(inputs["rows"]), len(context.context_len)
        decode = tokens == rows == seqs
        arrays = _arrays(inputs, context, padded if decode else 0)
        more = padded if decode else 0
        symbols = {
            "T": tokens + more,
            "S": rows + more,
            "num_seqs": seqs + more,
            "max_context": int(context.context_len.max()),
        }
        for rank in self.ranks:
            for name, values in arrays.items():
                self._write(rank, name, values)
        chosen = [_steps(rank.program, decode, symbols["T"]) for rank in self.ranks]
        self._launch(chosen, symbols)
        found = np.full((rows, self.lowered.vocab_size), np.nan, np.float32)
        for rank in self.ranks:
            first, count = rank.program.vocab
            own = self._bytes(rank, "logits")[: 4 * rows * count].view(np.float32)
            found[:, first : first + count] = own.reshape(rows, count)
        if len(self.ranks) == 1:
            tokens = self._bytes(self.ranks[0], "tokens").view(np.int32)[:rows]
            np.testing.assert_array_equal(tokens, found.argmax(axis=1))
        return found

    def _launch(self, chosen: Sequence[StepCode], symbols: Mapping[str, int]) -> None:
        """The ranks' launches side by side, up to a sum over ranks, which is done here, in rank order."""
        pending: list[tuple[Launch, Variant]] = []
        for items in zip(*(steps.launches for steps in chosen), strict=True):
            if isinstance(items[0], BoundReduce):
                _run(pending)
                pending = []
                self._reduce([item for item in items if isinstance(item, BoundReduce)], symbols)
                continue
            for rank, item in zip(self.ranks, items, strict=True):
                assert isinstance(item, BoundCall)
                launch = self._resolve(rank, item, symbols)
                if all(launch.grid):
                    pending.append((launch, item.variant))
        _run(pending)

    def _reduce(self, items: Sequence[BoundReduce], symbols: Mapping[str, int]) -> None:
        parts = []
        for rank, item in zip(self.ranks, items, strict=True):
            what = item.what
            dtype = NUMPY_DTYPES[what.dtype]
            start = self.address(rank, what.at)
            parts.append(self.memory[start : start + what.count.value(symbols) * dtype.itemsize].view(dtype))
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total = total + part.astype(np.float32)
        for part in parts:
            part[:] = total.astype(part.dtype)

    def _resolve(self, rank: _Rank, item: BoundCall, symbols: Mapping[str, int]) -> Launch:
        types = dict(item.variant.signature)
        args: dict[str, Extent | int | float] = {}
        for name, arg, size in zip(item.variant.arguments, item.args, item.buffers, strict=True):
            match arg:
                case Address(space, offset):
                    room = rank.sizes[space] - offset
                    assert 0 <= offset <= rank.sizes[space]
                    assert size is None or size <= room
                    args[name] = Extent(self.address(rank, arg), room if size is None else size, _DTYPES[types[name]])
                case Symbol(symbol):
                    args[name] = symbols[symbol]
                case Int(value) | Float(value):
                    args[name] = value
        axes = [sum(product.value(symbols) for product in axis) for axis in item.call.grid]
        x, y, z = [*axes, 1, 1, 1][:3]
        return Launch(item.call.kernel, args, item.call.constexprs, (x, y, z), item.call.source)

    @staticmethod
    def address(rank: _Rank, place: Address) -> int:
        """Where a place is in the memory."""
        return rank.starts[place.space] + place.offset

    def _bytes(self, rank: _Rank, space: str) -> np.ndarray:
        start = rank.starts[space]
        return self.memory[start : start + rank.sizes[space]]

    def _write(self, rank: _Rank, name: str, values: np.ndarray) -> None:
        values = values.reshape(-1) if name == "sampler_params" else values
        if name == "block_tables":
            stride = rank.sizes[name] // 4 // self.lowered.profile.max_num_seqs
            table = self._bytes(rank, name).view(np.int32).reshape(-1, stride)
            table[: len(values), : values.shape[1]] = values
        else:
            self._bytes(rank, name).view(np.int32)[: len(values)] = values


def _run(pending: Sequence[tuple[Launch, Variant]]) -> None:
    run([launch for launch, _ in pending], lambda: [variant for _, variant in pending])


def _steps(program: CudaRank, decode: bool, tokens: int) -> StepCode:
    return next(s for s in program.steps if s.decode == decode and s.least <= tokens <= s.most)


def _arrays(inputs: Mapping[str, np.ndarray], context: StepContext, padded: int) -> dict[str, np.ndarray]:
    """The arrays of a step, with sequences behind its own that are empty."""
    own = np.arange(len(context.context_len), len(context.context_len) + padded)
    sequence = np.repeat(np.arange(len(context.context_len)), np.diff(context.query_start))
    slots = context.state_slots if len(context.state_slots) else np.zeros(len(context.context_len))
    found = {
        "ids": [*inputs["ids"], *[0] * padded],
        "positions": [*inputs["positions"], *[-1] * padded],
        "sequence": [*sequence, *own],
        "query_start": [*context.query_start, *(own + 1)],
        "context_len": [*context.context_len, *[0] * padded],
        "state_slots": [*slots, *[0] * padded],
        "rows": [*inputs["rows"], *own],
        "sampler_params": [*[GREEDY] * len(inputs["rows"]), *[(0,) * len(SAMPLER_FIELDS)] * padded],
    }
    assert set(found) | {"block_tables"} == set(STEP_ARRAYS)
    arrays = {name: np.asarray(values, np.int32) for name, values in found.items()}
    return {**arrays, "block_tables": np.asarray(context.block_tables, np.int32)}
