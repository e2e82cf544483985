"""From a fused graph to a serialized TensorRT engine of its decode step. Comes in: graph, weights by recipe, the most
sequences and the longest context, an SM. Goes out: `TrtEngine`. Must not know: files, how the engine is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, UnsupportedError
from llmc.builder.ir import Graph, Node
from llmc.builder.trt.emitter import Emitter
from llmc.builder.trt.operators import LAYERS


@dataclass(frozen=True)
class TrtEngine:
    """`layers`: layer name -> kind, as the network was emitted; `engine` the serialized bytes."""

    layers: dict[str, str]
    engine: bytes


def build_engine(
    trt: Any, graph: Graph, weights: Callable[[str], np.ndarray], max_sequences: int, max_context: int, sm: int
) -> TrtEngine:
    """`trt` is TensorRT's module. Raises UnsupportedError naming every operator without layers, EnvironmentFault where
    this TensorRT cannot build for the SM.
    """
    _check(graph)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    e = Emitter(trt, network, graph.types())
    shapes = _inputs(e, graph, max_context)
    for node in graph:
        if node.op != "input":
            before = network.num_layers
            _add(e, node, weights)
            for index in range(before, network.num_layers):
                network.get_layer(index).name = f"{node.op} {node.path or node.out} {index}"
    _outputs(e, graph)
    config = _config(trt, builder, sm)
    profile = builder.create_optimization_profile()
    for name, shape in shapes.items():
        profile.set_shape(name, *((n, *shape) for n in (1, min(8, max_sequences), max_sequences)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UnsupportedError(f"{graph.name}: TensorRT {trt.__version__} built no engine of this network")
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return TrtEngine({layer.name: layer.type.name for layer in layers}, bytes(engine))


def _check(graph: Graph) -> None:
    if graph.tp != 1:
        raise UnsupportedError(f"TensorRT engines hold one rank here, and this is rank {graph.rank} of {graph.tp}")
    stuck = {n.op: n.path for n in reversed(graph.nodes) if n.op not in (*LAYERS, "input", "param")}
    if stuck:
        places = "; ".join(f"{op} (in {path})" for op, path in sorted(stuck.items()))
        raise UnsupportedError(f"no TensorRT layers for these operators: {places}")


def _inputs(e: Emitter, graph: Graph, max_context: int) -> dict[str, tuple[int, ...]]:
    """Adds the step's arrays and caches; name -> shape without the first axis, the number of sequences."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(value: str, name: str, dtype: str, *shape: int) -> None:
        shapes[name] = shape
        e.values[value] = e.network.add_input(name, e.dtype(dtype), (-1, *shape))

    for node in graph:
        if node.op == "input":
            add(node.out, node.attrs.name, "i32")
    add("context_len", "context_len", "i32")
    add("write_indices", "write_indices", "i32")
    for node in graph:
        if node.op == "rope_cache":
            for name in ("keys", "values"):
                cache = f"{name}.{node.attrs.layer}"
                add(cache, cache, "bf16", node.attrs.kv_heads, max_context, node.attrs.head_dim)
    return shapes


def _add(e: Emitter, node: Node, weights: Callable[[str], np.ndarray]) -> None:
    if node.op == "param":
        e.values[node.out] = e.constant(weights(node.attrs.recipe), node.type.dtype)
        return
    try:
        e.values |= zip(node.outputs, LAYERS[node.op](e, node), strict=True)
    except ValueError as error:
        raise UnsupportedError(f"{node.op} @{node.path}: {error}") from error


def _outputs(e: Emitter, graph: Graph) -> None:
    (logits,) = graph.outputs
    caches = [name for name in e.values if name.startswith(("keys.", "values.")) and name.endswith(".out")]
    for name, value in ((n, e.values[n]) for n in (logits, *caches)):
        value.name = "logits" if name == logits else name
        e.network.mark_output(value)


def _config(trt: Any, builder: Any, sm: int) -> Any:
    """TensorRT builds for the GPU at hand, TensorRT-RTX for any that it knows."""
    config = builder.create_builder_config()
    if hasattr(trt, "ComputeCapability"):
        name = f"SM{sm}"
        if not hasattr(trt.ComputeCapability, name):
            raise EnvironmentFault(
                f"sm_{sm}: TensorRT-RTX {trt.__version__} does not build for it; sm_89 and sm_120 do"
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
    return config
