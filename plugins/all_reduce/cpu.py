"""How the cpu target calls all_reduce, and how much memory the ranks share. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.all_reduce import Attrs
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Product, row_bytes

#: kCommHeaderBytes and kMaxRanks of plugins/cpu/rank_barrier.h (a test compares them).
COMM_HEADER_BYTES = 4096
MAX_RANKS = 16


def slot_bytes(max_tokens: int, cols: int) -> int:
    """One rank's partial: f32[max_tokens, cols], rounded up to 64 bytes."""
    return -(-max_tokens * cols * 4 // 64) * 64


def comm_bytes(max_tokens: int, cols: int, tp: int) -> int:
    """Memory that `tp` ranks share: header and two halves of `tp` slots. `cols`: the widest all-reduce. 0 for tp 1."""
    if not 1 <= tp <= MAX_RANKS:
        raise ValueError(f"tp={tp} is not within 1..{MAX_RANKS}")
    return COMM_HEADER_BYTES + 2 * tp * slot_bytes(max_tokens, cols) if tp > 1 else 0


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """The whole input as one row of numbers."""
    width = row_bytes(*inputs)
    return CpuCall(
        header="plugins/all_reduce/cpu.h",
        function="all_reduce",
        args=(Pointer("in", 0), Pointer("out", 0), Product(inputs[0].shape)),
        sums_ranks=width if env.tp > 1 else 0,
    )
