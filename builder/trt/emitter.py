"""Builds the layers of a strongly typed TensorRT network. Comes in: TensorRT's module, operands. Goes out: tensors.
Must not know: llmc's operators, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.artifacts.trt_program import DTYPES
from llmc.artifacts.types import Dim, TensorType
from llmc.builder.translation.writer import GraphWriter

_UNARY = {"neg": "NEG", "exp": "EXP", "log": "LOG", "cos": "COS", "sin": "SIN", "sqrt": "SQRT", "abs": "ABS",
          "floor": "FLOOR", "ceil": "CEIL", "round": "ROUND", "sign": "SIGN", "erf": "ERF",
          "reciprocal": "RECIP"}  # fmt: skip
_ACTIVATIONS = {"sigmoid": "SIGMOID", "tanh": "TANH", "relu": "RELU", "gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH"}
_BINARY = {"add": "SUM", "sub": "SUB", "mul": "PROD", "div": "DIV", "pow": "POW", "maximum": "MAX", "minimum": "MIN"}


class Emitter(GraphWriter[Any]):
    """`values` has the tensor of each value of llmc's graph, `outputs` what the network gives beside the graph's own
    results, by name. Arrays that layers read are kept as long as this is.

    Matrix products and attention are in bf16 (FP8 where both sides are), everything else in f32.
    """

    def __init__(self, trt: Any, network: Any, types: Mapping[str, TensorType], tp: int = 1) -> None:
        super().__init__(types, tp)
        self.trt, self.network = trt, network
        self.values: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self._kept: list[Any] = []

    def dtype(self, name: str) -> Any:
        """TensorRT's name of a dtype."""
        return getattr(self.trt.DataType, DTYPES[name])

    def constant(self, value: np.ndarray, dtype: str) -> Any:
        """A tensor of a numpy array, whose dtype is llmc's `dtype`."""
        array = np.ascontiguousarray(value)
        weights = self.trt.Weights(self.dtype(dtype), array.ctypes.data, array.size)
        self._kept += [array, weights]
        return self.network.add_constant(array.shape, weights).get_output(0)

    def value(self, name: str) -> Any:
        """Its tensor."""
        return self.values[name]

    def number(self, value: float, rank: int) -> Any:
        """f32[1, ...] that broadcasts over a tensor of that rank."""
        return self.constant(np.full((1,) * rank, value, np.float32), "f32")

    def cast(self, x: Any, dtype: str) -> Any:
        """Nothing where it has that dtype already."""
        return x if x.dtype == self.dtype(dtype) else self.network.add_cast(x, self.dtype(dtype)).get_output(0)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """-1 stands for the one size that is not known, 0 for that of the same axis of x."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        return layer.get_output(0)

    def transpose(self, x: Any, perm: Sequence[int]) -> Any:
        """Axes in another order."""
        layer = self.network.add_shuffle(x)
        layer.second_transpose = tuple(perm)
        return layer.get_output(0)

    def concat(self, parts: Sequence[Any], axis: int) -> Any:
        """`axis` counts from the first."""
        layer = self.network.add_concatenation(list(parts))
        layer.axis = axis
        return layer.get_output(0)

    def gather(self, table: Any, rows: Any) -> Any:
        """Rows of a table: its first axis gives way to those of `rows`."""
        return self.network.add_gather(table, rows, 0).get_output(0)

    def last_columns(self, x: Any, start: int, stop: int) -> Any:
        """Entries start:stop of the last axis, by their numbers: other axes may be dynamic."""
        index = self.constant(np.arange(start, stop, dtype=np.int32), "i32")
        return self.network.add_gather(x, index, len(x.shape) - 1).get_output(0)

    def slice(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        """Raises ValueError but for a run of the last axis."""
        if axis % len(x.shape) != len(x.shape) - 1 or step != 1:
            raise ValueError(f"a slice of axis {axis} in steps of {step} has no TensorRT form here")
        return self.last_columns(x, start, stop)

    def broadcast(self, x: Any, own: Sequence[Dim], shape: Sequence[Dim]) -> Any:
        """Raises ValueError."""
        raise ValueError("a copy of the kind broadcast has no TensorRT form here")

    def mean(self, x: Any) -> Any:
        """Over the last axis, which stays as 1."""
        return self.network.add_reduce(x, self.trt.ReduceOperation.AVG, 1 << (len(x.shape) - 1), True).get_output(0)

    def plugin(self, plugin: Any, inputs: Sequence[Any], results: int) -> list[Any]:
        """The results of a plug-in that was compiled ahead of time."""
        layer = self.network.add_plugin(plugin(*inputs), aot=True)
        return [layer.get_output(i) for i in range(results)]

    def sum_over_ranks(self, x: Any) -> Any:
        """The communicator of the execution context joins them."""
        kind, add = self.trt.CollectiveOperation.ALL_REDUCE, self.trt.ReduceOperation.SUM
        no_root, all_ranks = -1, np.zeros(0, np.int64)
        layer = self.network.add_dist_collective(x, kind, add, no_root, all_ranks)
        layer.num_ranks = self.tp
        return layer.get_output(0)

    def binary(self, kind: str, left: Any, right: Any) -> Any:
        """TensorRT's elementwise operation of that name, of operands of one rank."""
        return self.network.add_elementwise(left, right, getattr(self.trt.ElementWiseOperation, kind)).get_output(0)

    def elementary(self, name: str, *operands: Any) -> Any:
        """Operands of any rank. Raises ValueError for a function without a layer."""
        if name in _UNARY:
            return self.network.add_unary(operands[0], getattr(self.trt.UnaryOperation, _UNARY[name])).get_output(0)
        if name in _ACTIVATIONS:
            kind = getattr(self.trt.ActivationType, _ACTIVATIONS[name])
            return self.network.add_activation(operands[0], kind).get_output(0)
        if name in _BINARY:
            rank = max(len(x.shape) for x in operands)
            left, right = (self._widened(x, rank) for x in operands)
            return self.binary(_BINARY[name], left, right)
        raise ValueError(f"the function {name} has no TensorRT layer here")

    def _widened(self, x: Any, rank: int) -> Any:
        """With axes of 1 in front, as numpy broadcasts."""
        return x if len(x.shape) == rank else self.reshape(x, (1,) * (rank - len(x.shape)) + tuple(x.shape))
