"""The cpu target: fused graphs to launches, memory plan, C++ and a shared object per rank.

Comes in: one fused graph per rank, a shape profile, a target. Goes out: `Lowered`, then each rank's code as bytes. Must
not know: checkpoints, plan files, requests.
"""
