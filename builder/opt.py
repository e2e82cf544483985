"""Passes run alone on graphs that stand as text: what `llmc opt` does.

Comes in: IR text, names of passes, options. Goes out: IR text, with the last pass's report as a comment. Must not know:
the command line, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llmc.artifacts.errors import UsageError
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.ir import Graph, GraphError, parse_graphs
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.pipeline import CompileOptions, Stage, by_name, check_options, run_passes
from llmc.builder.trace import trace
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import Source, parse
from llmc.builder.weights.source import ModelWeights


def read_graphs(text: str, name: str) -> tuple[Graph, ...]:
    """The graphs of a text (one, or one for each rank). Raises UsageError with the text's `name`, line and reason."""
    try:
        graphs = parse_graphs(text, attrs_of)
        for graph in graphs:
            graph.validate(ALL)
    except GraphError as error:
        raise UsageError(f"{name}: {error}") from error
    return graphs


def run_alone(
    graphs: Sequence[Graph], names: Sequence[str], options: CompileOptions, weights: Source | None = None
) -> Stage:
    """What the named passes make of the graphs, one after the other. With `weights`, every pass is verified.

    Raises UsageError for a name that no pass has, and whatever a pass or the verifier raises.
    """
    check_options(options)
    table = by_name(options)
    for name in names:
        if name not in table:
            raise UsageError(f"--passes: {name!r} is no pass; they are {', '.join(table)}")
    verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), weights))) if weights is not None else None
    *_, last = run_passes(graphs, [table[name] for name in names], verifier)
    return last


def weights_of(graphs: Sequence[Graph], checkpoint: Checkpoint | None) -> Source:
    """A checkpoint's weights (traced again, for the constants that the model computes), or random ones."""
    if checkpoint is None:
        return RandomWeights(graphs)
    return ModelWeights(checkpoint, trace(checkpoint).buffers)
