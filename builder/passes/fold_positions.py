"""An offset that is added to positions before a table is read moves into the table: its first rows are left out.

Comes in: `embedding(positions + 2, table)`, as models with learned positions write it whose table starts with rows that
padding had. Goes out: `embedding(positions, table without its first 2 rows)`. Must not know: why the offset is there.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, Scalar, Value, View, first, op, report, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.cut import sliced

_SHIFTED = op("add", Value("ids"), Scalar("offset"))


def fold_positions(graph: Graph) -> tuple[Graph, PassReport]:
    """Shortens every table that is read at rows + a constant that is not negative."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        found = first(view, _SHIFTED, node.inputs[0]) if node.op == "embedding" else None
        if not found or found["offset"] < 0:
            continue
        table = node.inputs[1]
        recipe, kind, offset = weight_recipe(view, table), view.types[table], int(found["offset"])
        if recipe is None or offset >= size_of(kind.shape[0]):
            continue
        rest = TensorType(kind.dtype, (size_of(kind.shape[0]) - offset, *kind.shape[1:]))
        short = edit.param(sliced(recipe, 0, offset, size_of(kind.shape[0])), rest, view.producers[table])
        edit.swap(node, node.replace(inputs=(found["ids"], short.out)))
        matched += 1
    after = edit.finish()
    return after, report("fold_positions", graph, after, matched)
