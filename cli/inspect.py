"""`llmc inspect`: what is in a plan, read from its manifest; loads no code and needs no PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmc.artifacts.plan import Plan


@click.command(name="inspect")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest and the build's report as JSON.")
@click.option("--graph", is_flag=True, help="Print the compiled graph of each rank.")
@click.option("--command", "as_command", is_flag=True, help="Print the `llmc build` command that makes the same bytes.")
@click.option("--config", "as_config", is_flag=True, help="Print the same as a file for `llmc build --config`.")
@click.option("--kernels", is_flag=True, help="Print what became of each kernel of a GPU: registers, memory, spilling.")
@click.option("--rank", type=int, help="With --graph: this rank only.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with everything to this file.")
@click.option("--dump", type=click.Path(path_type=Path), help="With --html: what --dump wrote in the same build.")
def command(
    plan: Path,
    as_json: bool,
    graph: bool,
    as_command: bool,
    as_config: bool,
    kernels: bool,
    rank: int | None,
    html: Path | None,
    dump: Path | None,
) -> None:
    """Show what PLAN is made of and pinned to."""
    from llmc.artifacts.errors import UsageError
    from llmc.artifacts.plan import Plan

    forms = {
        "--json": as_json, "--graph": graph, "--command": as_command, "--config": as_config, "--kernels": kernels,
        "--html": html,
    }  # fmt: skip
    if len(chosen := [name for name, given in forms.items() if given]) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude one another: each prints a text of its own")
    if rank is not None and not graph:
        raise UsageError(f"--rank {rank} needs --graph")
    if dump is not None and html is None:
        raise UsageError(f"--dump {dump} needs --html")
    opened = Plan.open(plan, verify=False)
    if html is not None:
        _write_page(opened, html, dump)
    elif graph:
        _print_graphs(opened, rank)
    elif as_json:
        _print_json(opened)
    elif kernels:
        _print_kernels(opened)
    elif as_command or as_config:
        from llmc.cli import reproduce

        click.echo((reproduce.command if as_command else reproduce.config)(opened), nl=False)
    else:
        _print_summary(opened)


def _write_page(plan: Plan, path: Path, dump: Path | None) -> None:
    from llmc.artifacts.files import require_writable, write_file
    from llmc.builder.page.render import render

    require_writable(path, "--html")
    write_file(path, render(plan, dump).encode(), "--html")


def _print_graphs(plan: Plan, rank: int | None) -> None:
    from llmc.artifacts.errors import UsageError

    ranks = plan.manifest.ranks
    if rank is not None and not 0 <= rank < len(ranks):
        raise UsageError(f"--rank {rank}: the plan has ranks 0 to {len(ranks) - 1}")
    for program in ranks if rank is None else (ranks[rank],):
        click.echo(bytes(plan.section(program.graph)).decode(), nl=False)


def _print_json(plan: Plan) -> None:
    from llmc.artifacts.plan import encode_manifest

    out = {"digest": plan.digest, "manifest": json.loads(encode_manifest(plan.manifest))}
    if "report.json" in plan:
        out["report"] = json.loads(bytes(plan.section("report.json")))
    click.echo(json.dumps(out, indent=2))


def _print_kernels(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from llmc.artifacts.cuda_program import decode_program
    from llmc.artifacts.errors import UsageError
    from llmc.builder.cuda.report import kernel_reports

    target = plan.manifest.target
    if target.kind != "cuda":
        raise UsageError(f"--kernels: {plan.path} is for {target.kind}:{target.isa}; only plans for cuda have cubins")
    sections = [rank.code for rank in plan.manifest.ranks]
    programs = [decode_program(plan.section(name), f"{plan.path}: {name}") for name in sections]
    reports = kernel_reports(programs, lambda name: bytes(plan.section(name)))
    table = Table("kernel", "launches", "threads", "registers", "shared B", "stack B", "tensor cores", "for", box=None)
    for r in reports:
        cores = r.tensor_cores
        used = "not known" if cores is None else ", ".join(f"{name} x{n}" for name, n in cores.items()) or "none"
        numbers = (r.launches, r.threads, r.registers, r.shared, r.stack)
        table.add_row(r.entry, *map(str, numbers), used, ", ".join(r.operators))
    console = Console()
    console.print(table)
    if any(r.tensor_cores is None for r in reports):
        console.print("tensor cores are not known without nvdisasm: pip install 'llmc[cuda-build]' brings it")


def _print_summary(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    facts = Table(show_header=False, box=None, title=str(plan.path), title_justify="left")
    for name, value in _facts(plan):
        facts.add_row(name, value)
    console.print(facts)
    passes = Table("pass", "matched", "nodes", "notes", box=None, title="passes", title_justify="left")
    for report in plan.manifest.build.passes:
        nodes = f"{report.nodes_before} -> {report.nodes_after}"
        passes.add_row(report.name, str(report.matched), nodes, "; ".join(report.notes))
    console.print(passes)
    sections = Table("section", "bytes", "blake3", box=None, title="sections", title_justify="left")
    for section in plan.manifest.sections:
        sections.add_row(section.name, f"{section.size:,}", section.blake3[:16])
    console.print(sections)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    from collections import Counter

    from llmc.cli.reproduce import tactics

    m = plan.manifest
    ranges = ", ".join(f"{r.min}-{r.max}" for r in m.profile.token_ranges)
    scales = f" (scales: {m.build.config['kv_scales']})" if "kv_scales" in m.build.config else ""
    rows = [
        ("digest", plan.digest),
        ("model", f"{m.model.name} ({m.model.architecture}, {m.model.num_parameters / 1e6:.1f} M parameters)"),
        ("checkpoint", f"{m.checkpoint.digest} ({m.checkpoint.format}, {len(m.checkpoint.files)} files)"),
        ("target", f"{m.target.kind}:{m.target.isa} ({', '.join(m.target.features)}){_driver(m.target.driver)}"),
        ("precision", f"{m.build.precision}, KV cache {m.build.kv_dtype}{scales}, tp {m.build.tp}"),
        ("profile", f"{m.profile.name}: steps of {ranges} tokens, {m.profile.max_num_seqs} sequences"),
        ("max_seq_len", f"{m.profile.max_seq_len} (outside: {m.profile.outside}), blocks of {m.profile.block_size}"),
        (
            "launches",
            f"{m.build.launches_eager_per_layer:.1f} a layer as traced, {m.ranks[0].launches_per_layer:.1f} compiled",
        ),
        (
            "shared",
            f"{m.shared_bytes / 1e6:.1f} MB of weights for all ranks, {m.comm_bytes / 1e6:.1f} MB between ranks",
        ),
        ("compiler", f"{m.build.compiler}; {m.build.toolchain}"),
    ]
    if (used := tactics(plan)) is not None:
        rows.append(("tactics", used))
    if m.state_slot_bytes:
        kinds = Counter(layer.kind for layer in m.ranks[0].state_layers)
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        rows.append(("states", f"{m.state_slot_bytes:,} B a sequence ({what})"))
        rows.append(("prefix cache", "off: blocks do not hold the states behind a prefix"))
    if "quality.json" in plan:
        rows.append(("quality", _quality(json.loads(bytes(plan.section("quality.json"))))))
    for r in m.ranks:
        kv = r.kv_block_bytes / m.profile.block_size
        text = (
            f"{r.weights_bytes / 1e6:.1f} MB of weights, {r.arena_bytes / 1e6:.1f} MB arena, {kv:,.0f} B of KV a token"
        )
        rows.append((f"rank {r.rank}", text))
    return rows


def _driver(version: int) -> str:
    """What a GPU's driver must be, as cuDriverGetVersion counts; nothing for a CPU's target."""
    return f", driver of CUDA {version // 1000}.{version % 1000 // 10} or later" if version else ""


def _quality(figures: dict[str, Any]) -> str:
    """The gate's figures and verdict in one line."""
    judged = f"gate {figures.get('gate', 'off')}: {figures.get('verdict', 'not judged')}"
    if "perplexity" not in figures:
        return f"{figures['run']}; {judged}"
    return (
        f"perplexity {figures['perplexity']} ({float(figures['perplexity_change']):+.2%} of Hugging Face at fp32), "
        f"KL {figures['kl']}, top-1 {figures['top1']}, cosine {figures['cosine_p5']} (5th percentile), "
        f"greedy {figures['greedy']}; {judged}"
    )
