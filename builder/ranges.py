"""Holds the weight ranges of a calibration table against the weights: the plan's FP8 scales are the table's, or none.

Comes in: the traced graph, a table, the weights. Goes out: nothing, or CheckpointError. Must not know: packing, passes.

The scales that a plan stores are made from the weights by row, largest magnitude / 448, cut as shards and merges cut
them (`fp8_scale` recipes). A table that says otherwise was changed, or made by another algorithm: following it for
activations alone would put a calibration into the plan that the plan does not follow.
"""

from __future__ import annotations

import math

import numpy as np

from llmc.artifacts.calibration import CalibrationTable
from llmc.artifacts.errors import CheckpointError
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import View
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.recipe import Recipe
from llmc.builder.weights.stream import Shaped, rows

#: Elements of a weight that are read at once.
_BLOCK = 1 << 22
#: Operators whose weights a table may have ranges of, and which of their inputs that is.
_WEIGHT = {"linear": 1, "grouped_linear": 2}


def check_ranges(graph: Graph, table: CalibrationTable, source: Shaped) -> None:
    """Raises CheckpointError, naming module and channel, unless each `weight_amax` is that of its weight: one number an
    output channel, or an expert, equal as float32. Reads some rows of one weight at a time.
    """
    view = View(graph)
    for node in graph:
        at = _WEIGHT.get(node.op)
        ranges = None if at is None else table.tensors.get(node.path)
        recipe = weight_recipe(view, node.inputs[at]) if ranges and at else None
        if ranges is None or recipe is None:
            continue
        have = np.asarray(ranges.weight_amax, np.float32)
        want = _maxima(recipe, source)
        if len(have) != len(want):
            raise CheckpointError(
                f"{node.path}: the calibration table has {len(have)} weight ranges, the weight has {len(want)} output "
                f"channels or experts; make it again with `llmc calibrate`"
            )
        if (wrong := np.flatnonzero(have != want)).size:
            channel = int(wrong[0])
            raise CheckpointError(
                f"{node.path}: weight_amax of output channel {channel} is {have[channel]} in the calibration table and "
                f"{want[channel]} in the weights ({wrong.size} of {len(want)} channels differ): the table was changed, "
                f"or made by another algorithm; make it again with `llmc calibrate`"
            )


def _maxima(recipe: Recipe, source: Shaped) -> np.ndarray:
    """The largest magnitude of each row of a weight [N, K], f32[N], or of each expert's matrix of [E, N, K], f32[E]."""
    size, *rest = (int(d) for d in infer(recipe, source.shape).shape)
    step = max(_BLOCK // math.prod(rest), 1)
    parts = [rows(recipe, start, min(start + step, size), source) for start in range(0, size, step)]
    return np.concatenate([np.abs(evaluate(part, source)).reshape(-1, math.prod(rest)).max(axis=1) for part in parts])
