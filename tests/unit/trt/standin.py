"""TensorRT's builder for a whole plan: networks are defined in numpy (numpy_tensorrt.py), on a step of one token, and
"serialized" as what recorder/tensorrt.py runs: the tensors, and the shapes of each profile.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.trt.numpy_plugins import Definition, PluginLayer, Plugins, Size, TensorDesc
from tests.unit.trt.numpy_tensorrt import NUMPY, Network, NumpyTensorRT, Tensor

RECORDER = Path(__file__).parent / "recorder"
_ONE_TOKEN = {"query_start": np.array([0, 1], np.int32), "context_len": np.array([1], np.int32)}


def recorder() -> ModuleType:
    """The module that runs engines, which in this process is only asked to load them."""
    spec = importlib.util.spec_from_file_location("recorded_tensorrt", RECORDER / "tensorrt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Network(Network):
    """Its inputs are made where they are declared: zeros, but where a step of one token has others."""

    def __init__(self) -> None:
        super().__init__({}, lambda x: x)
        self.tensors: dict[str, tuple[str, str]] = {}

    def add_input(self, name: str, dtype: Any, shape: Sequence[int]) -> Tensor:
        array = np.zeros([max(size, 1) for size in shape], NUMPY[dtype.name])
        self.feeds = {**self.feeds, name: _ONE_TOKEN.get(name, array)}
        self.tensors[name] = (dtype.name, "INPUT")
        return super().add_input(name, dtype, shape)

    def mark_output(self, tensor: Tensor) -> None:
        super().mark_output(tensor)
        self.tensors[tensor.name] = (tensor.dtype.name, "OUTPUT")


class UnrunPlugins(Plugins):
    """Plug-ins whose functions are held to TensorRT's form, and whose kernels are not run: results are zeros."""

    def layer(self, definition: Definition, tensors: tuple[Tensor, ...]) -> PluginLayer:
        assert definition.launch is not None
        descs = [TensorDesc(tuple(map(Size, t.shape)), t.dtype) for t in tensors]
        outputs = definition.describe(*descs)
        definition.launch(*descs, outputs, 0)
        shapes = [[size.value if isinstance(size, Size) else size for size in desc.shape_expr] for desc in outputs]
        return PluginLayer([Tensor(np.zeros(n), desc.dtype) for n, desc in zip(shapes, outputs, strict=True)])


class BuildingTensorRT(NumpyTensorRT):
    """TensorRT's module; each network that it creates is a new one. `plugins`: the stand-in of its plug-ins."""

    def __init__(self, plugins: Any) -> None:
        super().__init__({}, plugins=plugins)
        self._recorder = recorder()
        self.__version__ = self._recorder.__version__
        self.Runtime = self._recorder.Runtime

    def Builder(self, logger: Any) -> Any:
        made = super().Builder(logger)
        self.network, self.profiles[:] = _Network(), []
        self.network.plugins = self.plugin

        def serialize(network: _Network, config: Any) -> bytes:
            profiles: list[Mapping[str, Any]] = [
                {name: (low, high) for name, (low, _, high) in profile.ranges.items()} for profile in self.profiles
            ]
            return json.dumps({"tensors": network.tensors, "profiles": profiles}).encode()

        return SimpleNamespace(**{**vars(made), "build_serialized_network": serialize})
