"""NVIDIA targets: kernels compiled ahead of time to cubins, and the program that launches them.

Comes in: a rank's fused graph, the launches of its plug-ins. Goes out: cubins and the program, as data for the plan.
Needs neither a GPU nor a driver. Must not know: requests, HTTP, the machine that will serve.
"""
