"""From the traced graph to one fused graph per rank: the list of passes, in the order in which they run.

Comes in: a traced `Graph`, `CompileOptions`. Goes out: `Compiled`, or stage by stage what each pass made. Must not
know: targets, files, tracing.

Order. Quantizing comes early, while every linear still has the module path that the calibration table names it by.
Latent attention is absorbed before that, because its matrices are no layers of their own afterwards.
Packed projections are split before attention and sharding look for heads. Norms, rotation and attention take their
final form before sharding, so that sharding sees whole operators instead of their primitives. Merging comes after
sharding: a rank joins the slices that it owns. Epilogues and residuals need merged linears and final norms; what no
pattern has claimed by then becomes generic elementwise code and copies. The second list runs once for each rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from llmc.artifacts.calibration import ACTIVATIONS, LM_HEAD_DTYPES, OWN_HEAD, CalibrationTable
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import KVScales
from llmc.builder.checkpoint.source import Quantization
from llmc.builder.ir import Graph
from llmc.builder.passes.absorb_latent import absorb_latent
from llmc.builder.passes.canonicalize import canonicalize
from llmc.builder.passes.check_lowerable import check_lowerable
from llmc.builder.passes.choose_experts import choose_experts
from llmc.builder.passes.fold_activations import fold_activations
from llmc.builder.passes.fold_factors import fold_factors
from llmc.builder.passes.fold_positions import fold_positions
from llmc.builder.passes.fold_weights import fold_weights
from llmc.builder.passes.fuse_activation import fuse_activation
from llmc.builder.passes.fuse_attention import fuse_attention
from llmc.builder.passes.fuse_experts import fuse_experts
from llmc.builder.passes.fuse_latent_cache import fuse_latent_cache
from llmc.builder.passes.fuse_pointwise import fuse_pointwise
from llmc.builder.passes.fuse_qk_norm import fuse_qk_norm
from llmc.builder.passes.fuse_quantize import fuse_quantize
from llmc.builder.passes.fuse_residual_norm import fuse_residual_norm
from llmc.builder.passes.fuse_rms_norm import fuse_rms_norm
from llmc.builder.passes.fuse_rotary import fuse_rotary
from llmc.builder.passes.fuse_rows import fuse_rows
from llmc.builder.passes.insert_copies import insert_copies
from llmc.builder.passes.merge_linears import merge_gate_up, merge_latent, merge_qkv
from llmc.builder.passes.quantize import Precision, quantize
from llmc.builder.passes.shard import shard
from llmc.builder.passes.simplify_views import simplify_views
from llmc.builder.passes.split_packed import split_packed
from llmc.builder.passes.split_quantize import split_quantize
from llmc.builder.passes.views import Launches, count_launches
from llmc.plugins.cpu.blocks import KV_TYPES

PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4")

#: A graph in; out comes a graph (or one for each rank) and what was done.
Pass = Callable[[Graph], tuple[Graph | tuple[Graph, ...], PassReport]]


def all_passes(options: CompileOptions) -> list[Pass]:
    """Every pass in order."""
    return [*whole_passes(options), partial(shard, tp=options.tp), *rank_passes(options)]


def whole_passes(options: CompileOptions) -> list[Pass]:
    """The passes over the whole model, before it is divided."""
    return [
        canonicalize,
        fold_weights,
        fold_positions,
        fuse_experts,
        choose_experts,
        absorb_latent,
        partial(quantize, precision=_precision(options)),
        split_packed,
        fold_activations,
        fuse_rms_norm,
        partial(fuse_attention, scales=options.kv_scales if options.kv_dtype == "f8e4m3" else None),
        simplify_views,
        fuse_latent_cache,
        fuse_qk_norm,
        simplify_views,
        fuse_rotary,
        simplify_views,
        fuse_qk_norm,
        simplify_views,
        fold_factors,
    ]


def _precision(options: CompileOptions) -> Precision:
    return Precision(options.precision, options.table, options.fp8_activations, options.own, options.lm_head_dtype)


def rank_passes(options: CompileOptions) -> list[Pass]:
    """The passes over what is one rank's."""
    return [
        merge_qkv,
        merge_latent,
        merge_gate_up,
        fuse_activation,
        fuse_residual_norm,
        fuse_rows,
        fuse_pointwise,
        *([split_quantize, fuse_quantize] if options.rounds_apart else []),
        insert_copies,
        check_lowerable,
    ]


class Verifier(Protocol):
    """What is told of every pass; `llmc.builder.verify.Verifier` runs both sides and compares."""

    def check(self, name: str, before: Sequence[Graph], after: Sequence[Graph]) -> None:
        """Raises where `after` does not compute what `before` does."""


@dataclass(frozen=True)
class CompileOptions:
    """`precision` fp32|bf16|fp8|int8|int4; `kv_dtype` f32|bf16|f8e4m3 of the cache (None: exact in an fp32 engine, bf16
    otherwise), `kv_scales` what each layer's keys and values are divided by where it is f8e4m3; `table` is the
    calibration and `fp8_activations` token|static|none says what becomes of inputs, `lm_head_dtype` bf16|fp8 of the
    output head; `rounds_apart`: inputs are rounded to FP8 by operators of their own, as cuda targets want it, and not
    inside of products; `own` is what the checkpoint is quantized with itself; `verifier` sees each pass's name and the
    graphs before and after it.
    """

    precision: str = "fp32"
    kv_dtype: str | None = None
    kv_scales: Mapping[int, KVScales] | None = None
    tp: int = 1
    table: CalibrationTable | None = None
    fp8_activations: str = "token"
    own: Quantization | None = None
    lm_head_dtype: str = "bf16"
    rounds_apart: bool = False
    verifier: Verifier | None = None


@dataclass(frozen=True)
class Compiled:
    """One fused graph per rank, what each pass did (rank 0's reports for passes that run per rank), each rank's kernel
    launches in one step, each rank's columns of the vocabulary (first, count), and what the cache holds.
    """

    graphs: tuple[Graph, ...]
    reports: tuple[PassReport, ...]
    launches: tuple[Launches, ...]
    vocab: tuple[tuple[int, int], ...]
    kv_dtype: str


def pass_name(step: Pass) -> str:
    """The name that reports, dumps and the command line have for a pass: its function's."""
    return step.func.__name__ if isinstance(step, partial) else step.__name__


def pass_doc(step: Pass) -> str:
    """What a pass does: the first sentence of its function's docstring."""
    text = " ".join((inspect.getdoc(step.func if isinstance(step, partial) else step) or "").split())
    return re.split(r"(?<=[.;]) ", text, maxsplit=1)[0].rstrip(";.")


def by_name(options: CompileOptions) -> dict[str, Pass]:
    """Each pass once, in the order of first use."""
    return {pass_name(step): step for step in all_passes(options)}


@dataclass(frozen=True)
class Stage:
    """What pass `number` (from 1; 0 is what came in) made: one graph, or after sharding one for each rank; `report` is
    rank 0's. Its `label` (`06-fuse_rms_norm`) names it alone, its `name` also other runs of the same pass.
    """

    number: int
    name: str
    graphs: tuple[Graph, ...]
    report: PassReport | None

    @property
    def label(self) -> str:
        """The name with the number before it, as dumps are sorted."""
        return f"{self.number:02d}-{self.name}"


def apply(step: Pass, graphs: Sequence[Graph]) -> tuple[tuple[Graph, ...], PassReport]:
    """Runs a pass on each graph; the report is the first graph's. Raises UnsupportedError for what the pass refuses."""
    try:
        results = [step(graph) for graph in graphs]
    except ValueError as error:  # GraphError, which names the node, or a recipe that does not fit
        raise UnsupportedError(f"{graphs[0].name}, in pass {pass_name(step)}: {error}") from error
    after = (made if isinstance(made, tuple) else (made,) for made, _ in results)
    return tuple(graph for made in after for graph in made), results[0][1]


def run_passes(graphs: Sequence[Graph], steps: Sequence[Pass], verifier: Verifier | None = None) -> Iterator[Stage]:
    """The graphs as they came in, then what each pass made of them; passes run as they are asked for. Raises
    UsageError, UnsupportedError (what stops it, by name) or the verifier's error.
    """
    stage = Stage(0, "trace", tuple(graphs), None)
    yield stage
    for number, step in enumerate(steps, 1):
        before = stage.graphs
        after, report = apply(step, before)
        if verifier:
            verifier.check(report.name, before, after)
        stage = Stage(number, pass_name(step), after, report)
        yield stage


def stages(graph: Graph, options: CompileOptions, stop_after: str | None = None) -> Iterator[Stage]:
    """`run_passes` with the whole list, or with its first part (see `passes_until`)."""
    check_options(options)
    return run_passes((graph,), passes_until(options, stop_after), options.verifier)


def passes_until(options: CompileOptions, stop_after: str | None) -> list[Pass]:
    """The passes up to `stop_after`: a stage's label, or a name, which means the first pass of that name; None: all.

    Raises UsageError for what is no pass.
    """
    steps = all_passes(options)
    if stop_after is None:
        return steps
    for number, step in enumerate(steps, 1):
        if stop_after in (pass_name(step), f"{number:02d}-{pass_name(step)}"):
            return steps[:number]
    raise UsageError(f"{stop_after!r} is no pass; they are {', '.join(by_name(options))}")


def run(graph: Graph, options: CompileOptions, watch: Callable[[Stage], None] = lambda stage: None) -> Compiled:
    """Runs the whole list and shows every stage to `watch`. Raises what `stages` raises."""
    reports = []
    for stage in stages(graph, options):
        watch(stage)
        reports += [stage.report] if stage.report else []
    graphs = stage.graphs
    kv_dtype = options.kv_dtype or ("f32" if options.precision == "fp32" else "bf16")
    return Compiled(graphs, tuple(reports), tuple(map(count_launches, graphs)), _vocab(graph, graphs), kv_dtype)


def check_options(options: CompileOptions) -> None:
    """Raises UsageError for options that do not exist, with the names of those that do."""
    if options.precision not in PRECISIONS:
        raise UsageError(f"precision {options.precision!r} is not one of {', '.join(PRECISIONS)}")
    if options.fp8_activations not in ACTIVATIONS:
        raise UsageError(f"fp8 activations {options.fp8_activations!r} is not one of {', '.join(ACTIVATIONS)}")
    if options.lm_head_dtype not in (*LM_HEAD_DTYPES, OWN_HEAD):
        raise UsageError(f"lm_head dtype {options.lm_head_dtype!r} is not one of {', '.join(LM_HEAD_DTYPES)}")
    if options.kv_dtype not in (None, *KV_TYPES):
        raise UsageError(f"kv dtype {options.kv_dtype!r} is not one of {', '.join(KV_TYPES)}")
    if options.kv_dtype == "f8e4m3" and options.kv_scales is None:
        raise UsageError("an FP8 cache needs scales of keys and values: a checkpoint's own, or calibrated ones")
    if options.tp < 1:
        raise UsageError(f"tp {options.tp} is less than 1")


def _vocab(traced: Graph, graphs: Sequence[Graph]) -> tuple[tuple[int, int], ...]:
    """The vocabulary columns that each rank returns: its shard, or all of them on every rank."""
    total, *widths = (int(g.types()[g.outputs[0]].shape[-1]) for g in (traced, *graphs))
    if all(width == total for width in widths):
        return ((0, total),) * len(widths)
    return tuple((sum(widths[:rank]), width) for rank, width in enumerate(widths))
