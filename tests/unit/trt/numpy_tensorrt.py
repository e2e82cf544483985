"""A stand-in for TensorRT's module whose networks compute in numpy while they are defined, each layer as TensorRT's
documentation of it says, in the types of a strongly typed network.

Comes in: arrays for the network's inputs. Goes out: arrays of its outputs, by name. What TensorRT would refuse for its
types raises AssertionError; what it would refuse for other reasons only TensorRT itself tells.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

NUMPY = {
    "FLOAT": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "INT32": np.dtype(np.int32),
    "BOOL": np.dtype(bool),
}
DataType = Enum("DataType", list(NUMPY))  # type: ignore[misc]
BINARY = {
    "SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "DIV": np.divide, "POW": np.power, "MAX": np.maximum,
    "MIN": np.minimum, "FLOOR_DIV": np.floor_divide, "AND": np.logical_and, "LESS": np.less, "GREATER": np.greater,
}  # fmt: skip
UNARY = {"NEG": np.negative, "EXP": np.exp, "LOG": np.log, "COS": np.cos, "SIN": np.sin, "SQRT": np.sqrt,
         "RECIP": np.reciprocal}  # fmt: skip
ACTIVATIONS = {
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "TANH": np.tanh,
    "GELU_TANH": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
_ENUMS = {
    "ElementWiseOperation": list(BINARY),
    "UnaryOperation": list(UNARY),
    "ActivationType": list(ACTIVATIONS),
    "ReduceOperation": ["SUM", "AVG"],
    "MatrixOperation": ["NONE", "TRANSPOSE"],
    "KVCacheMode": ["LINEAR"],
    "AttentionIOForm": ["PADDED_BHND", "PACKED_NHD"],
    "AttentionNormalizationOp": ["SOFTMAX"],
    "CausalMaskKind": ["NONE"],
    "CollectiveOperation": ["ALL_REDUCE"],
}


class Tensor:
    """A value of the network: `array` in the numpy dtype of `dtype`."""

    def __init__(self, array: np.ndarray, dtype: Any) -> None:
        self.array, self.dtype, self.name = array.astype(NUMPY[dtype.name]), dtype, ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def f32(self) -> np.ndarray:
        return self.array.astype(np.float32)


class Input(Tensor):
    """`sizes`: the sizes that have names."""

    def __init__(self, array: np.ndarray, dtype: Any, sizes: dict[str, int]) -> None:
        super().__init__(array, dtype)
        self._sizes = sizes

    def set_dimension_name(self, axis: int, name: str) -> None:
        assert self._sizes.setdefault(name, self.shape[axis]) == self.shape[axis], name


class Layer:
    """A layer, whose result is computed when it is asked for: its fields are set behind its making."""

    def __init__(self, kind: str, compute: Callable[[Any], Tensor]) -> None:
        self.type, self.name = SimpleNamespace(name=kind), ""
        self._compute = compute
        self._result: Tensor | None = None

    def get_output(self, index: int) -> Tensor:
        assert index == 0
        if self._result is None:
            self._result = self._compute(self)
        return self._result


class Network:
    """`feeds` are the arrays of the inputs; `all_reduce` sums over ranks."""

    def __init__(self, feeds: Mapping[str, np.ndarray], all_reduce: Any) -> None:
        self.feeds, self.all_reduce = feeds, all_reduce
        self.plugins: Any = None
        self.layers: list[Any] = []
        self.outputs: dict[str, np.ndarray] = {}
        self.sizes: dict[str, int] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, index: int) -> Any:
        return self.layers[index]

    def _add(self, kind: str, compute: Callable[[Any], Tensor]) -> Layer:
        self.layers.append(Layer(kind, compute))
        return self.layers[-1]

    def add_input(self, name: str, dtype: Any, shape: Sequence[int]) -> Tensor:
        array = self.feeds[name]
        assert array.dtype == NUMPY[dtype.name], name
        assert len(array.shape) == len(shape), name
        assert all(own in (-1, size) for own, size in zip(shape, array.shape, strict=True)), name
        self.inputs[name] = array.shape
        return Input(array, dtype, self.sizes)

    def mark_output(self, tensor: Tensor) -> None:
        self.outputs[tensor.name] = tensor.array

    def add_constant(self, shape: Sequence[int], weights: Any) -> Layer:
        dtype, array = weights
        return self._add("CONSTANT", lambda layer: Tensor(array.reshape(shape), dtype))

    def add_cast(self, x: Tensor, dtype: Any) -> Layer:
        return self._add("CAST", lambda layer: Tensor(x.array, dtype))

    def add_shuffle(self, x: Tensor) -> Layer:
        def compute(layer: Any) -> Tensor:
            y = x.array
            if (dims := getattr(layer, "reshape_dims", None)) is not None:
                y = y.reshape([y.shape[i] if d == 0 else d for i, d in enumerate(dims)])
            return Tensor(y.transpose(getattr(layer, "second_transpose", range(y.ndim))), x.dtype)

        return self._add("SHUFFLE", compute)

    def add_concatenation(self, parts: Sequence[Tensor]) -> Layer:
        assert len({part.dtype for part in parts}) == 1
        return self._add(
            "CONCATENATION", lambda layer: Tensor(np.concatenate([p.array for p in parts], layer.axis), parts[0].dtype)
        )

    def add_gather(self, table: Tensor, index: Tensor, axis: int) -> Layer:
        assert index.dtype is DataType.INT32
        return self._add("GATHER", lambda layer: Tensor(np.take(table.array, index.array, axis), table.dtype))

    def add_reduce(self, x: Tensor, kind: Any, axes: int, keep: bool) -> Layer:
        over = tuple(i for i in range(len(x.shape)) if axes >> i & 1)
        function = {"SUM": np.sum, "AVG": np.mean}[kind.name]
        return self._add("REDUCE", lambda layer: Tensor(function(x.f32, axis=over, keepdims=keep), x.dtype))

    def add_unary(self, x: Tensor, kind: Any) -> Layer:
        return self._add("UNARY", lambda layer: Tensor(UNARY[kind.name](x.array), x.dtype))

    def add_activation(self, x: Tensor, kind: Any) -> Layer:
        return self._add("ACTIVATION", lambda layer: Tensor(ACTIVATIONS[kind.name](x.array), x.dtype))

    def add_elementwise(self, left: Tensor, right: Tensor, kind: Any) -> Layer:
        assert left.dtype is right.dtype
        assert len(left.shape) == len(right.shape)
        compares = kind.name in ("AND", "LESS", "GREATER")
        dtype = DataType.BOOL if compares else left.dtype
        return self._add("ELEMENTWISE", lambda layer: Tensor(BINARY[kind.name](left.array, right.array), dtype))

    def add_matrix_multiply(self, x: Tensor, op_x: Any, w: Tensor, op_w: Any) -> Layer:
        assert x.dtype is w.dtype
        left, right = (t.f32.T if op.name == "TRANSPOSE" else t.f32 for t, op in ((x, op_x), (w, op_w)))
        return self._add("MATRIX_MULTIPLY", lambda layer: Tensor(left @ right, x.dtype))

    def add_quantize(self, x: Tensor, scale: Tensor, dtype: Any) -> Layer:
        clipped = np.clip(x.f32 / scale.array, -448, 448)
        return self._add("QUANTIZE", lambda layer: Tensor(clipped, dtype))

    def add_dequantize(self, x: Tensor, scale: Tensor, dtype: Any) -> Layer:
        def compute(layer: Any) -> Tensor:
            by = scale.array
            if by.size > 1:  # a scale for each entry of an axis
                by = by.reshape([-1 if i == layer.axis else 1 for i in range(len(x.shape))])
            return Tensor(x.f32 * by, dtype)

        return self._add("DEQUANTIZE", compute)

    def add_kv_cache_update(self, cache: Tensor, new: Tensor, index: Tensor, mode: Any) -> Layer:
        assert cache.dtype is new.dtype

        def compute(layer: Any) -> Tensor:
            assert layer.update_form.name == "PACKED_NHD"
            out = cache.array.copy()
            for s, (first, last) in enumerate(pairwise(layer.update_lengths.array)):
                at = int(index.array[s])
                out[s, :, at : at + last - first] = new.array[first:last].transpose(1, 0, 2)
            return Tensor(out, cache.dtype)

        return self._add("KV_CACHE_UPDATE", compute)

    def add_attention_v2(self, q: Tensor, k: Tensor, v: Tensor, norm: Any, causal: Any) -> Layer:
        assert q.dtype is k.dtype is v.dtype

        def compute(layer: Any) -> Tensor:
            group = q.shape[1] // k.shape[1]
            keys, values = (x.f32.repeat(group, axis=1) for x in (k, v))
            scores = np.where(layer.mask.array, q.f32 @ keys.swapaxes(2, 3), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return Tensor(weights / weights.sum(axis=-1, keepdims=True) @ values, q.dtype)

        return self._add("ATTENTION_INPUT", compute)

    def add_plugin(self, plugin: Any, aot: bool) -> Any:
        assert aot
        self.layers.append(self.plugins.layer(*plugin))
        return self.layers[-1]

    def add_dist_collective(self, x: Tensor, kind: Any, reduce: Any, root: int, groups: np.ndarray) -> Layer:
        assert (kind.name, reduce.name, root, groups.size) == ("ALL_REDUCE", "SUM", -1, 0)

        def compute(layer: Any) -> Tensor:
            assert layer.num_ranks > 1
            return Tensor(self.all_reduce(x.array), x.dtype)

        return self._add("DIST_COLLECTIVE", compute)


class Profile:
    """An optimization profile: name -> its least and its largest shape."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def set_shape(self, name: str, least: Sequence[int], usual: Sequence[int], most: Sequence[int]) -> None:
        assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True)), name
        self.ranges[name] = (least, usual, most)

    def admits(self, inputs: Mapping[str, Sequence[int]]) -> bool:
        """Whether a step of these shapes may run with it."""
        return all(
            low <= own <= high
            for name, shape in inputs.items()
            for low, own, high in zip(self.ranges[name][0], shape, self.ranges[name][2], strict=True)
        )


class Logger:
    """Takes a severity, says nothing."""

    ERROR = 0

    def __init__(self, severity: int) -> None:
        self.severity = severity


class NumpyTensorRT:
    """TensorRT's module, of one step whose arrays are `feeds`. Behind the build `network.outputs` has the results, and
    `profiles` the optimization profiles.
    """

    __version__ = "in numpy"
    DataType, Logger = DataType, Logger
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)

    def __init__(
        self,
        feeds: Mapping[str, np.ndarray],
        all_reduce: Callable[[np.ndarray], np.ndarray] | None = None,
        plugins: Any = None,
    ) -> None:
        self.network = Network(feeds, all_reduce)
        self.profiles: list[Profile] = []
        self.previews: list[str] = []
        if plugins is not None:
            self.plugin, self.network.plugins = plugins, plugins
            self.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")
        for name, members in _ENUMS.items():
            setattr(self, name, Enum(name, members))

    def Builder(self, logger: Logger) -> Any:
        config = SimpleNamespace(
            add_optimization_profile=self.profiles.append,
            set_preview_feature=lambda feature, on: self.previews.append(feature),
        )

        def create_network(flags: int) -> Network:
            assert flags == 1 << self.NetworkDefinitionCreationFlag.STRONGLY_TYPED
            return self.network

        return SimpleNamespace(
            create_network=create_network,
            create_builder_config=lambda: config,
            create_optimization_profile=Profile,
            build_serialized_network=lambda network, config: b"engine",
        )

    def Weights(self, dtype: Any, pointer: int, count: int) -> tuple[Any, np.ndarray]:
        kind = NUMPY[dtype.name]
        return dtype, np.frombuffer(ctypes.string_at(pointer, count * kind.itemsize), kind)
