"""Random models: every pass keeps what they compute, on one rank and on several."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.pipeline import CompileOptions, stages
from llmc.builder.verify import Verifier
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import evaluate, parse
from tests.unit.builder.graphs import random_model


def most_ranks(graph: Graph) -> int:
    """The fewest query heads of an attention, 3 at most; what does not attend can be divided at will."""
    types = graph.types()
    return min((int(types[node.inputs[0]].shape[1]) for node in graph if node.op == "attention"), default=3)


def verified(graph: Graph, tp: int) -> None:
    """Runs all passes, each checked against the graph before it."""
    weights = RandomWeights([graph])
    verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), weights)))
    options = CompileOptions(precision="fp32", tp=tp, verifier=verifier)
    for stage in stages(graph, options):
        for made in stage.graphs:
            made.validate(ALL)
            assert parse_graph(str(made), attrs_of) == made


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_pass_keeps_what_a_random_model_computes(data: st.DataObject) -> None:
    graph = random_model(lambda options: data.draw(st.sampled_from(options)))
    tp = data.draw(st.sampled_from(range(1, 1 + min(3, most_ranks(graph)))))
    note(f"tp {tp}\n{graph}")
    graph.validate(ALL)
    try:
        verified(graph, tp)
    except UnsupportedError as error:
        if tp == 1 or "only tp 1 works" not in str(error):
            raise
