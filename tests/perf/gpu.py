"""Times a plan of a real shape on this machine's GPU beside its roofline, in ten minutes and without a network.

    python -m tests.perf.gpu [--layers 32] [--folder DIR] [--gpu NAME] [--out build/gpu.json]

The shape is Llama-3.1-8B's, the weights random, FP8 by channel with inputs by token; bf16 where a GPU has no FP8.
Decodes are timed as replayed graphs and launched one by one; a prefill's seconds are the time to a first token. The
roofline is `llmc estimate`'s, of the description whose device the driver names, or which --gpu names.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.errors import EnvironmentFault, LlmcError, UsageError
from llmc.bench.work import Timing, Work, measure
from llmc.builder.capacity.estimate import Estimate, decode_row, prefill_row
from llmc.builder.cuda.variant import FP8_SM
from llmc.profiles import gpu_names, gpu_of_device, load_gpu
from llmc.runtime.cuda.gpus import survey

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
WORKS = (
    *(Work("decode", batch, 1024) for batch in (1, 2, 4, 8, 16, 32, 64)),
    *(Work("prefill", 1, tokens) for tokens in (128, 512, 2048)),
)
STEPS, REPEATS = 16, 3


@dataclass(frozen=True)
class Row:
    """Seconds of one run: as graphs, launched one by one, and at least. `share` of the roofline, `tokens_per_second` of
    all sequences, with graphs.
    """

    work: str
    seconds: float
    launched_seconds: float
    bound_seconds: float
    bound_by: str
    tokens_per_second: float

    @property
    def share(self) -> float:
        """How much of the roofline is reached."""
        return self.bound_seconds / self.seconds


def rows(timings: Sequence[Timing], launched: Sequence[Timing], roofline: Estimate) -> list[Row]:
    """A row for each work, which both have in the same order."""
    made = []
    for graphs, plain in zip(timings, launched, strict=True):
        work = graphs.work
        if work.kind == "decode":
            bound = decode_row(roofline.model, roofline.gpu, work.batch, work.context + 1)
        else:
            bound = prefill_row(roofline.model, roofline.gpu, work.context)
        rate, _, _ = graphs.rate
        made.append(Row(work.name, graphs.median, plain.median, bound.seconds, bound.bound.by, rate))
    return made


def shares(nodes: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """Operator -> its part of a step's seconds, the largest first. `nodes`: what each launch is for, operator first."""
    total: Counter[str] = Counter()
    for node, taken in zip(nodes, seconds, strict=False):  # a step with fewer launches leaves the rest at 0
        total[node.split()[0]] += taken
    whole = sum(total.values())
    return {op: taken / whole for op, taken in total.most_common()} if whole else {}


def table(here: Machine, made: Sequence[Row], kernels: dict[str, float]) -> str:
    """For people, in Markdown."""
    lines = [
        f"{here}",
        "",
        "| work | graphs | launches | roofline | share | bound by | tokens/s |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in made:
        times = " | ".join(f"{1e3 * s:.2f} ms" for s in (row.seconds, row.launched_seconds, row.bound_seconds))
        lines.append(f"| {row.work} | {times} | {row.share:.0%} | {row.bound_by} | {row.tokens_per_second:,.0f} |")
    return "\n".join([*lines, "", "kernels: " + ", ".join(f"{op} {part:.0%}" for op, part in kernels.items())])


@dataclass(frozen=True)
class Machine:
    """What was timed: the device and driver as they call themselves, and whose figures the roofline stands on."""

    device: str
    driver: str
    target: str
    description: str
    precision: str

    def __str__(self) -> str:
        return (
            f"{self.device} ({self.target}, driver of CUDA {self.driver}), {self.precision}; roofline of "
            f"profiles/gpus/{self.description}.yaml"
        )


def machine(gpu: str | None) -> Machine:
    """GPU 0 of this machine; `gpu`: the description to take, None: the device's own. Raises LlmcError."""
    found = survey()
    if not found.gpus:
        raise EnvironmentFault("the driver shows no GPU: see CUDA_VISIBLE_DEVICES")
    first = found.gpus[0]
    described = gpu or gpu_of_device(first.name)
    if described is None:
        raise UsageError(
            f"profiles/gpus has no description of {first.name!r}, so its roofline is not known: name the one whose "
            f"memory and rates it has, with --gpu: {', '.join(gpu_names())}"
        )
    load_gpu(described)
    precision = "fp8" if first.sm >= FP8_SM else "bf16"
    driver = f"{found.driver // 1000}.{found.driver % 1000 // 10}"
    return Machine(first.name, driver, f"cuda:sm_{first.sm}", described, precision)


def run(
    folder: Path, here: Machine, config: dict[str, Any], works: Sequence[Work], tell: Callable[[str], None]
) -> tuple[list[Row], dict[str, float]]:
    """Makes the checkpoint of a Llama's config, builds it for the GPU at hand and times it. Nothing is fetched. Raises
    LlmcError.
    """
    from llmc import build
    from llmc.artifacts.cuda_program import decode_program
    from llmc.artifacts.plan import Plan
    from llmc.bench.engine import engine
    from llmc.estimate import estimate_model
    from tests.perf.synthetic import make_checkpoint

    tell(str(here))
    fp8 = here.precision == "fp8"
    began = time.perf_counter()
    model = make_checkpoint(folder / "model", config, fp8=fp8, dynamic=fp8)
    tell(f"checkpoint written in {time.perf_counter() - began:.0f} s")
    # The estimate traces the model, and the build finds the trace. Nothing is computed by Hugging Face.
    roofline = estimate_model(model, here.target, gpu=here.description, precision=here.precision)
    plan = folder / "engine.plan"
    report = build(model, plan, target=here.target, precision=here.precision, self_test=False)
    seconds = ", ".join(f"{stage} {taken:.0f}" for stage, taken in report.seconds.items() if taken >= 1)
    tell(f"built in {sum(report.seconds.values()):.0f} s ({seconds}), {report.plan_bytes / 1e9:.1f} GB")
    timings = {}
    for timed in (False, True):
        with engine(plan, works, STEPS, timed=timed) as system:
            timings[timed] = measure([system], works, REPEATS, STEPS, lambda: None)
            if timed:
                system.run(works[0], 1)
                taken = system.launch_seconds()[0]
    opened = Plan.open(plan, verify=False)
    program = decode_program(opened.section(opened.manifest.ranks[0].code), str(plan))
    decode = next(steps for steps in program.steps if steps.decode)
    return rows(timings[False], timings[True], roofline), shares([launch.node for launch in decode.launches], taken)


def main() -> int:
    """Prints the table; the exit code is an LlmcError's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where checkpoint and plan go (17 GB); default: a temporary folder")
    parser.add_argument("--gpu", help="whose figures to take, as in `llmc estimate --gpu`; default: the device's")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"))
    options = parser.parse_args()
    config = {**LLAMA_8B, "num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        try:
            here = machine(options.gpu)
            made, kernels = run(Path(folder), here, config, WORKS, lambda line: print(line, file=sys.stderr))
        except LlmcError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    data = [{**asdict(row), "share": row.share} for row in made]
    found = {"machine": asdict(here), "layers": options.layers, "works": data, "kernels": kernels}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(table(here, made, kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
