"""Golden pairs of passes: `passes/NAME.before.ir` is a small graph for pass NAME, `NAME.after.ir` what becomes of it.

A new pass needs its `before`; `python -m tests.golden.goldens NAME` writes the `after` (of every pass, without a name).
Read the difference before it is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.pipeline import CompileOptions, apply, by_name

FOLDER = Path(__file__).parent / "passes"
_TABLE = CalibrationTable(
    "0" * 64,
    "none",
    "max",
    CalibrationData("none", "0" * 64, 0, 0, 0),
    {
        "layers.0.up": Ranges(224.0, (1.0,) * 32),
        "layers.0.down": Ranges(112.0, (1.0,)),
        "layers.0.experts.up": Ranges(56.0, (1.0,)),
        "layers.0.experts.down": Ranges(28.0, (1.0,)),
    },
)
#: Every pass of the pipeline, as these options make it.
PASSES = by_name(
    CompileOptions(
        precision="fp8",
        kv_dtype="f8e4m3",
        kv_scales={0: ((0.5,), (0.25,)), 1: ((0.5, 2.0), (0.25, 0.125))},
        table=_TABLE,
        fp8_activations="static",
        tp=2,
        rounds_apart=True,
    )
)


def before(name: str) -> Graph:
    """A pass's golden input, checked."""
    graph = parse_graph((FOLDER / f"{name}.before.ir").read_text(), attrs_of)
    graph.validate(ALL)
    return graph


def after(name: str) -> tuple[Graph, ...]:
    """What the pass makes of it now, checked."""
    graphs, _ = apply(PASSES[name], (before(name),))
    for graph in graphs:
        graph.validate(ALL)
    return graphs


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PASSES:
        (FOLDER / f"{chosen}.after.ir").write_text("".join(map(str, after(chosen))))
