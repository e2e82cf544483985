"""The last word on a graph before lowering: only plug-in operators, weights and views may remain.

Comes in: a fused graph. Goes out: the same graph, or UnsupportedError. Must not know: targets.
"""

from __future__ import annotations

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.operators import ALL
from llmc.builder.passes.rewrite import report
from llmc.builder.passes.views import is_view
from llmc.plugins import OPERATORS


def check_lowerable(graph: Graph) -> tuple[Graph, PassReport]:
    """Refuses a graph with an operator that has no kernel. Raises UnsupportedError that names each such operator and
    one module that uses it.
    """
    graph.validate({**ALL, **OPERATORS})
    stuck: dict[str, str] = {}
    for node in graph:
        if node.op not in OPERATORS and node.op not in ("input", "param", "const") and not is_view(node):
            stuck.setdefault(node.op, node.path or f"%{node.outputs[0]}")
    if stuck:
        places = "; ".join(f"{name} (in {path})" for name, path in sorted(stuck.items()))
        raise UnsupportedError(f"no kernel for these operators, and no pass that rewrites them: {places}")
    return graph, report("check_lowerable", graph, graph, len(graph.nodes))
