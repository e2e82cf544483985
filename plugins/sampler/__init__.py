"""sampler: from a row of logits to a token. Native code in `cpu.h` (exported as llmc_sample), truth in `reference.py`.

It is no operator of the graph: it runs in the engine's core process, after a step, on rows that all ranks have filled.
"""
