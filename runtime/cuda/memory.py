"""A rank's memory on its GPU: every space of a program, allocated once, and the arrays of a step.

Comes in: a program, weights, sizes of the pools. Goes out: addresses; uploads of a step. Must not know: launches,
ranks.
"""

from __future__ import annotations

import ctypes

import numpy as np

from llmc.artifacts.cuda_program import Address, CudaProgram
from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.artifacts.trt_program import TrtProgram
from llmc.runtime.cuda import driver
from llmc.runtime.native import StepArrays

_ALIGN = 256
#: Arrays with an entry for each token, and those with one for each sequence.
_BY_TOKEN = ("ids", "positions", "sequence")


class DeviceMemory:
    """`bases`: where each space and each array of a step starts. A step's arrays are written to pinned memory that
    looks like that of the GPU, and copied from there.
    """

    def __init__(
        self,
        program: CudaProgram | TrtProgram,
        weights: np.ndarray,
        shared: np.ndarray,
        kv_bytes: int,
        state_bytes: int,
    ) -> None:
        self.program = program
        sizes = {
            "weights": weights.nbytes,
            "shared": shared.nbytes,
            "constants": len(program.constants),
            "arena": program.arena_bytes,
            "kv": kv_bytes,
            "states": state_bytes,
            "logits": 4 * program.max_num_seqs * program.logits_width,
            "tokens": 4 * program.max_num_seqs,
        }
        self.sizes = sizes
        self.bases = {"null": 0, **{name: driver.allocate(size) for name, size in sizes.items()}}
        for name, data in (("weights", weights), ("shared", shared), ("constants", _bytes(program.constants))):
            if data.nbytes:
                driver.call("cuMemcpyHtoD", self.bases[name], data.ctypes.data, data.nbytes)
        # Of memory that is not pinned the last piece may still be on its way, and a rank's stream waits for no other.
        driver.call("cuCtxSynchronize")
        self._place_arrays()

    def _place_arrays(self) -> None:
        offsets, end = {}, 0
        for name, count in self.program.step_arrays().items():
            offsets[name] = end
            end += -(-4 * count // _ALIGN) * _ALIGN
        device, self._host = driver.allocate(end), driver.allocate_pinned(end)
        self.arrays_bytes = end
        self.bases |= {name: device + offset for name, offset in offsets.items()}
        self._offsets = offsets
        data = np.ctypeslib.as_array((ctypes.c_int32 * (end // 4)).from_address(self._host))
        #: The pinned twins, i32.
        self.arrays = {
            name: data[offsets[name] // 4 : offsets[name] // 4 + count]
            for name, count in self.program.step_arrays().items()
        }
        self.tables = self.arrays["block_tables"].reshape(-1, self.program.table_stride)
        self.sampler_params = self.arrays["sampler_params"].reshape(-1, len(SAMPLER_FIELDS))

    def address(self, place: Address) -> int:
        """Where it is on the GPU."""
        return self.bases[place.space] + place.offset

    def write(self, step: StepArrays, padded: int) -> None:
        """Writes a step's arrays; with `padded` more than its sequences, of one token each, the others are empty: they
        have position -1 and no context.
        """
        tokens, seqs, rows = len(step.ids), len(step.context_len), len(step.rows)
        arrays, stride = self.arrays, step.block_tables.shape[1]
        arrays["ids"][:tokens], arrays["positions"][:tokens] = step.ids, step.positions
        lengths = np.diff(step.query_start)
        arrays["sequence"][:tokens] = np.repeat(np.arange(seqs, dtype=np.int32), lengths)
        arrays["query_start"][: seqs + 1] = step.query_start
        arrays["context_len"][:seqs], arrays["rows"][:rows] = step.context_len, step.rows
        self.tables[:seqs, :stride] = step.block_tables
        arrays["state_slots"][:seqs] = step.state_slots
        self.sampler_params[: max(rows, padded)] = 0  # the host chooses
        if step.sampler_params is not None:
            self.sampler_params[:rows] = step.sampler_params
        if padded > seqs:
            own = np.arange(seqs, padded, dtype=np.int32)
            arrays["ids"][tokens:padded], arrays["positions"][tokens:padded] = 0, -1
            arrays["sequence"][tokens:padded], arrays["rows"][rows:padded] = own, own
            arrays["query_start"][seqs + 1 : padded + 1] = own + 1
            arrays["context_len"][seqs:padded] = 0
            arrays["state_slots"][seqs:padded] = 0
            self.tables[seqs:padded] = 0

    def upload(self, stream: driver.Stream, tokens: int, seqs: int, rows: int) -> None:
        """Copies what a step of these sizes uses."""
        counts = {
            **dict.fromkeys(_BY_TOKEN, tokens),
            "query_start": seqs + 1,
            "context_len": seqs,
            "block_tables": seqs * self.program.table_stride,
            "state_slots": seqs,
            "rows": rows,
            "sampler_params": rows * len(SAMPLER_FIELDS),
        }
        for name, count in counts.items():
            stream.upload(self.bases[name], self._host + self._offsets[name], 4 * count)


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
