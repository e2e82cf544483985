"""A folder whose linear weights are FP8 or INT8 already: ModelOpt, compressed-tensors, or fine-grained FP8.

Comes in: the folder's `Source`, its quantization config. Goes out: a `Source` of the model as it was before (weights
times their scales, float32), and `Quantization`, which says where the stored numbers and scales are. Must not know:
graphs, recipes, what is built from it.

Formats: `hf_quant_config.json` or `quantization_config` of method modelopt (algorithms FP8 and
FP8_PER_CHANNEL_PER_TOKEN); method compressed-tensors with format float-quantized, or int-quantized where inputs are
INT8 too; method fp8 (DeepSeek-V3's: scales of square blocks, under `weight_scale_inv`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.types import KVScales
from llmc.builder.checkpoint.packed import METHODS, read_packed_scheme
from llmc.builder.checkpoint.source import Decoded, Quantization, Scheme, Source, StoredLinear, TensorInfo

#: What may stand beside a weight; none of it is a parameter of the model.
_COMPANIONS = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale", "weight_shape")
#: A scale of the cache: its layer, and whether it is that of keys or of values.
_OF_CACHE = re.compile(r"\.(\d+)\.(?:.+\.)?([kv])_scale$")
#: Precision that keeps a scheme's weights -> their dtype here, and in the file.
_STORED = {"fp8": ("f8e4m3", "F8_E4M3"), "int8": ("i8", "I8")}
#: compressed-tensors' layouts: the type of their numbers, and that precision.
_LAYOUTS = {"float-quantized": ("float", "fp8"), "int-quantized": ("int", "int8")}
_FINE_GRAINED = "fine-grained FP8"


def read_scheme(where: str, config: Mapping[str, Any], separate: Mapping[str, Any] | None) -> Scheme | None:
    """The scheme that config.json's `quantization_config` or a ModelOpt `hf_quant_config.json` declares; None for
    neither. Raises UnsupportedError naming the method and what is supported.
    """
    declared = config.get("quantization_config")
    if declared is None and separate is None:
        return None
    if declared is None:
        return _modelopt(where, separate.get("quantization", {}) if separate else {})
    if not isinstance(declared, Mapping):
        raise CheckpointError(f"{where}: config.json: quantization_config is {declared!r}, an object is expected")
    method = declared.get("quant_method")
    if method == "modelopt":
        return _modelopt(where, declared)
    if method == "compressed-tensors":
        return _compressed_tensors(where, declared)
    if method == "fp8":
        return Scheme(_FINE_GRAINED, "token", _block(where, "weight_block_size", declared.get("weight_block_size")))
    if method in METHODS:
        return read_packed_scheme(where, declared)
    raise _unsupported(where, f"quantization method {method!r}")


def _block(where: str, key: str, value: Any) -> tuple[int, int]:
    """Rows and columns of the blocks that share a scale."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(b, int) and b > 0 for b in value):
        raise _unsupported(where, f"{key} {value!r}")
    return value[0], value[1]


def _unsupported(where: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: the weights are already quantized: {what} is not supported; ModelOpt FP8, compressed-tensors "
        "float-quantized and int-quantized (W8A8), fine-grained FP8, GPTQ and AWQ are. Build from the unquantized "
        "checkpoint, with --fp8 if you like"
    )


def _modelopt(where: str, quantization: Mapping[str, Any]) -> Scheme:
    algorithm = quantization.get("quant_algo")
    activations = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "token"}.get(str(algorithm))
    if activations is None:
        raise _unsupported(where, f"ModelOpt's quant_algo {algorithm!r}")
    kv = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
    return Scheme(f"ModelOpt {algorithm}", activations, kv=bool(kv))


def _compressed_tensors(where: str, declared: Mapping[str, Any]) -> Scheme:
    groups = list((declared.get("config_groups") or {}).values())
    layouts = {declared.get("format"), *(group.get("format") for group in groups)} - {None}
    layout = layouts.pop() if len(layouts) == 1 else None
    if layout not in _LAYOUTS or not groups:
        raise _unsupported(where, f"compressed-tensors format {declared.get('format')!r}")
    schemes = {_group(where, group, *_LAYOUTS[layout]) for group in groups}
    if len(schemes) != 1:
        raise _unsupported(where, "compressed-tensors with several schemes in one model")
    return dataclasses.replace(schemes.pop(), kv=bool(declared.get("kv_cache_scheme")))


def _group(where: str, group: Mapping[str, Any], number: str, precision: str) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for part, what in ((weights, "weights"), (inputs or weights, "input_activations")):
        if (part.get("type"), part.get("num_bits")) != (number, 8) or part.get("symmetric") is False:
            skewed = ", not symmetric" if part.get("symmetric") is False else ""
            what = f"{what} of {part.get('num_bits')} bits {part.get('type')}{skewed}"
            raise _unsupported(where, f"compressed-tensors {what}")
    strategy, block = weights.get("strategy", "tensor"), None
    if precision == "int8" and (inputs is None or strategy == "block"):
        raise _unsupported(
            where, "compressed-tensors INT8 by blocks" if inputs else "compressed-tensors INT8 weights alone"
        )
    if strategy == "block":
        block = _block(where, "block_structure", weights.get("block_structure"))
    elif strategy not in ("tensor", "channel"):
        raise _unsupported(where, f"compressed-tensors weight strategy {strategy!r}")
    activations = "none" if inputs is None else "token" if inputs.get("dynamic") else "static"
    return Scheme(f"compressed-tensors {precision.upper()}", activations, block, weights=precision)


class QuantizedSource(Decoded):
    """The inner source, with scales multiplied in and hidden."""

    def __init__(self, inner: Source, scheme: Scheme) -> None:
        super().__init__(inner, scheme)
        stored = inner.tensors
        self._dtype, self._called = _STORED[scheme.weights]
        self._scales = {name: self._scale_of(name) for name, info in stored.items() if info.dtype == self._dtype}
        if not self._scales:
            raise CheckpointError(
                f"{self.root}: is declared to be quantized ({scheme.name}), but none of its tensors is {self._called}; "
                "is config.json that of another checkpoint?"
            )

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The parameters: quantized weights as float32, everything else as stored."""
        return {
            name: TensorInfo("f32", info.shape) if info.dtype == self._dtype else info
            for name, info in self._inner.tensors.items()
            if name.rpartition(".")[2] not in _COMPANIONS
        }

    @property
    def num_parameters(self) -> int:
        """Without the scales."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    @cached_property
    def quantization(self) -> Quantization:
        """Where the stored bytes are. Reads the scales of inputs, keys and values (one number a module, or a head)."""
        kv = self._kv_scales()
        if self._scheme.block is not None:
            high, wide = self._scheme.block
            reason = f"a scale of it belongs to a block of {high} x {wide}, not to rows"
            return Quantization(self._scheme, kv=kv, reason=reason)
        linears = {name.rpartition(".")[0]: self._linear(name) for name in self._scales}
        return Quantization(self._scheme, linears, kv)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a parameter; of a quantized one numbers times scale, in float32."""
        value = self._inner.read(name, start, stop)
        if name not in self._scales:
            return value
        return value.astype(np.float32) * self._row_scales(name, start, stop)

    def stored(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a quantized weight as stored; or, by a scale's name, f32 scales of those rows."""
        owner = self._owners.get(name)
        if owner is None:
            return self._inner.read(name, start, stop)
        return np.ascontiguousarray(self._row_scales(owner, start, stop).reshape(-1))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """[N, K] of a weight, [N] of its scale."""
        owner = self._owners.get(name)
        return self._inner.tensors[name].shape if owner is None else self._inner.tensors[owner].shape[:1]

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Scale -> the weight that it belongs to."""
        return {scale: weight for weight, scale in self._scales.items()}

    def _scale_of(self, name: str) -> str:
        """The scale that belongs to a quantized weight, checked for its shape."""
        suffix = "weight_scale_inv" if self._scheme.name == _FINE_GRAINED else "weight_scale"
        scale = f"{name.rpartition('.')[0]}.{suffix}"
        if not name.endswith(".weight") or scale not in self._inner.tensors:
            raise CheckpointError(
                f"{self.root}: tensor {name!r} is {self._called} and has no scale {scale!r}: its values are unknown. "
                "A file of the checkpoint is missing, or its config is another's"
            )
        shape, have = self._inner.tensors[name].shape, self._inner.tensors[scale].shape
        block = self._scheme.block
        wanted = (
            [(-(-shape[0] // block[0]), -(-shape[1] // block[1]))] if block else [(), (1,), shape[:1], (shape[0], 1)]
        )
        if have not in wanted:
            raise CheckpointError(
                f"{self.root}: scale {scale!r} has shape {list(have)}, the weight {list(shape)} of {self._scheme.name} "
                f"needs {' or '.join(str(list(w)) for w in wanted)}"
            )
        return scale

    def _row_scales(self, name: str, start: int, stop: int) -> np.ndarray:
        """f32[rows, 1], or [rows, K] for blocks."""
        scale, (rows, columns) = self._scales[name], self._inner.tensors[name].shape
        shape = self._inner.tensors[scale].shape
        if self._scheme.block is not None:
            high, wide = self._scheme.block
            parts = self._inner.read(scale, start // high, -(-stop // high)).astype(np.float32)
            lines = parts[np.arange(start, stop) // high - start // high]
            return np.repeat(lines, wide, axis=1)[:, :columns]
        single = math.prod(shape) == 1 and rows != 1
        values = self._inner.read(scale, 0, 1) if single else self._inner.read(scale, start, stop)
        values = values.astype(np.float32).reshape(-1, 1)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(f"{self.root}: scale {scale!r} holds a number that is not positive and finite")
        return np.broadcast_to(values, (stop - start, 1))

    def _linear(self, name: str) -> StoredLinear:
        module = name.rpartition(".")[0]
        return StoredLinear(name, self._scales[name], self._input_scale(module))

    def _input_scale(self, module: str) -> float | None:
        if self._scheme.activations != "static":
            return None
        name = f"{module}.input_scale"
        if name not in self._inner.tensors or math.prod(self._inner.tensors[name].shape) != 1:
            raise CheckpointError(
                f"{self.root}: {self._scheme.name} with static activations needs one number {name!r}; a file of the "
                "checkpoint is missing, or its config is another's"
            )
        return self._positive(name)[0]

    def _positive(self, name: str) -> tuple[float, ...]:
        rows = (self._inner.tensors[name].shape or (1,))[0]
        values = tuple(self._inner.read(name, 0, rows).astype(np.float32).reshape(-1).tolist())
        for value in values:
            if not 0 < value < math.inf:
                raise CheckpointError(f"{self.root}: {name!r} is {value}, a positive number is needed")
        return values

    def _kv_scales(self) -> dict[int, KVScales]:
        found: dict[int, dict[str, tuple[float, ...]]] = {}
        for name in self._inner.tensors:
            if match := _OF_CACHE.search(name):
                found.setdefault(int(match[1]), {})[match[2]] = self._positive(name)
        for layer, scales in found.items():
            if len(scales) != 2:
                raise CheckpointError(
                    f"{self.root}: of layer {layer}'s cache there is {next(iter(scales))}_scale, and not the other of "
                    "k_scale and v_scale; a file of the checkpoint is missing"
                )
        return {layer: (scales["k"], scales["v"]) for layer, scales in sorted(found.items())}
