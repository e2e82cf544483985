"""Random models: every pass keeps what they compute, on one rank and on several, and so does compiled code."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.pipeline import CompileOptions, run, stages
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import parse
from tests.unit.builder.graphs import VOCAB, random_model
from tests.unit.builder.native_engine import Engines, compile_all, lower_for_test

#: Seeds of the graphs that are compiled, and their ranks.
COMPILED = [(12, 1), (7, 2), (22, 3)]


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


@pytest.mark.timeout(600)
def test_compiled_random_models_compute_what_the_interpreter_computes() -> None:
    graphs = [random_model(random.Random(seed).choice) for seed, _ in COMPILED]
    compiled = [run(g, CompileOptions(precision="fp32", tp=tp)) for g, (_, tp) in zip(graphs, COMPILED, strict=True)]
    lowered = [lower_for_test(one) for one in compiled]
    for graph, one, low, codes in zip(graphs, compiled, lowered, compile_all(lowered), strict=True):
        weights = RandomWeights([graph])
        engines = Engines(low, codes, weights, blocks=8)
        params = cache(lambda recipe, weights=weights: evaluate(parse(recipe), weights))
        batches = [Batch(rank, (40, 20), block_size=16) for rank in one.graphs]
        rng = np.random.default_rng(0)
        for counts in ((9, 3), (1, 1), (20, 2)):
            tokens = [rng.integers(0, VOCAB, n).tolist() for n in counts]
            prepared = [batch.step(tokens) for batch in batches]
            shards = [out[0] for out in run_ranks(one.graphs, prepared[0][0], [c for _, c in prepared], params)]
            want = shards[0] if shards[0].shape[1] == VOCAB else np.concatenate(shards, axis=1)
            np.testing.assert_allclose(engines.run(*prepared[0]), want, rtol=1e-4, atol=1e-4, err_msg=str(graph))
        engines.close()
