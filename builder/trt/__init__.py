"""A fused graph as a TensorRT network. Comes in: a graph of one rank, its weights, TensorRT's own module. Goes out: a
serialized engine. Must not know: plans, runtimes. TensorRT is an optional extra: nothing imports it but library.py.
"""
