"""The calibration table: the ranges of every quantized linear, and where they come from. Standard library and numpy.

Comes in: JSON bytes, or fields. Goes out: `CalibrationTable` and its JSON. Must not know: how ranges are found or used.

    {"version": 1, "checkpoint": "<digest>", "modelopt": "0.47.0", "recipe": "...",
     "data": {"source": "...", "sha256": "...", "samples": 8, "tokens": 2048, "seed": 0},
     "tensors": {"model.layers.0.mlp.down_proj": {"input_amax": 11.25, "weight_amax": [0.5, ...]}, ...}}

Ranges are largest magnitudes: of a module's input over all calibration data, and of each output channel of its weight.
They are float32 values, and are written so that they read back bit for bit. The same table gives the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UsageError

#: Raised by one whenever a reader of the older number could misread the newer table.
TABLE_VERSION = 5
_READABLE = (1, 2, 3, 4, 5)
WEIGHTS = ("fp8", "int8", "int4")
ACTIVATIONS = ("token", "static", "none")
#: What an output head can be beside rounded linear layers.
LM_HEAD_DTYPES = ("bf16", "fp8")
#: As a checkpoint that is quantized already has its output head.
OWN_HEAD = "own"
#: Those of a `Choice`.
_NUMBERS = ("loss", "input_scale", "error")


@dataclass(frozen=True)
class Smoothing:
    """What an INT8 module's input is multiplied by before it is rounded, a factor a column: the tensor of `module` in
    the file of rounded weights. Modules that read one input have one such tensor. `exponent`: SmoothQuant's (alpha).
    """

    module: str
    exponent: float


@dataclass(frozen=True)
class Choice:
    """`kept` in bf16, or rounded; `loss`: what rounding costs in this module alone, measured, in nats a token, 0 for
    experts, which are never kept;
    `input_scale`: what its input is divided by where activations are static; `error`: root mean square of what rounding
    changed / of the weight, 0 where it is kept; `smoothing`: None where the input is rounded as it is; `input_kept`:
    the input stays float32 though the weight is rounded and the table's activations are `token`.
    """

    kept: bool
    loss: float
    input_scale: float
    error: float
    smoothing: Smoothing | None = None
    input_kept: bool = False


@dataclass(frozen=True)
class Ranges:
    """`input_amax`: largest |x| of the module's input; `weight_amax`: largest |w| of each output channel, or of each
    expert's matrix; `choice`: None in a table of ranges alone.
    """

    input_amax: float
    weight_amax: tuple[float, ...]
    choice: Choice | None = None

    def to_json(self) -> str:
        """With the fewest digits that read back to the same float32: a third of what Python writes for the double."""
        weights = ",".join(str(np.float32(w)) for w in self.weight_amax)
        head = ""
        if self.choice is not None:
            numbers = {key: np.float32(getattr(self.choice, key)) for key in _NUMBERS}
            head = f'"kept":{json.dumps(self.choice.kept)},' + "".join(f'"{k}":{v!s},' for k, v in numbers.items())
            if self.choice.smoothing is not None:
                head += f'"smoothing":{json.dumps(asdict(self.choice.smoothing))},'
            if self.choice.input_kept:
                head += '"input_kept":true,'
        return f'{{{head}"input_amax":{np.float32(self.input_amax)!s},"weight_amax":[{weights}]}}'


@dataclass(frozen=True)
class RoundedFile:
    """The file of rounded weights: its name in the table's folder, and what it must hash to."""

    file: str
    sha256: str


@dataclass(frozen=True)
class CalibrationData:
    """What was run: `source` in words, SHA-256 of the token ids, how many samples and tokens (in all), the seed."""

    source: str
    sha256: str
    samples: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class CalibrationTable:
    """Ranges and choices by the Hugging Face path of a linear module, such as `model.layers.0.self_attn.q_proj`.

    The weights were rounded for inputs scaled as `activations` (token|static) says, and modules kept up to `budget`
    times the bytes of pure FP8; `rounded` is None where the table has ranges alone. `weights` fp8|int8|int4: what they
    were rounded to. `head`: the path of the output head, where it was rounded too: to fp8 in any case. `folder` is
    where the table was read from.
    """

    checkpoint: str
    modelopt: str
    recipe: str
    data: CalibrationData
    tensors: Mapping[str, Ranges]
    activations: str | None = None
    budget: float | None = None
    rounded: RoundedFile | None = None
    folder: Path | None = field(default=None, compare=False)
    weights: str = "fp8"
    head: str | None = None

    @property
    def version(self) -> int:
        """1: ranges alone, 2: with choices and rounded weights, 3: weights of a format that it names, 4: a rounded
        output head, 5: inputs that are kept.
        """
        if any(ranges.choice is not None and ranges.choice.input_kept for ranges in self.tensors.values()):
            return 5
        if self.head is not None:
            return 4
        return 1 if self.rounded is None else 2 if self.weights == "fp8" else 3

    def named(self, stem: str) -> CalibrationTable:
        """The table as a file of another name would hold it: what it was called must not change a plan's bytes."""
        if self.rounded is None:
            return self
        return replace(self, rounded=replace(self.rounded, file=f"{stem}.safetensors"))

    def check(self, digest: str) -> None:
        """Raises CheckpointError unless the table was made from the checkpoint with this digest."""
        if self.checkpoint != digest:
            raise CheckpointError(
                f"the calibration table was made from the checkpoint with digest {self.checkpoint}, this one has "
                f"{digest}; make a table of it with `llmc calibrate`"
            )

    def to_json(self) -> bytes:
        """Modules sorted by path, one a line."""
        head = {
            "version": self.version,
            "checkpoint": self.checkpoint,
            "modelopt": self.modelopt,
            "recipe": self.recipe,
            "data": asdict(self.data),
        }
        if self.rounded is not None:
            head |= {"activations": self.activations, "budget": self.budget, "rounded": asdict(self.rounded)}
        if self.version > 2:
            head["weights"] = self.weights
        if self.head is not None:
            head["head"] = self.head
        lines = [f"  {json.dumps(path)}: {self.tensors[path].to_json()}" for path in sorted(self.tensors)]
        body = json.dumps(head, indent=1)[:-2]
        return (body + ',\n "tensors": {\n' + ",\n".join(lines) + "\n }\n}\n").encode()

    @staticmethod
    def from_json(raw: bytes, where: str = "the calibration table") -> CalibrationTable:
        """Raises UsageError naming `where` and the field for anything that is not a valid table of this version."""
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise UsageError(f"{where}: is not JSON ({error}); make it again with `llmc calibrate`") from None
        if not isinstance(value, dict) or "version" not in value:
            raise UsageError(f"{where}: has no version: it is not a calibration table; `llmc calibrate` writes one")
        version = value["version"]
        if version not in _READABLE:
            raise UsageError(
                f"{where}: has version {version!r}, this llmc reads versions {_READABLE[0]} to {_READABLE[-1]}; make "
                f"it again with `llmc calibrate`"
            )
        reader = _Reader(where, version > 1)
        data = reader.field(value, "data", dict)
        tensors = reader.field(value, "tensors", dict)
        return CalibrationTable(
            checkpoint=reader.field(value, "checkpoint", str),
            modelopt=reader.field(value, "modelopt", str),
            recipe=reader.field(value, "recipe", str),
            data=CalibrationData(
                source=reader.field(data, "source", str),
                sha256=reader.field(data, "sha256", str),
                samples=reader.field(data, "samples", int),
                tokens=reader.field(data, "tokens", int),
                seed=reader.field(data, "seed", int),
            ),
            tensors={path: reader.ranges(path, item) for path, item in tensors.items()},
            weights=reader.weights(value, version),
            head=reader.field(value, "head", str) if version == 4 or (version > 4 and "head" in value) else None,
            **reader.rounding(value),
        )


def read_table(path: Path) -> CalibrationTable:
    """The table in a file; raises UsageError naming it when it cannot be read or is not valid. The rounded weights
    beside it are looked for when they are needed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; `llmc calibrate` writes a table") from error
    return replace(CalibrationTable.from_json(raw, str(path)), folder=path.parent)


@dataclass(frozen=True)
class _Reader:
    """Takes fields out of decoded JSON, with errors that name the field."""

    where: str
    choices: bool  # whether the table has them

    def field(self, value: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
        item = value.get(key)
        if not isinstance(item, kind) or isinstance(item, bool):
            expected = "a number" if isinstance(kind, tuple) else kind.__name__
            raise UsageError(f"{self.where}: {key} is {item!r}, expected {expected}")
        return item

    def weights(self, value: dict[str, Any], version: int) -> str:
        """What the weights were rounded to."""
        weights = str(self.field(value, "weights", str)) if version > 2 else "fp8"
        if weights not in WEIGHTS:
            raise UsageError(f"{self.where}: weights is {weights!r}, expected {', '.join(WEIGHTS)}")
        return weights

    def rounding(self, value: dict[str, Any]) -> dict[str, Any]:
        """The fields that tables of ranges alone lack."""
        if not self.choices:
            return {}
        activations = self.field(value, "activations", str)
        if activations not in ACTIVATIONS:
            raise UsageError(f"{self.where}: activations is {activations!r}, expected {', '.join(ACTIVATIONS)}")
        rounded = self.field(value, "rounded", dict)
        file = self.field(rounded, "file", str)
        if Path(file).name != file:
            raise UsageError(f"{self.where}: rounded.file is {file!r}, expected the name of a file beside the table")
        return {
            "activations": activations,
            "budget": float(self.field(value, "budget", (int, float))),
            "rounded": RoundedFile(file, self.field(rounded, "sha256", str)),
        }

    def choice(self, path: str, value: dict[str, Any]) -> Choice | None:
        if not self.choices:
            return None
        kept = value.get("kept")
        if not isinstance(kept, bool):
            raise UsageError(f"{self.where}: {path}.kept is {kept!r}, expected true or false")
        numbers = {key: self.amax(f"{path}.{key}", value.get(key)) for key in _NUMBERS}
        input_kept = value.get("input_kept", False)
        if not isinstance(input_kept, bool):
            raise UsageError(f"{self.where}: {path}.input_kept is {input_kept!r}, expected true or false")
        return Choice(kept, **numbers, smoothing=self.smoothing(path, value.get("smoothing")), input_kept=input_kept)

    def smoothing(self, path: str, value: Any) -> Smoothing | None:
        if value is None:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("module"), str):
            raise UsageError(f"{self.where}: {path}.smoothing is {value!r}, expected a module and an exponent")
        return Smoothing(value["module"], self.amax(f"{path}.smoothing.exponent", value.get("exponent")))

    def ranges(self, path: str, value: Any) -> Ranges:
        if not isinstance(value, dict):
            raise UsageError(f"{self.where}: tensors[{path!r}] is {value!r}, expected an object")
        weights = self.field(value, "weight_amax", list)
        if not weights:
            raise UsageError(f"{self.where}: tensors[{path!r}].weight_amax is empty")
        return Ranges(
            self.amax(f"{path}.input_amax", value.get("input_amax")),
            tuple(self.amax(f"{path}.weight_amax", item) for item in weights),
            self.choice(path, value),
        )

    def amax(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise UsageError(f"{self.where}: {name} is {value!r}, expected a finite number that is not negative")
        return float(np.float32(value))
