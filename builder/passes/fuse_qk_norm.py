"""Norms of the queries and keys move into `rope_cache`: over each head or over all of them, RMS or with a mean.

Comes in: `rope_cache` whose query and key come from `rms_norm` or `layer_norm`. Goes out: `rope_cache` with the norms'
weights (and biases) as its last inputs. Must not know: families. Runs before fuse_rotary, for norms of what is rotated
already, and after it, for norms before the rotation. Layers without a rotation match the first time; those of the same
model with one may have to wait for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.fuse_rotary import reads_positions
from llmc.builder.passes.rewrite import Edit, View, report_places

_KINDS = {"rms_norm": "rms", "layer_norm": "layer"}


@dataclass(frozen=True)
class _Norm:
    """A norm of q or k: what it reads, its kind, over what it goes, its weight (and bias)."""

    source: str
    kind: str
    scope: str
    eps: float
    weights: tuple[str, ...]

    def alike(self, other: _Norm) -> bool:
        return (self.kind, self.scope, self.eps) == (other.kind, other.scope, other.eps)


def fuse_qk_norm(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves norms into `rope_cache`, where queries and keys both have one, of one kind and with one epsilon."""
    view, edit = View(graph), Edit(graph)
    matched: list[str] = []
    missed: list[str] = []
    other: list[str] = []
    for node in graph:
        if node.op != "rope_cache":
            continue
        if node.attrs.has_norm or _is_rotated(view, node):
            other.append(node.path)
        if node.attrs.has_norm:
            continue
        query, key = (_norm(view, node, name) for name in node.inputs[:2])
        if query and key and query.alike(key):
            edit.swap(node, *_norming(view, edit, node, query, key))
            matched.append(node.path)
        elif query or key:
            missed.append(node.path)
    after = edit.finish()
    return after, report_places("fuse_qk_norm", graph, after, matched, missed, other)


def _is_rotated(view: View, node: Node) -> bool:
    """Whether queries come from a rotation that is operators still: fuse_rotary sees to those."""
    return not node.attrs.rotary and reads_positions(view, node.inputs[0])


def _norm(view: View, node: Node, flat: str) -> _Norm | None:
    """The norm behind a [T, heads * head_dim] value, or None."""
    reshape = view.producer(flat, "reshape")
    norm = view.producer(reshape.inputs[0] if reshape else flat, *_KINDS)
    if norm is None or norm.attrs.residual:
        return None
    width = norm.types[0].shape[-1]
    scope = "head" if norm.types[0].rank == 3 and width == node.attrs.head_dim else "all"
    if scope == "all" and (norm.op != "rms_norm" or norm.types[0] != view.types[flat]):
        return None
    if scope == "all" and not node.attrs.rotary and reads_positions(view, norm.inputs[0]):
        return None
    return _Norm(norm.inputs[0], _KINDS[norm.op], scope, norm.attrs.eps, norm.inputs[1:])


def _norming(view: View, edit: Edit, node: Node, query: _Norm, key: _Norm) -> list[Node]:
    flat = [
        edit.make(
            "reshape", [n.source], [view.types[n.source]], {"shape": view.types[name].shape}, like=node, stem=name
        )
        for n, name in zip((query, key), node.inputs[:2], strict=True)
    ]
    pairs = zip(query.weights, key.weights, strict=True)
    inputs = [flat[0].out, flat[1].out, *node.inputs[2:], *(name for pair in pairs for name in pair)]
    types: Sequence[TensorType] = [flat[0].type, flat[1].type, *(view.types[name] for name in inputs[2:])]
    last = not node.attrs.rotary and reads_positions(view, query.source)
    attrs = vars(node.attrs) | {
        "qk_norm_eps": query.eps,
        "norm": query.kind,
        "norm_scope": query.scope,
        "norm_bias": query.kind == "layer",
        "norm_last": last,
    }
    return [*flat, edit.make("rope_cache", inputs, types, attrs, like=node, outputs=node.outputs)]
