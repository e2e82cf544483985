"""What the writers of others' graphs have in common: ONNX (interchange) and TensorRT (trt). Comes in: a graph, a writer
of another's. Goes out: values of that graph; refusals by name. Must not know: whose graph is written.
"""
