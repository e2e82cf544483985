"""The frontier picture: output tokens a second over the time per token that each user sees, one line a server.

Comes in: results of runs. Goes out: SVG text that needs nothing beside itself. Must not know: how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from llmc.bench.picture import HEIGHT, WIDTH, Axis

_LEFT, _TOP, _RIGHT, _BOTTOM = 78.0, 96.0, 928.0, 536.0
_COLOURS = ("#1d5fd1", "#b9591a", "#2a7f46", "#8a3fb0", "#5d6470")


@dataclass(frozen=True)
class Point:
    """A run: its place in pixels and what its label says."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Line:
    """The runs of one server, in order of load."""

    name: str
    colour: str
    points: list[Point]


def draw(results: Sequence[dict[str, Any]], percentile: str = "median") -> str:
    """The picture of results that have a time per token. Raises ValueError where none has."""
    latency = f"{percentile}_tpot_ms"
    usable = [r for r in results if r[latency] > 0 and r["output_throughput"] > 0]
    if not usable:
        raise ValueError("no run has answers of two tokens or more, so there is no time per token to draw")
    xs, ys = [r[latency] for r in usable], [r["output_throughput"] for r in usable]
    x = Axis(min(xs) / 1.4, max(xs) * 1.6, _LEFT, _RIGHT)
    y = Axis(min(ys) / 1.5, max(ys) * 1.6, _BOTTOM, _TOP)
    names = list(dict.fromkeys(_name(r) for r in usable))
    lines = []
    for i, name in enumerate(names):
        runs = sorted((r for r in usable if _name(r) == name), key=lambda r: float(r["output_throughput"]))
        points = [Point(x.at(r[latency]), y.at(r["output_throughput"]), _load(r)) for r in runs]
        lines.append(Line(name, _COLOURS[i % len(_COLOURS)], points))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["px"] = lambda value: f"{value:.1f}"
    template = environment.from_string((files(__package__) / "frontier.svg.jinja").read_text())
    return template.render(
        width=WIDTH,
        height=HEIGHT,
        frame=(_LEFT, _TOP, _RIGHT, _BOTTOM),
        xticks=x.ticks(),
        yticks=y.ticks(),
        lines=lines,
        percentile=percentile,
    )


def _name(result: dict[str, Any]) -> str:
    return str(result.get("label") or result.get("model_id") or "server")


def _load(result: dict[str, Any]) -> str:
    """The load of a run, as short as it can be told."""
    if result["max_concurrency"] is not None:
        return f"{result['max_concurrency']} at once"
    return "all at once" if result["request_rate"] == "inf" else f"{result['request_rate']:g}/s"
