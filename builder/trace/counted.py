"""Where model code takes the number of tokens for a number, as a loop over tokens does: no program over T tokens can.

Comes in: nothing. Goes out: `counted_tokens`, a context that collects source lines. Must not know: models, graphs.

torch.export only says afterwards that T became a constant; the line that did it is seen when it asks for the number.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def counted_tokens() -> Iterator[list[str]]:
    """A list that fills with places such as `modeling_x.py:12: for t in range(tokens):` while a model is exported."""
    places: list[str] = []
    before = torch.SymInt.__index__

    def index(self: torch.SymInt) -> int:
        frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith(_TORCH)]
        if frames:
            places.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}")
        return before(self)

    torch.SymInt.__index__ = index
    try:
        yield places
    finally:
        torch.SymInt.__index__ = before
