"""Times plans and peers in turn, several times over, and writes a table.

    python -m tests.perf.peers build/smollm2-fp8.plan build/smollm2-bf16.plan \
        --against llama.cpp=build/model/SmolLM2-135M-Instruct.Q8_0.gguf --out build/bench.md [--into FILE]

All systems hold their models at once and take turns at every work, so that a busy moment meets all of them. Rates are
medians with the least and the most; a ratio is to the best peer at that work. With `--into` the table also replaces
what stands in FILE between the lines `<!-- bench -->` and `<!-- end of bench -->`, or another mark.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from llmc.artifacts.machine import usable_cpus
from llmc.artifacts.plan import Plan
from llmc.bench.engine import EngineSystem, engine
from llmc.bench.machine import Limits, Rates, cpu_name
from llmc.bench.peer import PeerSystem, parse_peer, peer
from llmc.bench.roofline import Bound, Costs, bound
from llmc.bench.work import Timing, Work, measure, works


def table(
    plans: Sequence[EngineSystem],
    peers: Sequence[PeerSystem],
    timings: Sequence[Timing],
    costs: Mapping[str, Costs],
    limits: Mapping[str, Rates],
    repeats: int,
) -> str:
    """Markdown: a row a work, a column a system, for each plan its share of the bound and its ratio. `costs` by the
    plans' names, `limits` by their levels of instructions.
    """
    by_key = {(timing.system, timing.work): timing for timing in timings}
    chosen = list(dict.fromkeys(timing.work for timing in timings))
    bounds: dict[str, dict[Work, Bound]] = {}
    for system in plans:
        bounds[system.name] = {work: bound(costs[system.name].of(work), limits[level(system)]) for work in chosen}
    head = ["tokens a second"]
    for system in plans:
        head += [system.name, "of its bound", *(["to the best peer"] if peers else [])]
    head += [system.name for system in peers]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for work in chosen:
        row = [work.name]
        best = min((by_key[system.name, work].median for system in peers), default=None)
        for system in plans:
            timing = by_key[system.name, work]
            row += [_rate(timing), f"{bounds[system.name][work].share(timing.median):.0%}"]
            row += [f"{best / timing.median:.2f}x"] if best is not None else []
        rows.append(row + [_rate(by_key[system.name, work]) for system in peers])
    systems = [*plans, *peers]
    loads = ", ".join(f"{system.name} {system.load:.2f} s" for system in systems)
    memory = "; ".join(f"{system.name} {system.memory()} ({system.processes})" for system in systems)
    rates = "; ".join(
        f"{isa}: {found.threads} threads, reads {found.reads / 1e9:.1f} GB/s, multiply-adds {found.multiplies}"
        for isa, found in limits.items()
    )
    lines = [
        f"{cpu_name()}, {rates}, in the same run; medians of {repeats} (least to most).",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"To the first token: {loads}. Memory: {memory}.",
    ]
    return "\n".join(lines) + "\n"


def level(system: EngineSystem) -> str:
    """The instructions that the plan is made of, which its limits are measured with."""
    return system.plan.manifest.target.isa


def _limits(
    plan: EngineSystem, plans: Sequence[EngineSystem], costs: Mapping[str, Costs], timed: Sequence[Work]
) -> Limits:
    """Of a plan's level, in all that the plans of this level multiply with."""
    alike = [costs[other.name] for other in plans if level(other) == level(plan)]
    return Limits(plan.library, usable_cpus(), sorted({kind for cost in alike for kind in cost.products(timed)}))


def _rate(timing: Timing) -> str:
    median, least, most = timing.rate
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def replaced(file: Path, mark: str, text: str) -> str:
    """The file with the text between the marks; raises ValueError where they are missing."""
    first, last = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, begin, rest = file.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{file} has no lines {first.strip()} and {last.strip()}")
    return f"{before}{first}{text}{last}{after}"


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--against", action="append", default=[], metavar="KIND=PATH")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--no-mmap", action="store_true", help="copy the plans' weights, as `llmc serve --no-mmap`")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--into", type=Path, help="write the table between <!-- MARK --> and <!-- end of MARK -->")
    parser.add_argument("--mark", default="bench")
    options = parser.parse_args()
    if options.into is not None:
        replaced(options.into, options.mark, "")  # minutes would be lost over marks that are missing
    chosen_peers = [parse_peer(text, None) for text in options.against]
    profiles = [Plan.open(path).manifest.profile for path in options.plans]
    longest = min(profile.max_seq_len for profile in profiles) - options.steps
    most = min(profile.max_num_seqs for profile in profiles)
    timed = works(options.batch, options.context, options.prefill, most, longest)
    with ExitStack() as stack:
        plans = [
            stack.enter_context(engine(path, timed, options.steps, mmap=not options.no_mmap)) for path in options.plans
        ]
        peers = [stack.enter_context(peer(kind, path, usable_cpus())) for kind, path in chosen_peers]
        costs = {plan.name: Costs(plan.plan) for plan in plans}
        limits = {level(plan): _limits(plan, plans, costs, timed) for plan in plans}

        def measure_limits() -> None:
            for own in limits.values():
                own.measure()

        timings = measure([*plans, *peers], timed, options.repeats, options.steps, measure_limits)
        rates = {isa: own.all for isa, own in limits.items()}
        text = table(plans, peers, timings, costs, rates, options.repeats)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    if options.into is not None:
        options.into.write_text(replaced(options.into, options.mark, text))


if __name__ == "__main__":
    main()
