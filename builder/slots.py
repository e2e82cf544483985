"""What a sequence's slot of recurrent states holds, for every target.

Comes in: a fused graph, how many bytes a state takes where the target's kernels keep it. Goes out: a table for the
manifest. Must not know: targets, kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from llmc.artifacts.schema import StateLayer
from llmc.builder.arena import aligned
from llmc.builder.ir import Graph, layer_of
from llmc.builder.operators import ALL


def state_table(graph: Graph, nbytes_of: Callable[[tuple[int, ...]], int]) -> tuple[dict[int, StateLayer], int]:
    """Each recurrence's part of a slot, by the state's number, and the bytes of a slot. `nbytes_of(shape)`: bytes of a
    state f32[shape].
    """
    layers: dict[int, StateLayer] = {}
    offset = 0
    for node in graph:
        if (shape_of := ALL[node.op].state_shape) is not None:
            shape = shape_of(node.attrs)
            nbytes = nbytes_of(shape)
            layers[node.attrs.state] = StateLayer(layer_of(node.path), node.op, shape, "f32", offset, nbytes)
            offset += aligned(nbytes)
    return layers, offset
