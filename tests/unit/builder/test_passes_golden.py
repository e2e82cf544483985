"""Each pass on a small graph, as text: tests/golden/passes/NAME.before.ir becomes NAME.after.ir exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.canonicalize import canonicalize
from llmc.builder.passes.check_lowerable import check_lowerable
from llmc.builder.passes.fold_activations import fold_activations
from llmc.builder.passes.fold_positions import fold_positions
from llmc.builder.passes.fold_weights import fold_weights
from llmc.builder.passes.fuse_activation import fuse_activation
from llmc.builder.passes.fuse_attention import fuse_attention
from llmc.builder.passes.fuse_pointwise import fuse_pointwise
from llmc.builder.passes.fuse_qk_norm import fuse_qk_norm
from llmc.builder.passes.fuse_residual_norm import fuse_residual_norm
from llmc.builder.passes.fuse_rms_norm import fuse_rms_norm
from llmc.builder.passes.fuse_rotary import fuse_rotary
from llmc.builder.passes.insert_copies import insert_copies
from llmc.builder.passes.merge_linears import merge_gate_up, merge_qkv
from llmc.builder.passes.quantize import Precision, quantize
from llmc.builder.passes.shard import shard
from llmc.builder.passes.simplify_views import simplify_views
from llmc.builder.passes.split_packed import split_packed
from llmc.builder.pipeline import RANK_PASSES, CompileOptions, whole_passes

GOLDEN = Path(__file__).parents[2] / "golden" / "passes"
TABLE = CalibrationTable(
    "0" * 64,
    "none",
    "max",
    CalibrationData("none", "0" * 64, 0, 0, 0),
    {"layers.0.up": Ranges(224.0, (1.0,) * 32), "layers.0.down": Ranges(112.0, (1.0,))},
)

_PLAIN = (
    canonicalize,
    check_lowerable,
    fold_activations,
    fold_positions,
    fold_weights,
    fuse_activation,
    fuse_attention,
    fuse_pointwise,
    fuse_qk_norm,
    fuse_residual_norm,
    fuse_rms_norm,
    fuse_rotary,
    insert_copies,
    merge_gate_up,
    merge_qkv,
    simplify_views,
    split_packed,
)
PASSES: dict[str, Callable[[Graph], object]] = {
    "quantize": partial(quantize, precision=Precision("fp8", TABLE)),
    "shard": partial(shard, tp=2),
    **{step.__name__: step for step in _PLAIN},
}


def result(name: str) -> str:
    """What the pass makes of its golden input, every graph of it valid and readable again."""
    before = parse_graph((GOLDEN / f"{name}.before.ir").read_text(), attrs_of)
    before.validate(ALL)
    after, _ = PASSES[name](before)  # type: ignore[misc]
    graphs = after if isinstance(after, tuple) else (after,)
    for graph in graphs:
        graph.validate(ALL)
        assert parse_graph(str(graph), attrs_of) == graph
    return "".join(map(str, graphs))


def test_every_pass_of_the_pipeline_has_a_golden_pair() -> None:
    passes = [*whole_passes(CompileOptions()), shard, *RANK_PASSES]
    names = {step.func.__name__ if isinstance(step, partial) else step.__name__ for step in passes}  # type: ignore[attr-defined]
    assert names == set(PASSES)
    assert {path.name for path in GOLDEN.iterdir()} == {f"{n}.{s}.ir" for n in names for s in ("before", "after")}


@pytest.mark.parametrize("name", PASSES)
def test_golden(name: str) -> None:
    assert result(name) == (GOLDEN / f"{name}.after.ir").read_text()


@pytest.mark.parametrize("name", [step.__name__ for step in _PLAIN])
def test_a_second_run_changes_nothing(name: str) -> None:
    after = parse_graph((GOLDEN / f"{name}.after.ir").read_text(), attrs_of)
    again, report = PASSES[name](after)  # type: ignore[misc]
    assert str(again) == str(after)
    assert report.nodes_before == report.nodes_after
