"""`llmc build`: a checkpoint in, engine.plan out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from llmc.artifacts.calibration import ACTIVATIONS, LM_HEAD_DTYPES
from llmc.builder.options import KV_CACHE_DTYPES
from llmc.cli.config import load_config
from llmc.cli.target import TargetName

if TYPE_CHECKING:
    from llmc.builder.build import BuildReport, MemoryPlan

PRECISIONS = ("fp32", "bf16")
#: The options that the memory arithmetic depends on, or its printing.
_OF_DRY_RUN = frozenset(
    {
        "model", "fp8", "int8", "int4", "dtype", "tp", "profile", "target", "kv_dtype", "lm_head_dtype", "dry_run",
        "as_json", "config",
    }
)  # fmt: skip
#: The options that what passes make depends on.
_OF_STOP_AFTER = frozenset(
    {
        "model", "fp8", "int8", "int4", "dtype", "tp", "profile", "target", "calib", "fp8_activations", "fp8_budget",
        "lm_head_dtype", "verify_passes", "kv_dtype", "dump", "stop_after", "config",
    }
)  # fmt: skip


@click.command(name="build")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Hugging Face folder, or a GGUF file.")
@click.option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=load_config,
    type=click.Path(path_type=Path),
    help="A YAML file with options by name, such as `tp: 2`; those on the command line win.",
)
@click.option("--fp8", is_flag=True, help="FP8 E4M3 weights, rounded with calibration.")
@click.option(
    "--int8", is_flag=True, help="INT8 weights and inputs (W8A8): SmoothQuant, each token scaled by its own range."
)
@click.option(
    "--int4",
    is_flag=True,
    help="INT4 weights in groups of 128, calibrated, the output head FP8; activations stay float32.",
)
@click.option(
    "--dtype",
    type=click.Choice(PRECISIONS),
    help="How weights are stored. Default: bf16, or as a quantized checkpoint has them.",
)
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor-parallel ranks.")
@click.option(
    "--profile", default="chat", show_default=True, help="Shape profile: chat, batch, long-context, or a YAML file."
)
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    type=TargetName(),
    help="cpu[:ISA], cuda[:sm_XX], or tensorrt[:sm_XX] on such a GPU. ISA: x86-64-v3, -v4, -v4-vnni, -v4-bf16, -amx, "
    "native for the fastest of this machine.",
)
@click.option(
    "--kv-cache-dtype",
    "kv_dtype",
    type=click.Choice(tuple(KV_CACHE_DTYPES)),
    help="How keys and values are kept: fp8 is E4M3, calibrated. Default: auto, fp32 for fp32 weights, else bf16.",
)
@click.option(
    "--calib", type=click.Path(path_type=Path), help="Calibration table (.json) or text (.txt, .jsonl, folder)."
)
@click.option(
    "--fp8-activations",
    type=click.Choice(ACTIVATIONS),
    help="FP8 inputs scaled by each token's range, or by calibration; none: float32 inputs. Default: the table's, then "
    "what suits the target (cpu: none).",
)
@click.option(
    "--fp8-budget",
    type=click.FloatRange(1, 2),
    help="Layers that lose most stay bf16, up to so many times the bytes of pure FP8. Default: 1.1.",
)
@click.option(
    "--lm-head-dtype",
    type=click.Choice(LM_HEAD_DTYPES),
    help="The output head beside rounded weights: fp8 rounds it with calibration. Default: the table's, then fp8.",
)
@click.option("--tactics", type=click.Path(path_type=Path), help="File of `llmc tune`. Default: the target's own.")
@click.option("-o", "--output", default="engine.plan", show_default=True, type=click.Path(path_type=Path))
@click.option("--no-cache", is_flag=True, help="Reuse nothing of earlier builds: neither the plan nor any stage.")
@click.option("--lock", type=click.Path(path_type=Path), help="Lock file in which to record the plan.")
@click.option("--verify-passes", is_flag=True, help="Check every pass on the real weights with the interpreter (slow).")
@click.option(
    "--gate", help="Bounds: ppl=1.5%,kl=0.02,top1=0.93,cosine=0.99,greedy=0.9, or off. Default: by precision."
)
@click.option("--eval", "eval_text", type=click.Path(path_type=Path), help="Text to compare on: .txt, .jsonl, folder.")
@click.option("--eval-windows", default=6, show_default=True, type=click.IntRange(min=1), help="Windows of it.")
@click.option("--eval-length", default=512, show_default=True, type=click.IntRange(min=2), help="Tokens of a window.")
@click.option("--no-evaluate", is_flag=True, help="Skip the comparison with Hugging Face on text, and so the gate.")
@click.option(
    "--dry-run", is_flag=True, help="Print the memory arithmetic and stop; takes nothing that only a build does."
)
@click.option("--dump", type=click.Path(path_type=Path), help="Write the graph after each pass into this folder.")
@click.option("--stop-after", metavar="PASS", help="With --dump: stop after this pass; no plan is written.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the build report (with times) as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, or with --dry-run the arithmetic, as JSON.")
def command(
    model: Path,
    fp8: bool,
    int8: bool,
    int4: bool,
    dtype: str | None,
    dry_run: bool,
    report: Path | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Compile a checkpoint into one plan, pinned to the checkpoint's hashes.

    A plan that is this build already is left as it is. Exit codes: 0 built or unchanged, 1 a defect of llmc, 2 usage, 3
    checkpoint refused, 4 model unsupported, 5 gate failed (nothing is published), 6 environment (compiler, disk,
    memory, ISA), 130 interrupted.
    """
    from llmc.artifacts.errors import GateError, UsageError

    precision = chosen_precision({"fp8": fp8, "int8": int8, "int4": int4, "dtype": dtype})
    require_build_libraries()
    from llmc import flow

    if dry_run:
        _refuse_beside("--dry-run", _OF_DRY_RUN)
        shape = {name: rest[name] for name in ("tp", "profile", "target", "kv_dtype", "lm_head_dtype")}
        _print_memory(flow.plan_memory(model, precision=precision, **shape), as_json)
        return
    from llmc.artifacts.files import require_writable, write_file
    from llmc.cli.progress import make_progress

    stop_after = rest.pop("stop_after")
    if stop_after is not None:
        if rest["dump"] is None:
            raise UsageError(f"--stop-after {stop_after} needs --dump DIR, where it writes what the passes made")
        _refuse_beside("--stop-after", _OF_STOP_AFTER)
        kept = {name: rest[name] for name in _OF_STOP_AFTER & rest.keys()}
        with make_progress() as progress:
            flow.dump_passes(model, stop_after=stop_after, precision=precision, progress=progress, **kept)
        return
    if report is not None:
        require_writable(report, "--report")
    evaluate, cache = not rest.pop("no_evaluate"), not rest.pop("no_cache")
    refusal: GateError | None = None
    with make_progress() as progress:
        try:
            result = flow.build(model, precision=precision, evaluate=evaluate, cache=cache, progress=progress, **rest)
        except GateError as error:
            refusal, result = error, cast("BuildReport", error.report)
    text = json.dumps(dataclasses.asdict(result), indent=2, default=str)
    if report is not None:
        write_file(report, f"{text}\n".encode(), "--report")
    if as_json:
        click.echo(text)
    else:
        _print_report(result)
    if refusal is not None:
        raise refusal


def chosen_precision(given: dict[str, str | bool | None]) -> str | None:
    """The one that is asked for, None for none. One on the command line wins over another of a config. Raises
    UsageError for several.
    """
    from llmc.artifacts.errors import UsageError

    context = click.get_current_context()
    asked = {name: value for name, value in given.items() if value}
    typed = [name for name in asked if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if typed:
        asked = {name: asked[name] for name in typed}
    if len(asked) > 1:
        words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in asked.items()]
        raise UsageError(f"{' and '.join(words)} exclude one another: each says how weights are stored; drop one")
    return next((name if value is True else str(value) for name, value in asked.items()), None)


def _refuse_beside(option: str, allowed: frozenset[str]) -> None:
    """Raises UsageError for an option that was given and that does nothing beside `option`."""
    from llmc.artifacts.errors import UsageError

    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name not in allowed:
            raise UsageError(f"{option} does not do what {parameter.opts[-1]} is for; drop one of them")


def require_build_libraries() -> None:
    """Raises EnvironmentFault with what to install where compiling or the peer of a benchmark could not run."""
    import importlib.util

    from llmc.artifacts.errors import EnvironmentFault

    missing = [
        name for name in ("torch", "transformers", "safetensors", "gguf") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise EnvironmentFault(
            f"building needs {', '.join(missing)}, which this environment lacks: pip install 'llmc[build]'. "
            f"Serving a plan does not need them"
        )


def _print_memory(memory: MemoryPlan, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(memory), indent=2))
        return
    for line in memory.lines():
        click.echo(line)


def _print_report(report: BuildReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in report.rows():
        table.add_row(name, value)
    Console().print(table)
