"""The operators that a traced model is written in: small, general, without kernels of their own.

Comes in: `plugins.operator`. Goes out: `PRIMITIVES`. Must not know: passes, plug-ins, targets.
"""

from __future__ import annotations

from llmc.builder.primitives import attention, compute, elementwise, logic, select, shapes, sources
from llmc.plugins.operator import Operator

#: Operator name -> operator.
PRIMITIVES: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        *sources.OPERATORS,
        *elementwise.OPERATORS,
        *logic.OPERATORS,
        *compute.OPERATORS,
        *select.OPERATORS,
        *shapes.OPERATORS,
        *attention.OPERATORS,
    )
}
