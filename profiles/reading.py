"""Reads a YAML mapping and takes typed fields out of it. Errors name the file, the field, the value and the remedy.

Comes in: a path. Goes out: `Fields`. Must not know: which fields there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmc.artifacts.errors import UsageError


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}" if near else ""


@dataclass(frozen=True)
class Fields:
    """A mapping from a file; `where` is the file, with the place inside it."""

    where: str
    values: dict[str, Any]

    @staticmethod
    def read(path: Path, known: Collection[str] | None = None) -> Fields:
        """The mapping in a file; raises UsageError where it cannot be read, is no mapping or has other keys (None: any
        keys will do).
        """
        try:
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
        return Fields.of(value, str(path), known)

    @staticmethod
    def of(value: object, where: str, known: Collection[str] | None = None) -> Fields:
        """A value that must be a mapping, with no other than the known keys; None: keys are any texts."""
        if not isinstance(value, dict) or (known is None and not all(isinstance(key, str) for key in value)):
            keys = f"the keys {', '.join(known)}" if known is not None else "names as keys"
            raise UsageError(f"{where}: is {value!r}, a mapping with {keys} is needed")
        if known is None:
            return Fields(where, value)
        for key in value:
            if key not in known:
                raise UsageError(
                    f"{where}: unknown key {key!r}{suggestion(str(key), known)}. The keys are {', '.join(known)}"
                )
        return Fields(where, value)

    def fail(self, key: str, reason: str) -> UsageError:
        """The error for a field: its value and what is wrong with it."""
        return UsageError(f"{self.where}: {key} is {self.values.get(key)!r}; {reason}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "a whole number of at least 1 is needed")
        return value

    def number(self, key: str) -> float:
        """A number greater than 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fail(key, "a number greater than 0 is needed")
        return float(value)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "a text is needed")
        return value

    def sequence(self, key: str, kind: type) -> tuple[Any, ...]:
        """A list of values of one type, not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(type(v) is kind for v in value):
            raise self.fail(key, f"a list of {kind.__name__} is needed")
        return tuple(value)
