"""Where a traced node comes from: the module that owns it, the names that the wrapper adds, the line of Python.

Comes in: nodes and names of an exported program. Goes out: text. Must not know: operators, our graph.
"""

from __future__ import annotations

import torch

#: The attribute of the wrapper that holds the model: the first part of every name that torch.export gives.
PREFIX = "model"


def module_path(node: torch.fx.Node) -> str:
    """The module that a node was traced in, as `model.layers.0.mlp`; empty for what no module owns."""
    stack = node.meta.get("nn_module_stack")
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return own_name(path.split("@")[0])  # a second call of one module is marked @1


def own_name(name: str) -> str:
    """A name of the exported program without the wrapper's part."""
    return name.removeprefix(PREFIX).removeprefix(".")


def source_line(node: torch.fx.Node) -> str:
    """Where in Python the node comes from, as ` (modeling_x.py:123: code)`; empty where the tracer does not know."""
    return innermost([line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()])


def innermost(lines: list[str]) -> str:
    """The innermost place of a Python stack trace."""
    places = [index for index, line in enumerate(lines) if line.startswith("File ")]
    if not places:
        return ""
    file, _, rest = lines[places[-1]].removeprefix('File "').partition('", line ')
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ""
    return f" ({file.rpartition('/')[2]}:{rest.split(',')[0]}: {code})"
