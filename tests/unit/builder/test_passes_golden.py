"""Each pass on a small graph: as text, and as what it computes. `tests/golden/goldens.py` says how to add one."""

from __future__ import annotations

from functools import cache

import pytest

from llmc.builder.ir import parse_graph, parse_graphs
from llmc.builder.operators import attrs_of
from llmc.builder.pipeline import apply
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import parse
from tests.golden.goldens import FOLDER, PASSES, after, before

#: Passes whose result is no input for them again.
_ONCE = {"quantize", "shard"}
#: Passes that change no graph: check_lowerable only refuses.
_CHECKS = {"check_lowerable"}


def test_every_pass_of_the_pipeline_has_a_golden_pair_and_nothing_else_has() -> None:
    pairs = {f"{name}.{side}.ir" for name in PASSES for side in ("before", "after")}
    assert {path.name for path in FOLDER.iterdir()} == pairs


@pytest.mark.parametrize("name", PASSES)
def test_the_text_is_golden_and_reads_back(name: str) -> None:
    graphs = after(name)
    text = "".join(map(str, graphs))
    assert text == (FOLDER / f"{name}.after.ir").read_text()
    assert parse_graphs(text, attrs_of) == graphs
    assert (graphs == (before(name),)) == (name in _CHECKS), "a golden pair must show what the pass does"


@pytest.mark.parametrize("name", [name for name in PASSES if name not in _CHECKS])
def test_the_pass_keeps_what_its_golden_input_computes(name: str) -> None:
    graph = before(name)
    weights = RandomWeights([graph])
    verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), weights)))
    verifier.check(name, (graph,), after(name))
    assert verifier.deviations


@pytest.mark.parametrize("name", [name for name in PASSES if name not in _ONCE])
def test_a_second_run_changes_nothing(name: str) -> None:
    graph = parse_graph((FOLDER / f"{name}.after.ir").read_text(), attrs_of)
    (again,), report = apply(PASSES[name], (graph,))
    assert str(again) == str(graph)
    assert report.nodes_before == report.nodes_after
