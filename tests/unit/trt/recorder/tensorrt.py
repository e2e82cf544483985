"""A stand-in for the module `tensorrt` where engines are run: its engines are what `standin.py` serialized, and it
writes what it is told, a line of JSON a call, into the file that FAKE_TRT_LOG names. FAKE_TRT_VERSION is its version.

Like TensorRT it refuses shapes outside of the profile, tensors without an address, and steps without shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

__version__ = os.environ.get("FAKE_TRT_VERSION", "11.4.0")
DataType = Enum("DataType", ["FLOAT", "BF16", "FP8", "INT32"])  # type: ignore[misc]
TensorIOMode = Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])  # type: ignore[misc]
ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")


def _say(*what: Any) -> None:
    if path := os.environ.get("FAKE_TRT_LOG"):
        with open(path, "a") as file:
            print(json.dumps(what), file=file)


class Logger:
    """Takes a severity, says nothing."""

    ERROR = 0

    def __init__(self, severity: int) -> None:
        self.severity = severity


class Runtime:
    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, data: Any) -> Engine | None:
        _say("deserialize", len(data))
        text = bytes(data)
        return Engine(json.loads(text)) if text.startswith(b'{"tensors"') else None


class Engine:
    """`about`: see `standin.BuildingTensorRT`."""

    device_memory_size_v2 = 4096

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.tensors, self.profiles = about["tensors"], about["profiles"]
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[self.tensors[name][0]]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode[self.tensors[name][1]]

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == "user"
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._profile = engine, -1
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, Sequence[int]] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return bool(stream)

    def set_device_memory(self, address: int, size: int) -> None:
        _say("arena", address, size)

    def set_tensor_address(self, name: str, address: int) -> bool:
        _say("address", self._profile, name, address)
        self._addresses[name] = address
        return name in self._engine.tensors

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, high = self._engine.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(a <= own <= b for a, own, b in zip(low, shape, high, strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        inputs = {name for name, (_, mode) in self._engine.tensors.items() if mode == "INPUT"}
        assert self._addresses.keys() == self._engine.tensors.keys()
        assert self._shapes.keys() == inputs
        _say("execute", self._profile, self._shapes)
        return bool(stream)
