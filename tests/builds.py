"""What tests that build whole engines share: a profile that compiles in a third of `chat`'s time, and caches.

`SMALL` is for tests of what a build does. What `chat` compiles, token ranges of its own for decodes, is run with the
real model and wherever a test is about profiles.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.builder.cpu.cache import default_folder

#: A shape profile's file; all tests use the same one, so that equal code is compiled once.
SMALL = str(Path(__file__).with_name("small.yaml"))


def use_own_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From here on builds find no table, trace, report or plan of other builds; objects they do, by their contents."""
    objects = default_folder()
    objects.mkdir(parents=True, exist_ok=True)
    (folder / "llmc").mkdir(parents=True)
    (folder / "llmc" / "objects").symlink_to(objects)
    patch.setenv("XDG_CACHE_HOME", str(folder))
