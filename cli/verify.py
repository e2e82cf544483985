"""`llmc verify`: a plan against its hashes, its checkpoint, a lock, and (with --run) its own golden answers."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="verify")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint to compare file by file.")
@click.option("--lock", type=click.Path(path_type=Path), help="Lock file that pins the plan.")
@click.option("--run", "run_", is_flag=True, help="Load the engine and answer the golden prompts again.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(plan: Path, model: Path | None, lock: Path | None, run_: bool, as_json: bool) -> None:
    """Check PLAN: section hashes, checkpoint, lock; name everything that differs. Exit code 3 if anything does."""
    import dataclasses
    import json

    from llmc.artifacts.errors import PlanError
    from llmc.artifacts.verify import verify_plan

    findings = verify_plan(plan, model, lock)
    if run_ and all(f.ok for f in findings):
        from llmc.runtime.selftest import check_golden

        findings += check_golden(plan)
    bad = [f for f in findings if not f.ok]
    if as_json:
        click.echo(json.dumps({"ok": not bad, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.subject}: {finding.detail}")
    if bad:
        raise PlanError(f"{plan}: {len(bad)} of {len(findings)} checks failed: {', '.join(f.subject for f in bad)}")
