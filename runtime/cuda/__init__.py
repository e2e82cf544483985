"""Running plans for NVIDIA GPUs: the only place that imports cuda-python, and only in processes that use a GPU.

Comes in: a plan's program and sections. Goes out: an engine with the interface of `runtime.native.Engine`. Must not
know: requests, scheduling, Triton.
"""
