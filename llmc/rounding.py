"""How a build with rounded weights comes by its calibration table: from a file, or made as asked and kept in the cache.

Comes in: the options of a build, a checkpoint. Goes out: a `CalibrationTable`, or none. Must not know: graphs, plans,
how weights are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.calibration import OWN_HEAD, WEIGHTS, CalibrationTable, read_table
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.builder.options import BuildOptions
from llmc.builder.progress import Progress
from llmc.profiles import GpuTarget, TargetDescription

if TYPE_CHECKING:
    from llmc.builder.checkpoint import Checkpoint


#: The output head of a build of rounded weights that does not say: of SmolLM2-135M beside FP8 layers it costs KL 0.001
#: and saves a sixth of the bytes of a decode step.
LM_HEAD_DTYPE = "fp8"


@dataclass(frozen=True)
class RoundingOptions:
    """What is asked of rounded weights; `activations` and `budget` of FP8 alone. `calib`: a table (.json), or data to
    calibrate with (.txt, .jsonl, a folder); `activations` token|static|none; `budget`: linear layers take at most so
    many times the bytes of pure FP8; `lm_head_dtype` bf16|fp8 of the output head. None: the table's own, or the
    target's default, `usual` for activations and `usual_head`. `cache`: a table that was made before is taken again.
    """

    calib: Path | None = None
    activations: str | None = None
    budget: float | None = None
    cache: bool = True
    usual: str = "token"
    lm_head_dtype: str | None = None
    usual_head: str = LM_HEAD_DTYPE

    def applies(self, checkpoint: Checkpoint, precision: str) -> bool:
        """Whether such a build rounds weights. Raises UsageError for options without effect."""
        if precision not in WEIGHTS:
            for option, value in self.given().items():
                raise UsageError(
                    f"{option} {value}: only an FP8, INT8 or INT4 build is calibrated; add --fp8, --int8 or --int4, or "
                    f"drop {option}"
                )
            return False
        if precision != "fp8":
            for option, value in self._fp8_given().items():
                raise UsageError(f"{option} {value}: is for FP8, and this build is {precision.upper()}; drop {option}")
        own = checkpoint.quantization
        if own is not None and own.linears and own.scheme.weights == precision:
            for option, value in self.given().items():
                if option == "--lm-head-dtype":  # which such a checkpoint may leave alone
                    continue
                raise UsageError(
                    f"{option} {value}: this checkpoint is {precision.upper()} already and brings its own scales; drop "
                    f"{option}"
                )
            return False
        return True

    def head(self, checkpoint: Checkpoint, precision: str) -> str:
        """What the output head is to be: as asked, else as usual where weights are rounded, else the checkpoint's."""
        rounds = self.applies(checkpoint, precision)
        return self.lm_head_dtype or (self.usual_head if rounds else OWN_HEAD)

    def table(self, checkpoint: Checkpoint, precision: str, progress: Progress) -> CalibrationTable | None:
        """None unless weights are rounded. Raises UsageError for options without effect or against the table's own,
        UnsupportedError for an output head that cannot be rounded.
        """
        if not self.applies(checkpoint, precision):
            return None
        if self.calib is not None and self.calib.suffix == ".json":
            table = read_table(self.calib)
            table.check(checkpoint.digest)
            if table.rounded is not None and table.weights != precision:
                raise UsageError(
                    f"{self.calib}: its weights were rounded to {table.weights}, and this build is {precision}; build "
                    f"with --{table.weights}, or calibrate again"
                )
            self._require_same(self.calib, table)
            return table
        from llmc.calibration import CalibrationOptions, cached_table

        options = CalibrationOptions.of(precision, self.calib)
        if precision == "fp8":
            options = replace(options, activations=self.activations or self.usual, budget=self.budget or options.budget)
        options = replace(options, lm_head_dtype=self.lm_head_dtype or self.usual_head)
        with progress.stage("calibrate"):
            table, reused = cached_table(
                checkpoint, options, lambda _, done, total: progress.advanced("calibrate", done, total), self.cache
            )
        if reused:
            progress.reused.append("calibrate")
        if self.lm_head_dtype not in (None, _head_of(table)):
            raise UnsupportedError(
                f"--lm-head-dtype {self.lm_head_dtype}: {checkpoint.path}: this model's output head is no linear "
                "module that could be rounded; drop the option"
            )
        return table

    def resolve(self, options: BuildOptions, table: CalibrationTable | None) -> BuildOptions:
        """What the build's FP8 layers make of their inputs, and what its output head is."""
        activations = self.activations or (table.activations if table is not None else None) or self.usual
        head = (self.lm_head_dtype or OWN_HEAD) if table is None else _head_of(table)
        return replace(options, fp8_activations=activations, lm_head_dtype=head)

    def given(self) -> dict[str, object]:
        """What was asked for, by option."""
        options = {"--calib": self.calib, "--lm-head-dtype": self.lm_head_dtype}
        return {**{option: value for option, value in options.items() if value is not None}, **self._fp8_given()}

    def _fp8_given(self) -> dict[str, object]:
        options = {"--fp8-activations": self.activations, "--fp8-budget": self.budget}
        return {option: value for option, value in options.items() if value is not None}

    def _require_same(self, path: Path, table: CalibrationTable) -> None:
        """Raises UsageError where the table's weights were rounded otherwise than asked."""
        if table.rounded is None and self.budget is not None:
            raise UsageError(f"--fp8-budget {self.budget}: {path} has ranges alone and keeps nothing; calibrate again")
        made = {
            "--fp8-activations": table.activations,
            "--fp8-budget": table.budget,
            "--lm-head-dtype": _head_of(table),
        }
        for option, value in self.given().items():
            if made.get(option) not in (None, value):
                raise UsageError(
                    f"{option} {value}: {path} was made with {made[option]}; drop the option, or calibrate again"
                )


def usual_head(target: TargetDescription) -> str:
    """What a build of rounded weights makes of the output head unless it is told."""
    return "bf16" if isinstance(target, GpuTarget) and not target.fp8 else LM_HEAD_DTYPE


def require_fp8(target: TargetDescription, precision: str, kv_dtype: str | None, lm_head_dtype: str | None) -> None:
    """Raises UsageError, naming the option, for FP8 on GPUs that do not know it."""
    if not isinstance(target, GpuTarget) or target.fp8:
        return
    for option, wanted, instead in (
        ("--fp8", precision == "fp8", "--dtype bf16"),
        ("--kv-cache-dtype fp8", kv_dtype == "f8e4m3", "--kv-cache-dtype bf16"),
        ("--lm-head-dtype fp8", lm_head_dtype == "fp8", "--lm-head-dtype bf16"),
    ):
        if wanted:
            raise UsageError(f"{option}: {target} has no FP8; choose {instead}, or a target from sm_89 on")


def _head_of(table: CalibrationTable) -> str:
    """What a table makes of the output head."""
    return "bf16" if table.head is None else "fp8"
