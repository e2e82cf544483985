"""The whole vocabulary of graphs: the primitives that tracing emits and the plug-ins that kernels exist for.

Comes in: both tables. Goes out: `ALL`, `attrs_of`. Must not know: passes, targets.
"""

from __future__ import annotations

from llmc.builder.primitives import PRIMITIVES
from llmc.plugins import OPERATORS
from llmc.plugins.operator import Operator

#: Operator name -> operator. Where both tables have a name (`reduce`), the primitive's wider type rule counts.
ALL: dict[str, Operator] = {**OPERATORS, **PRIMITIVES}


def attrs_of(op: str) -> type:
    """The attribute class of an operator, for `parse_graph`; raises ValueError for a name that nobody has."""
    if op not in ALL:
        raise ValueError(f"no operator is named {op!r}")
    return ALL[op].attrs
