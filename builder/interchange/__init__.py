"""A fused graph as a file for others: ONNX. Comes in: a graph of one rank, its weights. Goes out: a model file, with
weights in a second one beside it. Must not know: targets, plans being served. onnx is imported when it is used.
"""
