"""The calibration: how each linear layer of a checkpoint is rounded, as a table and a file of rounded weights.

Comes in: a checkpoint, options. Goes out: `CalibrationTable`, written beside its rounded weights, or taken from the
cache. Must not know: the graph, plans, how text is cut.

    samples -> sensitivity (one backward pass) -> what stays in bf16, or its input -> rounding, layer by layer -> table

The model runs at float32 on the CPU, its large weights read as they are needed. Ranges and SmoothQuant's factors are
nvidia-modelopt's.

The output head is FP8 in any format's table: of SmolLM2-135M it is a fifth of the weights, and in bf16 a third of the
bytes of an FP8 decode step, half of an INT4 one. Compensated rounding is what makes it possible: beside FP8 layers
(KL 0.0034) rounding it to nearest gives KL 0.035, with scales by search 0.014, compensated 0.0045. Its inputs are never
rounded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmc.artifacts.calibration import (
    ACTIVATIONS,
    LM_HEAD_DTYPES,
    CalibrationData,
    CalibrationTable,
    Choice,
    Ranges,
    RoundedFile,
    Smoothing,
)
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.files import temporary_beside, write_file
from llmc.artifacts.hashing import sha256_file
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.reference import load_reference
from llmc.builder.sources import sources_digest
from llmc.builder.weights.rounded import RoundedWriter
from llmc.calibration.data import Progress, Samples, documentation, read_samples

if TYPE_CHECKING:
    from llmc.calibration.experts import Stack
    from llmc.calibration.formats import Rounded
    from llmc.calibration.sequential import Outcome

_FORMAT = {
    "fp8": "FP8 E4M3, weights by output channel",
    "int8": "INT8, weights by output channel, inputs smoothed (SmoothQuant, exponents by search)",
    "int4": "INT4, weights in groups of 128 columns",
}
_RECIPE = (
    "error-compensated rounding (GPTQ, columns by energy, scales by search), each layer on the inputs that the rounded "
    "ones before it give; output head "
)
#: Samples of the calibration and tokens of each, unless activations would take more memory than this.
_SAMPLES, _TOKENS, _MEMORY = 16, 256, 320 << 20
#: Of SmolLM2-135M eight linears of 211 are kept for it; of three without the output head KL fell from 0.106 to 0.094.
_INT4_BUDGET = 1.03
#: The share of the multiplications of linear layers whose inputs an FP8 engine leaves as they are where it scales the
#: others by token. It costs no bytes, so nothing where a step waits for its weights.
_KEPT_INPUTS = 0.05
#: One sample in so many is enough to tell which modules are sensitive.
_SENSITIVITY = 4


@dataclass(frozen=True)
class CalibrationOptions:
    """`data`: a .txt, a .jsonl or a folder of them, None: documentation of Python's standard library. `samples` (None:
    as many as memory allows, at most 16) of `tokens` tokens each (None: 256, or what the model takes). `activations`
    token|static|none; `budget`: the linear layers take at most so many times the bytes of pure FP8.
    `weights` fp8|int8|int4: the budget is that times the bytes of all linear layers rounded so. INT8 takes activations
    by `token`, INT4 `none`.
    `lm_head_dtype` fp8|bf16: fp8 rounds the output head too, weights alone; bf16 leaves it out.
    """

    data: Path | None = None
    samples: int | None = None
    tokens: int | None = None
    seed: int = 0
    activations: str = "token"
    budget: float = 1.10
    weights: str = "fp8"
    lm_head_dtype: str = "fp8"

    @staticmethod
    def of(weights: str, data: Path | None = None) -> CalibrationOptions:
        """What a build to such weights asks for."""
        if weights == "int4":
            return CalibrationOptions(data, activations="none", budget=_INT4_BUDGET, weights=weights)
        return CalibrationOptions(data, weights=weights)

    def resolved(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """Samples and their tokens. Raises UsageError for what cannot be."""
        limit = checkpoint.model_info().max_position_embeddings
        tokens = min(_TOKENS, limit) if self.tokens is None else self.tokens
        if (self.samples is not None and self.samples < 1) or tokens < 2:
            raise UsageError(f"calibration takes at least 1 sample of 2 tokens, not {self.samples} of {tokens}")
        if tokens > limit:
            raise UsageError(f"calibration samples of {tokens} tokens exceed the model's {limit} positions")
        if not 1 <= self.budget <= 2:
            raise UsageError(f"an FP8 budget of {self.budget} is outside 1.0 (all FP8) to 2.0 (all bf16)")
        if self.activations not in ACTIVATIONS:
            raise UsageError(f"fp8 activations {self.activations!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.lm_head_dtype not in LM_HEAD_DTYPES:
            raise UsageError(f"lm_head dtype {self.lm_head_dtype!r} is not one of {', '.join(LM_HEAD_DTYPES)}")
        return self.samples or _sample_count(checkpoint, tokens), tokens


def calibrate(
    checkpoint: Checkpoint, options: CalibrationOptions, output: Path, progress: Progress | None = None
) -> CalibrationTable:
    """Writes the table to `output` (.json) and the rounded weights beside it (.safetensors). Raises UsageError for data
    or options that cannot be used, EnvironmentFault where modelopt is not installed. The same arguments give the same
    files on the same machine.
    """
    return _calibrate(
        checkpoint, options, calibration_samples(checkpoint, options), output, progress or (lambda *_: None)
    )


def cached_table(
    checkpoint: Checkpoint, options: CalibrationOptions, progress: Progress | None = None, reuse: bool = True
) -> tuple[CalibrationTable, bool]:
    """The same, kept in the cache folder by what it was made from: weights, tokens, options, versions, llmc's sources;
    and whether it was there. Without `reuse` it is made anew.
    """
    from llmc.artifacts.calibration import read_table
    from llmc.calibration.cache import TableCache, default_folder

    samples, cache = calibration_samples(checkpoint, options), TableCache(default_folder())
    parts = {
        "checkpoint": checkpoint.digest,
        "samples": samples.sha256,
        "options": {k: v for k, v in asdict(options).items() if k != "data"},
        "sources": sources_digest(("artifacts", "builder", "calibration")),
        "versions": {n: version(n) for n in ("torch", "transformers", "nvidia-modelopt", "numpy")},
    }
    path = cache.path(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
    if reuse and cache.holds(path):
        return read_table(path), True
    with cache.writing():
        table = _calibrate(checkpoint, options, samples, path, progress or (lambda *_: None))
    cache.prune(path)
    return table, False


def calibration_samples(checkpoint: Checkpoint, options: CalibrationOptions) -> Samples:
    """The token ids that these options mean. Raises UsageError for data that cannot be used."""
    count, tokens = options.resolved(checkpoint)
    if options.data is None:
        return documentation(checkpoint, count, tokens, options.seed)
    return read_samples(checkpoint, options.data, count, tokens, options.seed)


def _sample_count(checkpoint: Checkpoint, tokens: int) -> int:
    """As many as leave the values of one layer, which are held for both streams, within bounds."""
    config = checkpoint.hf_config().get_text_config()
    widest = max(getattr(config, "intermediate_size", 0) or 0, 4 * config.hidden_size)
    return max(min(_SAMPLES, _MEMORY // (2 * 4 * 4 * (config.hidden_size + widest) * tokens)), 1)


def _calibrate(
    checkpoint: Checkpoint, options: CalibrationOptions, samples: Samples, output: Path, progress: Progress
) -> CalibrationTable:
    from llmc.calibration import sequential
    from llmc.calibration.experts import expert_modules, stack_shapes
    from llmc.calibration.formats import FORMATS
    from llmc.calibration.modelopt import Modelopt
    from llmc.calibration.modules import head_path, linear_modules, shape_of
    from llmc.calibration.sensitivity import measure, quantizer
    from llmc.calibration.smooth import Smoother

    modelopt = Modelopt()  # before the minutes of work that would be lost without it
    model = load_reference(checkpoint)
    experts = expert_modules(model)
    form = FORMATS[options.weights]
    forms = dict.fromkeys(linear_modules(model), form)
    if not forms:
        raise UnsupportedError(f"{checkpoint.path}: this model has no linear module to calibrate")
    head = head_path(model) if options.lm_head_dtype == "fp8" else None
    if head is not None:
        forms[head] = FORMATS[options.lm_head_dtype]
    probes, as_read = samples.ids[::_SENSITIVITY], quantizer(options.activations, form)
    smoother = Smoother(modelopt, form, as_read) if options.weights == "int8" else None
    measured = partial(progress, "measuring sensitivity")
    sensitivity = measure(model, probes, forms, as_read, options.seed, measured, smoother)
    kept = sensitivity.kept(options.budget)
    inputs = frozenset[str]()
    if (options.weights, options.activations) == ("fp8", "token"):
        inputs = sensitivity.kept_inputs(kept, _KEPT_INPUTS)
    smoothing = None if smoother is None else sequential.Smoothing(smoother, sensitivity.rounded_readers(kept))
    side = output.with_suffix(".safetensors")
    partial_side = temporary_beside(side)
    shapes = {path: shape_of(model.get_submodule(path)) for path in forms if path not in kept} | stack_shapes(experts)
    first = set() if smoothing is None else {readers[0] for readers in smoothing.readers.values()}
    with RoundedWriter(partial_side, shapes, options.weights, head, first) as writer:
        sink = _Sink(writer, sensitivity.loss, kept, inputs, partial(progress, "rounding"), len({*forms, *shapes}))
        chosen = sequential.Chosen(forms, kept, options.activations, inputs, dict.fromkeys(experts, form))
        sequential.round_model(model, samples.ids, chosen, modelopt.amax, sink, smoothing)
        if missing := sorted({*forms, *shapes} - sink.ranges.keys()):
            raise UnsupportedError(f"module {missing[0]} never ran on the calibration data: its input has no range")
    os.replace(partial_side, side)
    table = CalibrationTable(
        checkpoint=checkpoint.digest,
        modelopt=modelopt.version,
        recipe=f"{_FORMAT[options.weights]}: {_RECIPE}{'unquantized' if head is None else 'FP8, of weights alone'}",
        data=CalibrationData(samples.source, samples.sha256, len(samples.ids), samples.tokens, options.seed),
        tensors=sink.ranges,
        activations=options.activations,
        budget=options.budget,
        weights=options.weights,
        rounded=RoundedFile(side.name, sha256_file(side)),
        head=head,
    )
    write_file(output, table.to_json())
    return replace(table, folder=output.parent)


@dataclass
class _Sink:
    """Writes what `round_model` tells of."""

    writer: RoundedWriter
    loss: Mapping[str, float]
    kept: frozenset[str]
    inputs: frozenset[str]
    progress: Callable[[int, int], None]
    total: int  # modules, and stacks of experts
    ranges: dict[str, Ranges] = field(default_factory=dict)

    def rows(self, path: str, start: int, rounded: Rounded) -> None:
        self.writer.add(path, *(part.numpy() for part in rounded.parts), start=start)

    def expert(self, path: str, number: int, rounded: Rounded) -> None:
        self.writer.add(path, *(part.numpy()[None] for part in rounded.parts), start=number)

    def stack(self, path: str, stack: Stack) -> None:
        choice = Choice(False, 0.0, stack.input_scale, float(np.float32(stack.error)))
        self._add(path, Ranges(stack.input_amax, tuple(stack.weight_amax), choice))

    def done(self, path: str, outcome: Outcome) -> None:
        loss, error = (float(np.float32(value)) for value in (self.loss[path], outcome.error))
        smoothing = None
        if outcome.smoothed is not None:
            smoothing = Smoothing(outcome.smoothed.module, float(np.float32(outcome.smoothed.exponent)))
            if outcome.smoothed.module == path:
                self.writer.add_factors(path, outcome.smoothed.factors.numpy())
        choice = Choice(path in self.kept, loss, outcome.input_scale, error, smoothing, path in self.inputs)
        self._add(path, Ranges(outcome.input_amax, tuple(outcome.weight_amax.tolist()), choice))

    def _add(self, path: str, ranges: Ranges) -> None:
        self.ranges[path] = ranges
        self.progress(len(self.ranges), self.total)
