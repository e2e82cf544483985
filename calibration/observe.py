"""The calibration pass: ranges of weights and inputs of every linear module, observed by nvidia-modelopt.

Comes in: a checkpoint, data or none. Goes out: a `CalibrationTable`. Must not know: the graph, scales.

The model runs at float32 on the CPU while modelopt's FP8 quantizers only watch. Its linear modules are torch's Linear
and transformers' Conv1D (GPT-2), whose transposed weight modelopt turns round: weight ranges are by output channel for
both. The output head is left out, as modelopt does by default.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.artifacts.errors import EnvironmentFault, UnsupportedError, UsageError
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.reference import load_reference
from llmc.calibration.data import Progress, Samples, read_samples, write_samples

RECIPE = (
    "FP8 E4M3 (modelopt FP8_DEFAULT_CFG, algorithm max, weight axis 0): weights by output channel, inputs by tensor, "
    "largest magnitude, float32 model, output head unquantized"
)
#: Tokens that one forward pass runs at once: enough to keep the cores busy, few enough for their activations to fit.
_BATCH_TOKENS = 2048


def calibrate(
    checkpoint: Checkpoint,
    data: Path | None = None,
    samples: int = 16,
    tokens: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> CalibrationTable:
    """The table of this checkpoint, from `samples` samples of `tokens` tokens of `data`, or of the model's own text.

    The defaults come of measuring SmolLM2: at equal tokens, many short samples are as good as few long ones, and the
    model writes them in half the time, since a step costs nearly the same for 16 samples as for 8.

    Raises UsageError for data that cannot be used or sizes below 1, EnvironmentFault where modelopt is not installed.
    The same arguments give the same table on the same machine.
    """
    if samples < 1 or tokens < 2:
        raise UsageError(f"calibration takes at least 1 sample of 2 tokens, not {samples} of {tokens}")
    limit = checkpoint.model_info().max_position_embeddings
    if tokens > limit:
        raise UsageError(f"calibration samples of {tokens} tokens exceed the model's {limit} positions")
    texts = None if data is None else read_samples(checkpoint, data, samples, tokens, seed)
    mtq, version = _modelopt()
    model = load_reference(checkpoint)
    if texts is None:
        texts = write_samples(checkpoint, model, samples, tokens, seed, progress)
    ranges = _observe(mtq, model, texts, progress)
    return CalibrationTable(
        checkpoint=checkpoint.digest,
        modelopt=version,
        recipe=RECIPE,
        data=CalibrationData(texts.source, texts.sha256, len(texts.ids), texts.tokens, seed),
        tensors=ranges,
    )


def _modelopt() -> tuple[Any, str]:
    """modelopt's quantization module and version; importing it takes seconds and warns of things that are not so."""
    try:
        with _quiet():
            import modelopt
            import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise EnvironmentFault(f"calibration needs nvidia-modelopt ({error}): pip install 'llmc[build]'") from error
    return mtq, str(modelopt.__version__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps modelopt's prints off the terminal."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _config(mtq: Any, model: Any) -> dict[str, Any]:
    """FP8 with weights by output channel; the output head is left out under whatever name this model has for it."""
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer":
            entry["cfg"]["axis"] = 0
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            config["quant_cfg"].append({"quantizer_name": f"{name}.*", "enable": False})
    return config


def _observe(mtq: Any, model: Any, samples: Samples, progress: Progress | None) -> dict[str, Ranges]:
    """Ranges by module path. The model is modelopt's afterwards and of no other use."""
    import torch

    terminal = sys.stdout

    def run(quantized: Any) -> None:
        done = 0
        with torch.inference_mode():
            for batch in _batches(samples):
                quantized(torch.tensor(batch), use_cache=False, logits_to_keep=1)
                done += len(batch)
                if progress is not None:
                    with contextlib.redirect_stdout(terminal):  # modelopt is kept quiet, the caller is not
                        progress("observing ranges", done, len(samples.ids))

    with _quiet():
        mtq.quantize(model, _config(mtq, model), run)
    ranges = {}
    for name, module in model.named_modules():
        inputs, weights = getattr(module, "input_quantizer", None), getattr(module, "weight_quantizer", None)
        if inputs is None or weights is None or not (inputs.is_enabled and weights.is_enabled):
            continue
        if inputs.amax is None or weights.amax is None:
            raise UnsupportedError(f"module {name} never ran on the calibration data: its input has no range")
        ranges[name] = Ranges(float(inputs.amax), tuple(weights.amax.flatten().tolist()))
    if not ranges:
        raise UnsupportedError("modelopt found no linear module to observe in this model")
    return ranges


def _batches(samples: Samples) -> Iterator[list[tuple[int, ...]]]:
    """Samples of one length, few enough for one pass: padding would be observed too."""
    for length, group in groupby(sorted(samples.ids, key=len), key=len):
        alike, size = list(group), max(1, _BATCH_TOKENS // length)
        yield from (alike[at : at + size] for at in range(0, len(alike), size))
