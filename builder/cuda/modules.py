"""The text behind a kernel: which module it stands in, what that imports, which parameters it has.

Comes in: `CudaCall.kernel` and `CudaCall.source`. Goes out: text, names, and for whoever runs or compiles it the
function itself. Only `load` imports Triton. Must not know: targets, types.
"""

from __future__ import annotations

import ast
import linecache
import re
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import llmc.plugins

#: What a module of kernels may import of the project: other modules of plug-ins.
_IMPORT = re.compile(r"^(?:from|import) llmc\.plugins\.([\w.]+)", re.MULTILINE)
_FOLDER = llmc.plugins.INCLUDE_ROOT / "plugins"


def load(kernel: str, source: str | None) -> Any:
    """The function under `@triton.jit`. Imports Triton: for compiling, or for interpreting where TRITON_INTERPRET is
    set, and not both in one process.
    """
    module, _, name = kernel.rpartition(":")
    if source is None:
        return getattr(import_module(f"llmc.plugins.{module}"), name)
    return getattr(_generated(source), name)


@cache
def _generated(source: str) -> ModuleType:
    """A module made of text. Triton reads a function's text again by its file's name: linecache knows it."""
    module = ModuleType("llmc_generated_kernels")
    file = f"<generated kernels {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def parameters(kernel: str, source: str | None) -> tuple[str, ...]:
    """A kernel's parameters as it declares them. Raises ValueError where there is no such function."""
    module, _, name = kernel.rpartition(":")
    text = source if source is not None else _text(module)
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return tuple(argument.arg for argument in statement.args.args)
    raise ValueError(f"there is no kernel {kernel}")


@cache
def module_texts(kernel: str, source: str | None) -> tuple[str, ...]:
    """Everything of the project that the kernel's code depends on: its module, and what that imports, however far down.
    Sorted by name, not by path, so that it says the same wherever the project lies.
    """
    seen: dict[str, str] = {}
    wanted = [kernel.partition(":")[0]]
    if source is not None:
        seen[""] = source
        wanted = _IMPORT.findall(source)
    while wanted:
        module = wanted.pop()
        if module not in seen:
            seen[module] = _text(module)
            wanted += _IMPORT.findall(seen[module])
    return tuple(f"{module}\0{text}" for module, text in sorted(seen.items()))


@cache
def _text(module: str) -> str:
    path = _FOLDER.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file.read_text()
    raise ValueError(f"there is no module llmc.plugins.{module}")
