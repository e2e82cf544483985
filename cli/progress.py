"""How a build's progress looks: a live bar on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from llmc.builder.progress import Progress


class PlainProgress(Progress):
    """One line a finished stage, for logs."""

    def finished(self, name: str, seconds: float) -> None:
        """Prints the line."""
        click.echo(f"{name:<10} {seconds:7.1f} s{', reused' if name in self.reused else ''}", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveProgress(Progress):
    """One bar a stage, moving where the stage counts its work."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def started(self, name: str, total: int | None) -> None:
        """Adds the bar."""
        self._task = self._bars.add_task(name, total=total)

    def advanced(self, name: str, done: int, total: int | None) -> None:
        """Moves it."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def finished(self, name: str, seconds: float) -> None:
        """Fills it."""
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
            self._bars.stop_task(self._task)


def make_progress() -> PlainProgress | LiveProgress:
    """Live on a terminal, plain in CI and pipes."""
    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal else PlainProgress()
