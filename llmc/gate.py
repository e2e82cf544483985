"""What is asked of a finished engine, and the accuracy gate: how far it may be from its checkpoint before a build
refuses to publish it.

Comes in: options as text, the precision, measured figures. Goes out: `Exam`, `Gate`, and the bounds that were broken,
in words. Must not know: engines, checkpoints, how the figures are measured (llmc/examine.py).

    ppl=1.5%      relative rise of perplexity, at most (a fall is not a loss; divergence bounds it)
    kl=0.02       mean Kullback-Leibler divergence from the checkpoint, in nats a token, at most
    top1=0.93     share of positions whose best token is the checkpoint's, at least
    cosine=0.99   5th percentile over positions of the logits' cosine, at least
    greedy=0.9    share of the engine's greedy tokens that are the checkpoint's, given all before them, at least

Bounds that are not named keep the precision's default; `off` measures and publishes whatever comes of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from llmc.artifacts.errors import UsageError

OFF = "off"
#: Bound -> the figure of quality.json that it holds, how it reads, and whether it is a ceiling.
_FIGURES = {
    "ppl": ("perplexity_change", "perplexity rose by", True),
    "kl": ("kl", "KL divergence is", True),
    "top1": ("top1", "top-1 agreement is", False),
    "cosine": ("cosine_p5", "5th percentile of the logits' cosine is", False),
    "greedy": ("greedy", "greedy agreement is", False),
}


@dataclass(frozen=True)
class Gate:
    """The five bounds, as ratios: `ppl` 0.015 is 1.5 %."""

    ppl: float
    kl: float
    top1: float
    cosine: float
    greedy: float

    def __str__(self) -> str:
        """As `--gate` takes it, to the last digit: two gates that differ are written differently."""
        values = {key: Decimal(repr(value)) for key, value in dataclasses.asdict(self).items()}
        values["ppl"] *= 100
        return ",".join(f"{key}={value.normalize():f}{'%' if key == 'ppl' else ''}" for key, value in values.items())

    def broken(self, figures: Mapping[str, Any]) -> tuple[str, ...]:
        """What is beyond its bound, each with figure and bound; NaN is beyond every bound."""
        found = []
        for key, bound in dataclasses.asdict(self).items():
            name, reads, ceiling = _FIGURES[key]
            value = float(figures[name])
            if not (value <= bound if ceiling else value >= bound):
                shown, limit = (f"{100 * v:.4g} %" if key == "ppl" else f"{v:.4g}" for v in (value, bound))
                found.append(f"{reads} {shown} ({key}: {'at most' if ceiling else 'at least'} {limit})")
        return tuple(found)


#: Wide enough for what a sound build of SmolLM2-135M measures (the smaller a model, the more rounding costs it), far
#: from what a broken one gives. fp32 differs from Hugging Face by the order of additions alone; bf16 rounds weights to
#: 8 bits, FP8 E4M3 weights and activations to 4. Models without training have flat logits, whose best token changes
#: easily: at FP8 they need lower `top1` and `greedy`. FP8 by ranges alone (rounding to nearest, static scales) measures
#: KL 0.034 and top-1 0.897 on SmolLM2, and is refused; as `--fp8` chooses by itself, output head included, KL 0.0043
#: and 0.967. INT4 with such a head measures perplexity +9.5 %, KL 0.090, top-1 0.84, cosine 0.953 and greedy 0.82 on
#: SmolLM2, rounded from Q4_1.
#: INT8 measures perplexity +0.34 %, KL 0.0042, top-1 0.963, cosine 0.998 and greedy 0.977 there.
#: An FP8 cache beside bf16 weights measures perplexity +1.07 %, KL 0.0086 and cosine 0.997 there: see `judged_as`.
DEFAULTS = {
    "fp32": Gate(ppl=0.001, kl=1e-4, top1=0.99, cosine=0.9999, greedy=0.98),
    "bf16": Gate(ppl=0.01, kl=0.005, top1=0.95, cosine=0.999, greedy=0.93),
    "fp8": Gate(ppl=0.03, kl=0.03, top1=0.9, cosine=0.975, greedy=0.8),
    "int8": Gate(ppl=0.03, kl=0.03, top1=0.9, cosine=0.975, greedy=0.8),
    "int4": Gate(ppl=0.15, kl=0.15, top1=0.78, cosine=0.9, greedy=0.6),
}


@dataclass(frozen=True)
class Exam:
    """`evaluate` False: nothing is compared. `gate` None: compared, but published whatever comes of it. `text`: a .txt,
    a .jsonl or a folder of them (None: Python's own documentation), of which `windows` windows of at most `length`
    tokens are read.
    """

    evaluate: bool = True
    gate: Gate | None = None
    text: Path | None = None
    windows: int = 6
    length: int = 512

    def settings(self) -> dict[str, object]:
        """By option name, for the manifest: no path."""
        if not self.evaluate:
            return {"no_evaluate": True}
        text = {} if self.text is None else {"eval": self.text.name}
        gate = OFF if self.gate is None else str(self.gate)
        return {"gate": gate, **text, "eval_windows": self.windows, "eval_length": self.length}


def judged_as(precision: str, kv_dtype: str | None) -> str:
    """The precision whose default bounds a build is held to: an FP8 cache makes at least an FP8 engine of it."""
    return "fp8" if kv_dtype == "f8e4m3" and precision in ("fp32", "bf16") else precision


def make_exam(
    precision: str, gate: str | None, evaluate: bool, text: str | Path | None, windows: int, length: int
) -> Exam:
    """Raises UsageError for options that contradict one another."""
    bounds = parse_gate(gate, precision)
    if not evaluate and gate is not None and bounds is not None:
        raise UsageError(f"--gate {gate} needs the comparison that --no-evaluate skips; drop one of them")
    if not evaluate and text is not None:
        raise UsageError(f"--eval {text} is for the comparison that --no-evaluate skips; drop one of them")
    if windows < 1 or length < 2:
        raise UsageError(f"the evaluation takes at least 1 window of 2 tokens, not {windows} of {length}")
    return Exam(evaluate, bounds, None if text is None else Path(text), windows, length)


def parse_gate(text: str | None, precision: str) -> Gate | None:
    """The bounds of `--gate`, None for `off`. Raises UsageError naming the bound and the value that is wrong."""
    if precision not in DEFAULTS:
        raise UsageError(f"precision {precision!r} is not one of {', '.join(DEFAULTS)}")
    default = DEFAULTS[precision]
    if text is None:
        return default
    if text.strip() == OFF:
        return None
    bounds: dict[str, float] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in _FIGURES:
            raise UsageError(
                f"--gate {text}: {item.strip()!r} is no bound; it takes {OFF}, or KEY=VALUE with commas between, of "
                f"{', '.join(_FIGURES)}, such as {default}"
            )
        if key in bounds:
            raise UsageError(f"--gate {text}: {key} is given twice")
        bounds[key] = _number(text, key, value)
    return dataclasses.replace(default, **bounds)


def _number(text: str, key: str, value: str) -> float:
    """A ratio, perhaps in percent: from 0 on, and to 1 where it is a share."""
    try:
        number = float(Decimal(value.removesuffix("%")) / (100 if value.endswith("%") else 1))
    except InvalidOperation:
        number = math.nan
    most = math.inf if _FIGURES[key][2] else 1.0
    if not 0 <= number <= most or math.isinf(number):
        wanted = "a number from 0 on" if most == math.inf else "a number from 0 to 1"
        raise UsageError(f"--gate {text}: {key} is {value!r}; {wanted}, or that in percent, is needed")
    return number
