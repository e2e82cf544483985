"""What kernels of recurrent operators share in Triton: a sequence's tokens and its slot, numbers of a row. Imported by
the compiler and the interpreter alone.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(sequence, query_start):
    """The sequence's first token of this step, and the one behind its last."""
    return tl.load(query_start + sequence), tl.load(query_start + sequence + 1)


@triton.jit
def slot_of(sequence, states, state_slots, SLOT: tl.constexpr):
    """Where the sequence's state begins; slots are SLOT numbers apart."""
    return states + tl.load(state_slots + sequence).to(tl.int64) * SLOT


@triton.jit
def numbers(at, inside):
    """What stands at these places, as f32; 0 for those that are not inside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)
