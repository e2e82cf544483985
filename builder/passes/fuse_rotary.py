"""x * cos + rotate(x) * sin on queries and keys moves into `rope_cache`; cos and sin stay one computation per step.

Comes in: `rope_cache` whose query and key come from that computation, on all or on the first columns of each head.
Goes out: `rope_cache` with cos and sin as inputs. Must not know: where frequencies come from (scaling, families).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Bindings, Edit, Value, View, first, op, report_places, size_of

_X, _COS, _SIN = Value("x"), Value("cos"), Value("sin")
_LOW, _HIGH = op("slice", _X, bind="low"), op("slice", _X, bind="high")
_HALF = op("concat", op("neg", _HIGH), _LOW, bind="turned")
_PAIRS = op("reshape", op("concat", op("reshape", op("neg", _HIGH)), op("reshape", _LOW), bind="turned"))
_ROTATED = {
    style: op("add", op("mul", _X, _COS), op("mul", turned, _SIN))
    for style, turned in (("half", _HALF), ("interleaved", _PAIRS))
}


@dataclass(frozen=True)
class _Rotation:
    """What one rotation reads: the heads before it [T, heads, D], the tables [T, R]; R and which pairs turn."""

    source: str
    cos: str
    sin: str
    width: int
    style: str

    def alike(self, other: _Rotation) -> bool:
        return dataclasses.replace(self, source=other.source) == other


def fuse_rotary(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves the rotation of queries and keys into `rope_cache`.

    A layer that still depends on positions while others were matched stops the build.
    """
    view, edit = View(graph), Edit(graph)
    matched, missed, without = [], [], []
    for node in graph:
        if node.op != "rope_cache" or node.attrs.rotary:
            continue
        if node.attrs.has_norm and not node.attrs.norm_last:  # a norm of what depends on no position
            without.append(node.path)
            continue
        query, key = (_rotation(view, name) for name in node.inputs[:2])
        if query and key and query.alike(key):
            edit.swap(node, *_rotating(view, edit, node, query, key))
            matched.append(node.path)
        elif any(reads_positions(view, name) for name in node.inputs[:2]):
            missed.append(node.path)
        else:
            without.append(node.path)
    after = edit.finish()
    return after, report_places("fuse_rotary", graph, after, matched, missed, without)


def _rotation(view: View, flat: str) -> _Rotation | None:
    """The rotation behind a [T, heads * D] value, or None."""
    reshape = view.producer(flat, "reshape")
    if reshape is None or view.types[reshape.inputs[0]].rank != 3:
        return None
    heads = reshape.inputs[0]
    whole = _match(view, heads)
    if whole:
        return whole
    joined = view.producer(heads, "concat")  # the first columns rotated, the others as they were
    if joined is None or len(joined.inputs) != 2 or joined.attrs.axis not in (-1, 2):
        return None
    part, rest = _match(view, joined.inputs[0]), view.producer(joined.inputs[1], "slice")
    taken = view.producer(part.source, "slice") if part else None
    if not part or not rest or not taken or rest.inputs != taken.inputs:
        return None
    width = size_of(view.types[heads].shape[2])
    if _cut(taken) != (0, part.width) or _cut(rest) != (part.width, width):
        return None
    return dataclasses.replace(part, source=taken.inputs[0])


def _match(view: View, value: str) -> _Rotation | None:
    for style, pattern in _ROTATED.items():
        found = first(view, pattern, value)
        if not found:
            continue
        width = size_of(view.types[found["x"]].shape[-1])
        cos, sin = (_table(view, found[name], width) for name in ("cos", "sin"))
        if cos is not None and sin is not None and _turns(found, style, width):
            return _Rotation(found["x"], cos, sin, width, style)
    return None


def _turns(found: Bindings, style: str, width: int) -> bool:
    """Whether the slices and the concat of a match are the rotation of that style."""
    low, high = found["low"], found["high"]
    last = found["turned"].types[0].rank - 1
    if found["turned"].attrs.axis not in (-1, last):
        return False
    if style == "half":
        return _cut(low) == (0, width // 2) and _cut(high) == (width // 2, width)
    even = [(n.attrs.start, n.attrs.step, n.attrs.axis in (-1, 2)) for n in (low, high)] == [(0, 2, True), (1, 2, True)]
    return even and found["turned"].types[0].shape[1:] == (*low.types[0].shape[1:], 2)


def _cut(node: Node) -> tuple[int, int] | None:
    """What a slice keeps of the last axis of a [T, heads, D] value, without steps."""
    a = node.attrs
    return (a.start, a.stop) if a.axis in (-1, 2) and a.step == 1 else None


def _table(view: View, value: str, width: int) -> str | None:
    """The [T, R] value behind a [T, 1, R] one, shared by all layers; the [T, 1, R] one itself where there is none."""
    if view.types[value] != TensorType("f32", ("T", 1, width)):
        return None
    node = view.producer(value, "reshape")
    return node.inputs[0] if node and view.types[node.inputs[0]] == TensorType("f32", ("T", width)) else value


def _rotating(view: View, edit: Edit, node: Node, query: _Rotation, key: _Rotation) -> list[Node]:
    made, inputs, types = [], [], []
    tables = [(table, TensorType("f32", ("T", query.width))) for table in (query.cos, query.sin)]
    flat = [(r.source, view.types[name]) for r, name in zip((query, key), node.inputs[:2], strict=True)]
    rest = [(name, view.types[name]) for name in node.inputs[3:]]
    for name, kind in [*flat, (node.inputs[2], view.types[node.inputs[2]]), *tables, *rest]:
        if view.types[name] == kind:
            inputs.append(name)
        else:
            made.append(edit.make("reshape", [name], [view.types[name]], {"shape": kind.shape}, like=node, stem=name))
            inputs.append(made[-1].out)
        types.append(kind)
    attrs = vars(node.attrs) | {"rotary": query.width, "style": query.style}
    return [*made, edit.make("rope_cache", inputs, types, attrs, like=node, outputs=node.outputs)]


def reads_positions(view: View, value: str) -> bool:
    """Whether a value depends on the positions by another way than through a linear layer."""
    wanted, seen = [value], set()
    while wanted:
        name = wanted.pop()
        node = view.producers[name]
        if node.op == "input" and node.attrs.name == "positions":
            return True
        if name not in seen and node.op not in ("linear", "paged_attention"):
            seen.add(name)
            wanted += node.inputs
    return False
