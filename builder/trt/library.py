"""Which TensorRT there is. Comes in: nothing. Goes out: its module, or EnvironmentFault with what to install and what
to use instead. Must not know: graphs.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

from llmc.artifacts.errors import EnvironmentFault

#: Import names, the full one first: TensorRT-RTX has the same network interface, for fewer GPUs and without plug-ins.
MODULES = ("tensorrt", "tensorrt_rtx")


def tensorrt_with_plugins(sm: int) -> Any:
    """TensorRT itself: the blocks of a plan's KV pool are read and written by plug-ins, which TensorRT-RTX has not."""
    module = tensorrt_module()
    if not hasattr(module, "plugin"):
        raise EnvironmentFault(
            f"TensorRT-RTX {module.__version__} has no plug-ins, and a plan's keys and values need them: pip install "
            f"tensorrt (needs NVIDIA's package index) on a machine with such a GPU. Without it, --target cuda:sm_{sm} "
            "builds a plan for the same GPUs, and `llmc export --tensorrt` writes an engine with linear caches"
        )
    return module


def tensorrt_module() -> Any:
    """The first that is installed; TensorRT itself has its plug-ins in `plugin`."""
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            module = import_module(name)
            if name == "tensorrt":
                import_module("tensorrt.plugin")
            return module
    raise EnvironmentFault(
        "TensorRT is not installed: pip install tensorrt (needs NVIDIA's package index), or pip install tensorrt-rtx "
        "for GPUs of sm_89 and sm_120. Without it, --target cuda:sm_90 builds for the same GPUs, and "
        "`llmc export --onnx` writes the graph for other builders"
    )
