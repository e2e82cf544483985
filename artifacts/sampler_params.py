"""What a GPU is told of a row of logits whose token it may choose. Must not know: who asks, kernels.

Imports nothing, as ranks import it.
"""

from __future__ import annotations

#: A row of i32s. `on_gpu`: 1 where the GPU is to choose, 0 where the logits go to the host; the bits of two f32; top_k;
#: the least weight that min_p leaves (see plugins/sampler/cpu.h); the halves of the seed; the counter.
SAMPLER_FIELDS = ("on_gpu", "temperature", "top_p", "top_k", "least", "seed_low", "seed_high", "counter")
#: The likeliest token.
GREEDY = (1, *[0] * (len(SAMPLER_FIELDS) - 1))
