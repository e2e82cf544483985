"""sampler: from a row of logits to a token. Native code in `cpu.h` (exported as llmc_sample; `weights.h` and
`candidates.h` are parts of it), a kernel for GPUs in `kernels.py`, truth in `reference.py`.

It is no operator of the graph: it runs after a step, on rows that all ranks have filled; in the engine's core process,
or on the GPU behind the step's last launch.
"""
