"""The ONNX model of a fused graph, its weights named and not held. Comes in: a graph of one rank, the cache's dtype and
block size. Goes out: a `ModelProto`, and which recipe belongs where in the file of weights. Must not know: files.

Inputs are a step's arrays (ids, positions, rows, query_start, context_len, block_tables) and each layer's keys and
values as blocks; outputs are the logits and the same blocks with this step's keys and values in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from llmc.artifacts import VERSION
from llmc.artifacts.types import Dim, TensorType
from llmc.builder.interchange.emitter import DOMAIN, ELEMENTS, Emitter
from llmc.builder.interchange.operators import DOMAIN_VERSION, OPSET, TRANSLATIONS, cache_names
from llmc.builder.ir import Graph, Node
from llmc.builder.translation.checks import require_translations, translated
from llmc.builder.weights.placement import ALIGN, Member, Placement


@dataclass(frozen=True)
class OnnxModel:
    """`proto` reads its weights from the file `location`, whose bytes are those of `weights`."""

    proto: onnx.ModelProto
    weights: Member


def onnx_model(graph: Graph, kv_dtype: str, block_size: int, location: str) -> OnnxModel:
    """Raises UnsupportedError for what has no ONNX form, by name."""
    require_translations(graph, TRANSLATIONS, ELEMENTS, "ONNX")
    e = Emitter(graph.types(), graph.tp)
    weights, initializers = _weights(graph, location)
    for node in graph:
        if node.op in ("input", "param"):
            continue
        since = len(e.nodes)
        if node.op == "const":
            kind = node.type
            e.constants[node.out] = helper.make_tensor(
                node.out, ELEMENTS[kind.dtype], [int(d) for d in kind.shape], node.attrs.values
            )
            continue
        e.rename(since, {result: name for name, result in translated(TRANSLATIONS, e, node).items()})
    before, after = _cache(graph, kv_dtype, block_size)
    made = helper.make_graph(
        e.nodes,
        graph.name,
        [*_step_inputs(graph), *before],
        [_value(name, e.types[name]) for name in graph.outputs] + after,
        [*initializers, *e.constants.values()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    proto = helper.make_model(made, opset_imports=opsets, producer_name="llmc", producer_version=VERSION)
    return OnnxModel(proto, weights)


def _weights(graph: Graph, location: str) -> tuple[Member, list[onnx.TensorProto]]:
    """Every parameter's place in the file of weights, one after the other."""
    placements: list[Placement] = []
    tensors = []
    end = 0
    for node in (n for n in graph if n.op == "param"):
        offset = -(-end // ALIGN) * ALIGN
        recipe, kind, element = _stored(node)
        placements.append(Placement(recipe, kind, offset, node.path))
        tensors.append(_external(node, element, location, offset, kind.nbytes()))
        end = offset + kind.nbytes()
    return Member(tuple(placements), end), tensors


def _stored(node: Node) -> tuple[str, TensorType, str]:
    """Recipe and type of the bytes of a parameter, and its dtype in ONNX. Of 4-bit numbers ONNX has two in a byte, over
    the ends of rows: where rows are odd, as those of zero points may be, they are a byte each, and cast where they are
    read.
    """
    recipe, kind = node.attrs.recipe, node.type
    if kind.dtype != "u4":
        return recipe, kind, kind.dtype
    if int(kind.shape[-1]) % 2:
        return recipe, kind, "u8"
    return f"nibbles({recipe})", TensorType("u8", (*kind.shape[:-1], int(kind.shape[-1]) // 2)), "u4"


def _external(node: Node, element: str, location: str, offset: int, nbytes: int) -> onnx.TensorProto:
    tensor = TensorProto()
    tensor.name, tensor.data_type = node.out, ELEMENTS[element]
    tensor.dims[:] = [int(d) for d in node.type.shape]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _value(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENTS[kind.dtype], list(kind.shape))


def _step_inputs(graph: Graph) -> list[onnx.ValueInfoProto]:
    own = {node.attrs.name: _value(node.out, node.type) for node in graph if node.op == "input"}
    shapes: dict[str, list[Dim]] = {
        "query_start": ["num_seqs_and_1"],
        "context_len": ["num_seqs"],
        "block_tables": ["num_seqs", "blocks_of_a_sequence"],
    }
    rest = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name, shape in shapes.items()]
    return [*own.values(), *rest]


def _cache(
    graph: Graph, kv_dtype: str, block_size: int
) -> tuple[Sequence[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """Each layer's keys and values [num_blocks, block_size, heads, width], before and after the step."""
    before: list[onnx.ValueInfoProto] = []
    after: list[onnx.ValueInfoProto] = []
    for node in graph:
        if node.op not in ("rope_cache", "latent_cache"):
            continue
        a = node.attrs
        latent = node.op == "latent_cache"
        widths = (a.latent + a.rope, a.latent) if latent else (a.head_dim, a.value_dim)
        for found, version in ((before, 0), (after, 1)):
            for name, width in zip(cache_names(a.layer, version), widths, strict=True):
                shape = ["num_blocks", block_size, 1 if latent else a.kv_heads, width]
                found.append(helper.make_tensor_value_info(name, ELEMENTS[kv_dtype], shape))
    return before, after
