"""How the cuda targets choose tokens on the GPU. Must not know: builder, runtime.

It is no operator of the graph: its launch stands behind all others of a step, where one rank has whole rows of logits.
"""

from __future__ import annotations

from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.plugins.cuda.call import CudaCall, Product, Space, StepArray
from llmc.plugins.cuda.rows import power_of_two

#: Logits that a program looks at together, and its warps.
_BLOCK, _WARPS = 2048, 8


def launch(vocab: int) -> CudaCall:
    """A program for each wanted row, of `vocab` logits. What lies in the arena is read no more, so the weights of the
    candidates lie there: `scratch_bytes` from its start on.
    """
    return CudaCall(
        kernel="sampler.kernels:sample",
        args={
            "logits": Space("logits", "f32"),
            "weights": Space("arena", "i32"),
            "sampler_params": StepArray("sampler_params"),
            "tokens": Space("tokens", "i32"),
        },
        constexprs={"FIELDS": len(SAMPLER_FIELDS), "VOCAB": vocab, "BLOCK": min(_BLOCK, power_of_two(vocab))},
        grid=((Product(("S",)),),),
        num_warps=_WARPS,
    )


def scratch_bytes(vocab: int, rows: int) -> int:
    """Of the arena, for so many rows."""
    return 4 * vocab * rows
