"""Capacity planning: what a model needs of a GPU, and what that GPU can give at most, as arithmetic that can be shown.

Comes in: a fused graph a rank, a `Gpu`, a workload. Goes out: an `Estimate`. Must not know: plans, requests
in flight, a live GPU.
"""
