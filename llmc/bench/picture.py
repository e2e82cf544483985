"""The roofline picture: what each work computes a second over what it computes a byte read, below this machine's roofs.

Comes in: a `Report`. Goes out: SVG text that needs nothing beside itself. Must not know: how anything was measured.

Both axes are logarithmic, so that reads bound along a slope and multiply-adds along a level line (Williams, Waterman,
Patterson 2009). A point's distance from the roof above it is what is left to gain. The level line is that of the
products that most operations are; a work with others too, attention in floats for instance, has its own roof below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import atan2, ceil, degrees, floor, hypot, log10

from jinja2 import Environment, StrictUndefined

from llmc.bench.run import Report

WIDTH, HEIGHT = 960, 600
#: Where the axes are: left, top, right, bottom.
_LEFT, _TOP, _RIGHT, _BOTTOM = 78.0, 96.0, 928.0, 536.0
_CHARACTER, _LINE = 6.5, 15.0  # of a label, in pixels
_GIGA = 1e9


@dataclass(frozen=True)
class Axis:
    """A logarithmic scale: values `low`..`high` lie at the pixels `start`..`end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = log10(value / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str, bool]]:
        """Pixel, label and whether it is a power of ten, of 1, 2 and 5 times each."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        values = [(digit * 10.0**decade, digit == 1) for decade in decades for digit in (1, 2, 5)]
        return [(self.at(v), f"{v:g}", whole) for v, whole in values if self.low <= v <= self.high]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        """Whether they have a point in common."""
        apart_x = self.x + self.width <= other.x or other.x + other.width <= self.x
        apart_y = self.y + self.height <= other.y or other.y + other.height <= self.y
        return not (apart_x or apart_y)

    def inside(self) -> bool:
        """Whether it lies between the axes."""
        across = self.x >= _LEFT + 4 and self.x + self.width <= _RIGHT
        return across and self.y >= _TOP and self.y + self.height <= _BOTTOM - 4


@dataclass(frozen=True)
class Point:
    """A work in the picture: where it and the roof above it lie, and what its label says."""

    kind: str
    x: float
    y: float
    roof: float
    label: str


@dataclass(frozen=True)
class Label:
    """A point's label: its first character's place, and the end of a line to the point where it stands apart."""

    text: str
    kind: str
    x: float
    y: float
    line: tuple[float, float, float, float] | None


@dataclass(frozen=True)
class Limit:
    """What so many threads reach, in 1e9 a second: bytes read, and operations of one kind of products, the `level`."""

    threads: int
    reads: float
    flops: float
    level: str


@dataclass(frozen=True)
class Roof:
    """One number of threads: the slope from the left edge to the ridge, and the level line from there."""

    left: tuple[float, float]
    ridge: tuple[float, float]
    right: tuple[float, float]
    slope_label: str
    level_label: str
    angle: float
    whole: bool  # of all threads: labels stand above it, those of a part below

    @property
    def shift(self) -> int:
        """Pixels from the line down to the foot of its labels."""
        return -8 if self.whole else 17

    @property
    def slope_at(self) -> tuple[float, float]:
        """Where the label of the slope begins: a quarter of the way up."""
        (x0, y0), (x1, y1) = self.left, self.ridge
        return x0 + 0.25 * (x1 - x0), y0 + 0.25 * (y1 - y0)


def draw(report: Report) -> str:
    """The picture of the plan's works."""
    plan = report.systems[0].name
    places = [
        (work, limit.flops / limit.reads, limit.flops / report.timing(plan, work).median / _GIGA, limit)
        for work, limit in report.bounds.items()
    ]
    level = max((limit for *_, limit in places), key=lambda limit: limit.flops).products
    limits = [Limit(r.threads, r.reads / _GIGA, r.flops[level] / _GIGA, level.label) for r in report.limits]
    x, y = _axes([p[1] for p in places], [p[2] for p in places], limits)
    points = []
    for work, intensity, rate, limit in places:
        share = limit.share(report.timing(plan, work).median)
        roof = limit.flops / limit.seconds / _GIGA
        points.append(Point(work.kind, x.at(intensity), y.at(rate), y.at(roof), f"{work.name} · {share:.0%}"))
    roofs = [_roof(rates, x, y, rates is limits[-1]) for rates in limits]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["px"] = lambda value: f"{value:.1f}"
    template = environment.from_string((files(__package__) / "roofline.svg.jinja").read_text())
    return template.render(
        report=report,
        width=WIDTH,
        height=HEIGHT,
        frame=(_LEFT, _TOP, _RIGHT, _BOTTOM),
        xticks=x.ticks(),
        yticks=y.ticks(),
        roofs=roofs,
        points=points,
        labels=_labels(points, roofs),
        title=f"{report.model}, {plan}",
    )


def _axes(intensities: Sequence[float], rates: Sequence[float], limits: Sequence[Limit]) -> tuple[Axis, Axis]:
    """Axes with all points, and the ridges, well inside."""
    ridges = [r.flops / r.reads for r in limits]
    left = min([*intensities, *ridges]) / 2.5
    right = max([*intensities, *ridges]) * 2.5
    highest = max([r.flops for r in limits] + list(rates)) * 1.8
    lowest = min([*rates, *(left * r.reads for r in limits)]) / 1.6
    return Axis(left, right, _LEFT, _RIGHT), Axis(lowest, highest, _BOTTOM, _TOP)


def _roof(rates: Limit, x: Axis, y: Axis, whole: bool) -> Roof:
    ridge = rates.flops / rates.reads
    left = (x.start, y.at(x.low * rates.reads))
    top = (x.at(ridge), y.at(rates.flops))
    threads = f"{rates.threads} thread{'s' if rates.threads > 1 else ''}"
    return Roof(
        left=left,
        ridge=top,
        right=(x.end, top[1]),
        slope_label=f"reads {rates.reads:.1f} GB/s, {threads}",
        level_label=f"multiply-adds ({rates.level}) {rates.flops:,.0f} GFLOP/s, {threads}",
        angle=degrees(atan2(top[1] - left[1], top[0] - left[0])),
        whole=whole,
    )


def _labels(points: Sequence[Point], roofs: Sequence[Roof]) -> list[Label]:
    """A place for each point's label where it covers neither points, roofs, their labels nor other labels."""
    taken = [Box(p.x - 6, p.y - 6, 12, 12) for p in points]
    taken += [box for roof in roofs for box in _along(roof)]
    labels = []
    for point in sorted(points, key=lambda p: p.y):
        width = len(point.label) * _CHARACTER
        box = next((b for b in _around(point, width) if b.inside() and not any(map(b.meets, taken))), None)
        if box is None:  # more labels than room: on top of others rather than nowhere
            box = Box(point.x + 10, point.y - _LINE / 2, width, _LINE)
        taken.append(box)
        near = min(max(point.x, box.x), box.x + box.width), min(max(point.y, box.y), box.y + box.height)
        apart = hypot(near[0] - point.x, near[1] - point.y) > 14
        line = (*near, point.x, point.y) if apart else None
        labels.append(Label(point.label, point.kind, box.x, box.y + _LINE - 4, line))
    return labels


def _around(point: Point, width: float) -> Iterator[Box]:
    """Boxes about a point, the nearest first: right, left, below and above at each distance."""
    for distance in range(10, 260, 8):
        yield Box(point.x + distance, point.y - _LINE / 2, width, _LINE)
        yield Box(point.x - distance - width, point.y - _LINE / 2, width, _LINE)
        for x in (point.x + distance, point.x - width / 2, point.x - distance - width):
            yield Box(x, point.y + distance, width, _LINE)
            yield Box(x, point.y - distance - _LINE, width, _LINE)


def _along(roof: Roof) -> Iterator[Box]:
    """What a roof and its labels cover, in small pieces."""
    (x0, y0), (x1, y1) = roof.left, roof.ridge
    pieces = max(int(hypot(x1 - x0, y1 - y0) / 8), 1)
    for i in range(pieces + 1):
        x, y = x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces
        yield Box(x - 4, y - 4, 8, 8)
        if 0.25 * pieces <= i <= 0.25 * pieces + len(roof.slope_label) * _CHARACTER / 8:
            yield Box(x - 14, y - 20, 18, 18) if roof.whole else Box(x - 4, y + 2, 18, 18)
    yield Box(x1, y1 - 4, _RIGHT - x1, 8)
    label = len(roof.level_label) * _CHARACTER + 8
    yield Box(_RIGHT - label, y1 - 22 if roof.whole else y1 + 2, label, 20)
