"""The stages of the pass list as files: `00-trace.ir`, `01-canonicalize.ir`, .. and after sharding one for each rank.

Comes in: a folder, `Stage`s. Goes out: files that `parse_graphs` reads back, with the pass's report as a comment on
top. Must not know: what passes there are.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.artifacts.files import disk_errors, write_file
from llmc.artifacts.schema import PassReport
from llmc.builder.pipeline import Stage

#: What a dump calls its files, and so what a new dump removes of an old one.
_FILE = re.compile(r"\d\d-\w+(\.rank\d+)?\.ir")


class DumpFolder:
    """Writes the stages that it is called with. Files of an earlier dump are removed first; raises UsageError for a
    folder that holds anything else, EnvironmentFault where the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--dump {folder}: is a file; name a folder")
        strangers = [p.name for p in folder.iterdir() if not _FILE.fullmatch(p.name)] if folder.exists() else []
        if strangers:
            raise UsageError(
                f"--dump {folder}: holds {min(strangers)}, which is no dump; name an empty or a new folder"
            )
        with disk_errors(folder, "--dump"):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()

    def __call__(self, stage: Stage) -> None:
        """Writes one stage."""
        for name, text in stage_files(stage).items():
            write_file(self.folder / name, text.encode(), "--dump")


def stage_files(stage: Stage) -> dict[str, str]:
    """File name -> text of a stage: one file, or one for each rank."""
    head = "".join(f"# {line}\n" for line in _describe(stage))
    return {
        f"{stage.label}{f'.rank{graph.rank}' if graph.tp > 1 else ''}.ir": f"{head}{graph}" for graph in stage.graphs
    }


def report_line(report: PassReport) -> str:
    """Matches and node counts."""
    of = "" if report.expected is None else f" of {report.expected}"
    return f"matched {report.matched}{of}; {report.nodes_before} -> {report.nodes_after} nodes"


def _describe(stage: Stage) -> list[str]:
    if stage.report is None:
        return [f"{stage.label}: {len(stage.graphs[0].nodes)} nodes"]
    return [f"{stage.label}: {report_line(stage.report)}", *(f"note: {note}" for note in stage.report.notes)]
