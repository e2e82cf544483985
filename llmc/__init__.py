"""llmc: an ahead-of-time compiler for language models, and a lean runner for what it compiles.

    import llmc
    llmc.build("SmolLM2-135M-Instruct", "engine.plan", precision="fp8", tp=2)
    with llmc.Engine("engine.plan") as engine:
        print(engine.generate("The capital of France is", llmc.SamplingParams(temperature=0, max_tokens=8))[0].text)

Names are imported when they are used: serving never imports the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmc.artifacts import VERSION as __version__

if TYPE_CHECKING:
    from llmc.artifacts.errors import LlmcError as LlmcError
    from llmc.flow import build as build
    from llmc.runtime.engine import Engine as Engine
    from llmc.runtime.messages import Handling as Handling
    from llmc.runtime.messages import SamplingParams as SamplingParams


_HOMES = {
    "LlmcError": "llmc.artifacts.errors",
    "build": "llmc.flow",
    "Engine": "llmc.runtime.engine",
    "Handling": "llmc.runtime.messages",
    "SamplingParams": "llmc.runtime.messages",
}

__all__ = ["Engine", "Handling", "LlmcError", "SamplingParams", "__version__", "build"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llmc' has no attribute {name!r}")
