"""`llmc tune`: which tactics suit this machine, as a file for `llmc build --tactics`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llmc.cli.build import PRECISIONS
from llmc.cli.target import TargetName

#: What a plan says itself.
_OF_PLAN = ("fp8", "int8", "int4", "dtype", "tp", "target")


@click.command(name="tune")
@click.argument("plan", required=False, type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Hugging Face folder, or a GGUF file.")
@click.option("--fp8", is_flag=True, help="As in `llmc build`, for which the tactics are.")
@click.option("--int8", is_flag=True, help="As in `llmc build`.")
@click.option("--int4", is_flag=True, help="As in `llmc build`.")
@click.option("--dtype", type=click.Choice(PRECISIONS), help="As in `llmc build`.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="As in `llmc build`.")
@click.option("--profile", help="As in `llmc build`.  [default: PLAN's, or chat]")
@click.option("--target", default="cpu", show_default=True, type=TargetName(), help="As in `llmc build`.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(min=1), help="Of each pair of timings.")
@click.option("-o", "--output", default="tactics.yaml", show_default=True, type=click.Path(path_type=Path))
@click.pass_context
def command(
    context: click.Context,
    plan: Path | None,
    model: Path,
    fp8: bool,
    int8: bool,
    int4: bool,
    dtype: str | None,
    tp: int,
    profile: str | None,
    target: str,
    repeats: int,
    output: Path,
) -> None:
    """Time a model's kernels with every tactic in turn, and write the best to a file.

    With PLAN, for builds like that one: its precision, tp, target and profile, and the checkpoint that it is pinned to.

    Tactics change speed, never a result on a CPU, and on a GPU no more than roundings. Each value takes a build without
    the gate, and a few seconds of timing; a busy machine finds nothing. Kernels for a GPU are timed on such a GPU.
    """
    from llmc.artifacts.errors import UsageError
    from llmc.cli.build import require_build_libraries

    asked = {"fp8": fp8, "int8": int8, "int4": int4, dtype or "": bool(dtype)}
    chosen = [name for name, given in asked.items() if given]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude one another: one of --fp8, --int8, --int4, --dtype at most")
    shape: dict[str, Any] = {"precision": next(iter(chosen), None), "tp": tp}
    if plan is not None:
        if given := [name for name in _OF_PLAN if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]:
            raise UsageError(f"--{given[0]} and PLAN exclude one another: {plan} says it itself; leave one of them out")
        shape = _of_plan(plan, model)
    require_build_libraries()
    from llmc.artifacts.files import require_writable, write_file
    from llmc.tune import Trial, tune

    require_writable(output)

    def tell(trial: Trial, taken: bool) -> None:
        steps = ", ".join(f"{tokens}: {ratio:.2f}x" for tokens, ratio in trial.ratios.items())
        verdict = "taken" if taken else "left"
        click.echo(f"{trial.key} {trial.value}: {trial.gain:.3f}x, {verdict} (by tokens of a step {steps})", err=True)

    shape["profile"] = profile or shape.get("profile", "chat")
    best = tune(model, str(shape.pop("target", target)), shape, repeats, tell)
    write_file(output, best.encode())
    click.echo(f"{output}: {best.strip().replace(chr(10), ', ')}")


def _of_plan(path: Path, model: Path) -> dict[str, Any]:
    """Options of builds like a plan of this checkpoint, as `llmc.flow.build` takes them: a profile that was a file is
    one of that name in the current folder. Raises LlmcError for another checkpoint.
    """
    from llmc.artifacts.verify import require_verified
    from llmc.cli.reproduce import options

    plan = require_verified(path, model, sections=False)
    said = options(plan)
    names = ("fp8_activations", "fp8_budget", "lm_head_dtype", "profile", "target", "tp")
    shape = {name: said.get(name.replace("_", "-")) for name in names}
    return {**shape, "precision": plan.manifest.build.precision, "kv_dtype": said.get("kv-cache-dtype")}
