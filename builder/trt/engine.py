"""From a fused graph to a serialized TensorRT engine. Comes in: graph, weights by recipe, a shape profile, an SM. Goes
out: `TrtEngine`. Must not know: files, how the engine is run.

One network, strongly typed, with two optimization profiles: number 0 for decode steps, number 1 for steps of any
mixture (steps.py). Two builds of TensorRT-RTX give engines of one length that differ in a few bytes: it numbers the
sizes that are not known in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, UnsupportedError
from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.trt_program import DTYPES
from llmc.artifacts.types import NUMPY_DTYPES, Dim
from llmc.builder.ir import Graph, Node
from llmc.builder.translation.checks import require_translations, translated
from llmc.builder.translation.operators import with_unknown
from llmc.builder.trt.emitter import Emitter
from llmc.builder.trt.operators import LAYERS
from llmc.builder.trt.steps import shapes, step_ranges

Layer = Callable[[Emitter, Node], list[Any]]


class Cache(Protocol):
    """How a network keeps keys and values: linear_cache.py, paged_cache.py."""

    inputs: dict[str, tuple[str, tuple[Dim, ...]]]
    layers: Mapping[str, Layer]


@dataclass(frozen=True)
class TrtEngine:
    """`layers`: layer name -> kind, as the network was emitted; `engine` the serialized bytes; `inputs`: name -> dtype
    and shape. The results are `logits` and, under the name `NAME.out`, each pool or cache.
    """

    layers: dict[str, str]
    engine: bytes
    inputs: dict[str, tuple[str, tuple[Dim, ...]]]


def build_engine(
    trt: Any, graph: Graph, weights: Callable[[str], np.ndarray], cache: Cache, profile: ShapeProfile, sm: int
) -> TrtEngine:
    """`trt` is TensorRT's module. Raises UnsupportedError naming every operator without layers, EnvironmentFault where
    this TensorRT cannot build for the SM.
    """
    layers = {**LAYERS, **cache.layers}
    require_layers(graph, layers)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    config = _config(trt, builder, sm)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    e = Emitter(trt, network, graph.types(), graph.tp)
    inputs = _inputs(e, graph, cache)
    for node in graph:
        if node.op != "input":
            before = network.num_layers
            _add(e, node, layers, weights)
            for index in range(before, network.num_layers):
                network.get_layer(index).name = f"{node.op} {node.path or node.out} {index}"
    _outputs(e, graph)
    for ranges in step_ranges(profile):
        optimization = builder.create_optimization_profile()
        for name, (_, dims) in inputs.items():
            optimization.set_shape(name, *shapes(dims, ranges))
        config.add_optimization_profile(optimization)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UnsupportedError(f"{graph.name}: TensorRT {trt.__version__} built no engine of this network")
    made = [network.get_layer(index) for index in range(network.num_layers)]
    return TrtEngine({layer.name: layer.type.name for layer in made}, bytes(engine), inputs)


def require_layers(graph: Graph, layers: Collection[str]) -> None:
    """Raises UnsupportedError for what has no TensorRT form, by name."""
    require_translations(graph, layers, DTYPES, "TensorRT", "--dtype bf16 and --fp8 have one")


def _inputs(e: Emitter, graph: Graph, cache: Cache) -> dict[str, tuple[str, tuple[Dim, ...]]]:
    """Adds the step's arrays and the cache; name -> dtype, shape. Sizes that are the same in all of them have one name:
    else TensorRT takes each for another.
    """
    found: dict[str, tuple[str, tuple[Dim, ...]]] = {}

    def add(name: str, dtype: str, dims: tuple[Dim, ...]) -> Any:
        found[name] = dtype, dims
        tensor = e.network.add_input(name, e.dtype(dtype), with_unknown(dims))
        for axis, dim in enumerate(dims):
            if isinstance(dim, str):
                tensor.set_dimension_name(axis, dim)
        return tensor

    for node in graph:
        if node.op == "input":
            e.values[node.out] = e.values[node.attrs.name] = add(node.attrs.name, "i32", node.type.shape)
    for name, (dtype, dims) in cache.inputs.items():
        if name not in found:
            e.values[name] = add(name, dtype, dims)
    return found


def _add(e: Emitter, node: Node, layers: Mapping[str, Layer], weights: Callable[[str], np.ndarray]) -> None:
    if node.op in ("param", "const"):
        shape = [int(d) for d in node.type.shape]
        value = weights(node.attrs.recipe) if node.op == "param" else np.array(node.attrs.values).reshape(shape)
        e.values[node.out] = e.constant(value.astype(NUMPY_DTYPES[node.type.dtype]), node.type.dtype)
        return
    e.values |= translated(layers, e, node)


def _outputs(e: Emitter, graph: Graph) -> None:
    (logits,) = graph.outputs
    for name, tensor in {"logits": e.values[logits], **e.outputs}.items():
        tensor.name = name
        e.network.mark_output(tensor)


def _config(trt: Any, builder: Any, sm: int) -> Any:
    """TensorRT builds for the GPU at hand, TensorRT-RTX for any that it knows."""
    config = builder.create_builder_config()
    if hasattr(trt, "plugin"):
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if hasattr(trt, "ComputeCapability"):
        known = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
        if sm not in known:
            others = ", ".join(f"sm_{number}" for number in known)
            raise EnvironmentFault(f"sm_{sm}: TensorRT-RTX {trt.__version__} does not build for it, but for {others}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    return config
