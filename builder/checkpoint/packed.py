"""A folder whose linear weights are INT4 already: GPTQ's or AWQ's, eight numbers in a 32-bit word.

Comes in: the folder's `Source`, its quantization config. Goes out: a `Source` of the model as it was before (numbers
less zero points, times scales, float32), and `Quantization`, which says where numbers, scales and zero points are. Must
not know: graphs, recipes, what is built from it.

A module's tensors, for a weight [N, K] in G groups of K:

    GPTQ    qweight i32[K / 8, N], words along K    qzeros i32[G, N / 8]    scales f16[G, N]    g_idx i32[K]
    AWQ     qweight i32[K, N / 8]                   qzeros i32[G, N / 8]    scales f16[G, N]

Words hold columns N in order in GPTQ, and in AWQ as `_AWQ_ORDER` says. GPTQ's first format stores zero points less one
(modulo 16), `gptq_v2` as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.types import INT4_GROUP, INT4_MAX, NUMPY_DTYPES
from llmc.builder.checkpoint.source import Decoded, Quantization, Scheme, Source, StoredLinear, TensorInfo

METHODS = ("gptq", "awq")
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
#: Which of eight columns each nibble of a word holds, from the lowest.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_packed_scheme(where: str, declared: Mapping[str, Any]) -> Scheme:
    """Of a `quantization_config` with one of `METHODS`; raises UnsupportedError for what of it is not supported."""
    method = str(declared["quant_method"])
    wanted: dict[str, tuple[object, ...]] = {"bits": (4,)}
    if method == "gptq":
        wanted |= {"desc_act": (False, None), "checkpoint_format": ("gptq", "gptq_v2", None)}
    else:
        wanted |= {"version": ("gemm", "GEMM", None), "zero_point": (True, None)}
    for key, values in wanted.items():
        if declared.get(key) not in values:
            raise UnsupportedError(
                f"{where}: the weights are already quantized: {method} with {key} {declared.get(key)!r} is not "
                f"supported, {key} {values[0]!r} is. Build from the unquantized checkpoint, with --int4 if you like"
            )
    size = declared.get("group_size")
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise CheckpointError(f"{where}: config.json: quantization_config.group_size is {size!r}, a number is expected")
    offset = method == "gptq" and declared.get("checkpoint_format") != "gptq_v2"
    return Scheme(method.upper(), "none", weights="int4", group=size, zero_offset=int(offset))


class PackedSource(Decoded):
    """The inner source, with packed weights unpacked and multiplied by their scales."""

    def __init__(self, inner: Source, scheme: Scheme) -> None:
        super().__init__(inner, scheme)
        modules = [name.removesuffix(".qweight") for name in inner.tensors if name.endswith(".qweight")]
        if not modules:
            raise CheckpointError(
                f"{self.root}: is declared to be quantized ({scheme.name}), but has no tensor qweight; is config.json "
                "that of another checkpoint?"
            )
        self._shapes = {module: self._checked(module) for module in modules}
        self._last: tuple[str, np.ndarray] | None = None

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The parameters: packed weights as float32 [N, K], everything else as stored."""
        found = {f"{module}.weight": TensorInfo("f32", shape) for module, shape in self._shapes.items()}
        for name, info in self._inner.tensors.items():
            module, _, part = name.rpartition(".")
            if module not in self._shapes or part not in _PARTS:
                found[name] = info
        return found

    @property
    def num_parameters(self) -> int:
        """Weights as they were before packing."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    @cached_property
    def quantization(self) -> Quantization:
        """Where numbers, scales and zero points are; none of them where they do not fit groups of 128."""
        size = self._scheme.group
        if size > 0 and size % INT4_GROUP:
            return Quantization(self._scheme, reason=f"its groups are of {size} columns, not of {INT4_GROUP}")
        dtypes = {self._inner.tensors[f"{module}.scales"].dtype for module in self._shapes}
        if dtypes != {"f16"}:
            return Quantization(self._scheme, reason=f"its scales are {', '.join(sorted(dtypes))}, not f16")
        linears = {m: StoredLinear(f"{m}.weight", f"{m}.scales", None, f"{m}.qzeros") for m in self._shapes}
        return Quantization(self._scheme, linears)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a parameter; of a packed one in float32."""
        module = name.removesuffix(".weight")
        if module not in self._shapes or name == module:
            return self._inner.read(name, start, stop)
        group = np.arange(self._shapes[module][1]) // self._group_size(module)
        scale, zero = self._scales(module)[start:stop], self._zeros(module)[start:stop].astype(np.float32)
        numbers = self._numbers(module)[start:stop].astype(np.float32)
        return (numbers - zero[:, group]) * scale.astype(np.float32)[:, group]

    def stored(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a packed weight as u4, or by a scale's or zero point's name, f16 and u4 by groups of 128 columns."""
        module, _, part = name.rpartition(".")
        if part == "weight":
            return self._numbers(module)[start:stop].view(NUMPY_DTYPES["u4"])
        groups = np.arange(self.stored_shape(name)[1]) * INT4_GROUP // self._group_size(module)
        if part == "scales":
            return np.ascontiguousarray(self._scales(module)[start:stop][:, groups])
        return np.ascontiguousarray(self._zeros(module)[start:stop][:, groups]).view(NUMPY_DTYPES["u4"])

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """[N, K] of a weight, [N, G] of its scales and zero points."""
        module, _, part = name.rpartition(".")
        rows, columns = self._shapes[module]
        return (rows, columns) if part == "weight" else (rows, -(-columns // INT4_GROUP))

    def _group_size(self, module: str) -> int:
        return self._scheme.group if self._scheme.group > 0 else self._shapes[module][1]

    def _checked(self, module: str) -> tuple[int, int]:
        """[N, K] of a packed module whose tensors fit together."""
        packed = self._inner.tensors[f"{module}.qweight"].shape
        awq = self._scheme.name == "AWQ"
        rows, columns = (packed[1] * 8, packed[0]) if awq else (packed[1], packed[0] * 8)
        size = self._scheme.group if self._scheme.group > 0 else columns
        groups = -(-columns // size)
        for part, shape in (("qzeros", (groups, rows // 8)), ("scales", (groups, rows))):
            name = f"{module}.{part}"
            have = self._inner.tensors[name].shape if name in self._inner.tensors else None
            if have != shape:
                raise CheckpointError(
                    f"{self.root}: tensor {name!r} has shape {have and list(have)}, the qweight {list(packed)} of "
                    f"{self._scheme.name} in groups of {size} needs {list(shape)}; a file of the checkpoint is "
                    "missing, or its config is another's"
                )
        return rows, columns

    def _whole(self, name: str) -> np.ndarray:
        return self._inner.read(name, 0, self._inner.tensors[name].shape[0])

    def _numbers(self, module: str) -> np.ndarray:
        """u8[N, K]; the last module's are kept, because weights are read by rows."""
        if self._last is None or self._last[0] != module:
            words = self._whole(f"{module}.qweight")
            if self._scheme.name == "AWQ":
                numbers = _along_columns(words, _AWQ_ORDER).T
            else:
                self._require_order(module)
                numbers = _along_columns(words.T, range(8))
            self._last = module, np.ascontiguousarray(numbers)
        return self._last[1]

    def _zeros(self, module: str) -> np.ndarray:
        """u8[N, G] of the checkpoint's own groups."""
        order = _AWQ_ORDER if self._scheme.name == "AWQ" else range(8)
        zeros = _along_columns(self._whole(f"{module}.qzeros"), order)
        return np.ascontiguousarray((zeros + np.uint8(self._scheme.zero_offset)).T & np.uint8(INT4_MAX))

    def _scales(self, module: str) -> np.ndarray:
        """[N, G] of the checkpoint's own groups, as stored."""
        scales = self._whole(f"{module}.scales").T
        if not np.isfinite(scales.astype(np.float32)).all():
            raise CheckpointError(f"{self.root}: '{module}.scales' holds NaN or infinity: the checkpoint is damaged")
        return scales

    def _require_order(self, module: str) -> None:
        """Raises UnsupportedError where columns are grouped in another order than their own."""
        name, columns = f"{module}.g_idx", self._shapes[module][1]
        if name in self._inner.tensors and not np.array_equal(
            self._whole(name), np.arange(columns) // self._group_size(module)
        ):
            raise UnsupportedError(
                f"{self.root}: {name!r} groups columns in another order than their own (desc_act), which is not "
                "supported; build from the unquantized checkpoint with --int4"
            )


def _along_columns(words: np.ndarray, order: Any) -> np.ndarray:
    """i32[R, C] -> u8[R, 8 * C]: nibble i of a word is column order[i] of its eight."""
    shifts = np.empty(8, np.uint32)
    shifts[list(order)] = 4 * np.arange(8, dtype=np.uint32)
    numbers = words.astype(np.uint32)[..., None] >> shifts & np.uint32(INT4_MAX)
    return numbers.astype(np.uint8).reshape(len(words), -1)
