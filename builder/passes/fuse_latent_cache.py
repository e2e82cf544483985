"""The latent's norm and the rotation of the shared key part and of the queries' move into `latent_cache`.

Comes in: `latent_cache` whose latent comes from `rms_norm` and whose query and key parts are rotated. Goes out: the
same operator with the norm's weight and cos and sin of each pair as inputs. Must not know: where frequencies come from.

Which pairs a rotation turns matters, and not where it leaves them: models write the turned pairs as halves or side by
side, but a score is the sum over all of them, of query and key alike, if both have them in one order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Bindings, Edit, Value, View, first, op, report_places, size_of

_A, _B, _X, _COS, _SIN = Value("a"), Value("b"), Value("x"), Value("cos"), Value("sin")
_FIRST = op("sub", op("mul", _A, _COS), op("mul", _B, _SIN))
_SECOND = op("add", op("mul", _B, _COS), op("mul", _A, _SIN))
#: The turned pairs, first elements before second ones or side by side.
_PAIRS = op("concat", _FIRST, _SECOND, bind="joined")
_SIDE_BY_SIDE = op("reshape", op("concat", op("reshape", _FIRST), op("reshape", _SECOND), bind="joined"))
_LOW, _HIGH = op("slice", _X, bind="low"), op("slice", _X, bind="high")
_WHOLE = op("add", op("mul", _X, _COS), op("mul", op("concat", op("neg", _HIGH), _LOW, bind="joined"), _SIN))


@dataclass(frozen=True)
class _Rotation:
    """The value before it, the tables [T, R/2] (of which `halved`: the first half of [T, R]), the pairs' style before
    the rotation, and whether they lie side by side behind it.
    """

    source: str
    cos: str
    sin: str
    halved: bool
    style: str
    side_by_side: bool

    def alike(self, other: _Rotation) -> bool:
        return dataclasses.replace(self, source=other.source) == other


def fuse_latent_cache(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves norms and rotations in. A layer that is left out while others were matched stops the build."""
    view, edit = View(graph), Edit(graph)
    matched: list[str] = []
    missed: list[str] = []
    for node in graph:
        if node.op != "latent_cache" or node.attrs.style is not None or node.attrs.norm_eps is not None:
            continue
        query, key = _rotation(view, node.inputs[0]), _rotation(view, node.inputs[2])
        rotated = (query, key) if query and key and query.alike(key) else None
        norm = view.producer(node.inputs[1], "rms_norm")
        if norm is not None and (view.only_user(norm.outputs[0]) is not node or norm.attrs.residual):
            norm = None
        if rotated or norm:
            edit.swap(node, *_fused(view, edit, node, rotated, norm))
        (matched if rotated or (query is None and key is None and norm) else missed).append(node.path)
    after = edit.finish()
    return after, report_places("fuse_latent_cache", graph, after, matched, missed)


def _rotation(view: View, flat: str) -> _Rotation | None:
    """The rotation behind a [T, n] value, directly or as [T, H, R]."""
    node = view.producer(flat, "reshape")
    values = [flat] if node is None else [flat, node.inputs[0]]
    for value in values:
        for pattern in (_PAIRS, _SIDE_BY_SIDE):
            found = first(view, pattern, value)
            if found:
                return _of_pairs(view, found, pattern is _SIDE_BY_SIDE)
        found = first(view, _WHOLE, value)
        if found:
            return _of_halves(view, found)
    return None


def _along_last(node: Node) -> bool:
    """Whether a slice or a concat goes along the last axis."""
    return node.attrs.axis in (-1, node.types[0].rank - 1)


def _of_pairs(view: View, found: Bindings, side_by_side: bool) -> _Rotation | None:
    a, b = (view.producer(found[name], "slice") for name in "ab")
    joined = found["joined"]
    if a is None or b is None or a.inputs != b.inputs or not all(map(_along_last, (a, b, joined))):
        return None
    if side_by_side and joined.type.shape != (*a.type.shape, 2):
        return None
    source = a.inputs[0]
    rope = size_of(view.types[source].shape[-1])
    cuts = [(s.attrs.start, s.attrs.stop, s.attrs.step) for s in (a, b)]
    styles = {
        "half": [(0, rope // 2, 1), (rope // 2, rope, 1)],
        "interleaved": [(0, rope, 2), (1, rope, 2)],
    }
    style = next((name for name, wanted in styles.items() if cuts == wanted), None)
    tables = [_table(view, found[name], rope // 2) for name in ("cos", "sin")]
    if style is None or None in tables:
        return None
    return _Rotation(source, str(tables[0]), str(tables[1]), False, style, side_by_side)


def _of_halves(view: View, found: Bindings) -> _Rotation | None:
    rope = size_of(view.types[found["x"]].shape[-1])
    low, high = found["low"].attrs, found["high"].attrs
    tables = [_table(view, found[name], rope) for name in ("cos", "sin")]
    if (low.start, low.stop, low.step, high.start, high.stop, high.step) != (0, rope // 2, 1, rope // 2, rope, 1):
        return None
    if not all(_along_last(found[name]) for name in ("low", "high", "joined")):
        return None
    if any(table is None or not _halves_alike(view, table) for table in tables):
        return None
    return _Rotation(found["x"], str(tables[0]), str(tables[1]), True, "half", False)


def _table(view: View, value: str, width: int) -> str | None:
    """The [T, width] value behind a [T, 1, width] or [T, width] one."""
    node = view.producers[value]
    if view.types[value] == TensorType("f32", ("T", 1, width)) and node.op == "reshape":
        value = node.inputs[0]
    return value if view.types[value] == TensorType("f32", ("T", width)) else None


def _halves_alike(view: View, table: str) -> bool:
    """Whether a table's second half is its first: elementwise on some value joined with itself."""
    node = view.producers[table]
    if node.op == "concat":
        return len(node.inputs) == 2 and node.inputs[0] == node.inputs[1]
    if node.op in ("cos", "sin"):
        return _halves_alike(view, node.inputs[0])
    if node.op == "mul":
        scaled = [name for name in node.inputs if view.scalar(name) is None]
        return len(scaled) == 1 and _halves_alike(view, scaled[0])
    return False


def _fused(
    view: View, edit: Edit, node: Node, turned: tuple[_Rotation, _Rotation] | None, norm: Node | None
) -> list[Node]:
    made: list[Node] = []
    a = node.attrs
    inputs = [(name, view.types[name]) for name in node.inputs]
    attrs = dict(vars(a))

    def emit(op_name: str, value: tuple[str, TensorType], **more: object) -> tuple[str, TensorType]:
        made.append(edit.make(op_name, [value[0]], [value[1]], more, like=node, stem=value[0]))
        return made[-1].out, made[-1].type

    if turned is not None:
        query, key = turned
        inputs[0], attrs["q_start"] = _matrix(view, emit, query.source, a.heads)
        source = (key.source, view.types[key.source])
        inputs[2] = source if source[1].rank == 2 else emit("reshape", source, shape=("T", a.rope))
        for table in (query.cos, query.sin):
            value = (table, view.types[table])
            cut = {"axis": 1, "start": 0, "stop": a.rope // 2, "step": 1}
            inputs.append(emit("slice", value, **cut) if query.halved else value)
        attrs["style"] = query.style
    if norm is not None:
        inputs[1] = (norm.inputs[0], view.types[norm.inputs[0]])
        inputs.append((norm.inputs[1], view.types[norm.inputs[1]]))
        attrs["norm_eps"] = norm.attrs.eps
    names, types = [name for name, _ in inputs], [kind for _, kind in inputs]
    return [*made, edit.make("latent_cache", names, types, attrs, like=node, outputs=node.outputs)]


def _matrix(
    view: View, emit: Callable[..., tuple[str, TensorType]], source: str, heads: int
) -> tuple[tuple[str, TensorType], int]:
    """A [T,H,R] value as columns of a matrix [T, H * S], and where they begin in a head's S."""
    cut = view.producer(source, "slice")
    wide = view.producer(cut.inputs[0], "reshape") if cut and cut.attrs.step == 1 else None
    if cut and wide and cut.attrs.axis in (-1, 2) and view.types[wide.inputs[0]].rank == 2:
        return (wide.inputs[0], view.types[wide.inputs[0]]), cut.attrs.start
    kind = view.types[source]
    flat = {"shape": ("T", heads * size_of(kind.shape[-1]))}
    return emit("reshape", (source, kind), **flat), 0
