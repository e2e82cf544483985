"""The types of tensors: what every room means by a dtype and a shape.

Comes in: nothing. Goes out: `TensorType`, the dtype table, numpy equivalents. Must not know: any other room.

A dimension is an `int`, or a symbol: `"T"` (tokens of a step) or `"S"` (rows whose logits are wanted).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Dim = int | str
SYMBOLS = ("T", "S")

#: dtype name -> numpy dtype. These names stand in graphs, plans and messages alike.
NUMPY_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "u4": np.dtype(ml_dtypes.uint4),  # a byte each; packed for kernels, two in a byte of u8
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}

#: The largest finite E4M3 number.
FP8_MAX = 448.0
#: What a layer's keys, and what its values, are divided by in the cache: one number each a KV head.
KVScales = tuple[tuple[float, ...], tuple[float, ...]]

#: Columns of an INT4 weight that share a scale and a zero point, and the largest of its numbers.
INT4_GROUP = 128
INT4_MAX = 15
#: The largest magnitude that llmc rounds to INT8: its numbers are as many on either side of zero.
INT8_MAX = 127

_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype name and a shape, printed and parsed as `f32[T,576]`."""

    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
        for dim in self.shape:
            if isinstance(dim, str) and dim not in SYMBOLS:
                raise ValueError(f"dimension {dim!r} is neither a number nor one of {', '.join(SYMBOLS)}")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(d) for d in self.shape)}]"

    @staticmethod
    def parse(text: str) -> TensorType:
        """The type that `str` printed; raises ValueError."""
        match = _TYPE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text!r} is not a tensor type such as f32[T,576]")
        dims = [d.strip() for d in match[2].split(",") if d.strip()]
        return TensorType(match[1], tuple(int(d) if d.lstrip("-").isdigit() else d for d in dims))

    def size(self, **symbols: int) -> int:
        """Number of elements, with each symbol replaced by its value."""
        total = 1
        for dim in self.shape:
            total *= symbols[dim] if isinstance(dim, str) else dim
        return total

    def nbytes(self, **symbols: int) -> int:
        """Bytes of that many elements."""
        return self.size(**symbols) * NUMPY_DTYPES[self.dtype].itemsize
