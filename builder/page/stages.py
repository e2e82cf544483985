"""What passes did to one layer, line by line, from a dump of the build.

Comes in: a folder that `--dump` wrote, the plan's graphs. Goes out: `StageText`s with the lines that came and went.
Must not know: HTML, what passes do.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.builder.ir import Graph, GraphError, format_node, layer_of, parse_graphs
from llmc.builder.operators import attrs_of


@dataclass(frozen=True)
class StageText:
    """A stage's `label`, its comments, and its lines as (`+`, `-` or a blank, text), of rank 0."""

    label: str
    notes: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    added: int
    removed: int


def read_stages(folder: Path, final: Sequence[Graph]) -> tuple[list[StageText], int | None]:
    """The stages in order, cut down to one layer and what is in none, and that layer's number (None: no layers).

    Raises UsageError for a folder without a dump, or with that of another build: its last stage must be the plan's.
    """
    files = sorted(folder.glob("*.ir")) if folder.is_dir() else []
    chosen = [path for path in files if ".rank" not in path.name or path.name.endswith(".rank0.ir")]
    if not chosen:
        raise UsageError(f"--dump {folder}: holds no dump; `llmc build --dump {folder}` writes one")
    graphs = [_read(path) for path in chosen]
    if graphs[-1] != final[0]:
        raise UsageError(f"--dump {folder}: {chosen[-1].name} is not the plan's graph: it is of another build")
    layer = min((n for node in final[0] if (n := layer_of(node.path)) is not None), default=None)
    texts = [_lines(graph, layer) for graph in graphs]
    made = []
    for path, before, after in zip(chosen, [texts[0], *texts[:-1]], texts, strict=True):
        lines = _difference(before, after)
        added, removed = (sum(mark == sign for mark, _ in lines) for sign in "+-")
        made.append(StageText(path.name.partition(".")[0], _comments(path), lines, added, removed))
    return made, layer


def _read(path: Path) -> Graph:
    try:
        return parse_graphs(path.read_text(), attrs_of)[0]
    except (GraphError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def _comments(path: Path) -> tuple[str, ...]:
    return tuple(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))


def _lines(graph: Graph, layer: int | None) -> list[str]:
    """The nodes of the layer and of no layer, without weights and constants: those are not what passes are about."""
    kept = [node for node in graph if node.op not in ("param", "const") and layer_of(node.path) in (None, layer)]
    return [format_node(node) for node in kept]


def _difference(before: Sequence[str], after: Sequence[str]) -> tuple[tuple[str, str], ...]:
    lines: list[tuple[str, str]] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            lines += [(" ", line) for line in after[k:m]]
        else:
            lines += [("-", line) for line in before[i:j]] + [("+", line) for line in after[k:m]]
    return tuple(lines)
