"""The estimate of a model on a GPU: memory, concurrency, roofline times, request rates, and what compiling wins.

Comes in: `ModelFacts`, a `Gpu`, a `Workload`. Goes out: `Estimate`. Must not know: files, how it is printed.

All times are least times and all rates most rates: a real engine comes near them, and never beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from llmc.artifacts.errors import UsageError
from llmc.builder.capacity.kv import give_kv
from llmc.builder.capacity.model import RankFacts, StepBound, peak, slowest
from llmc.builder.capacity.sheet import Sheet, formatted
from llmc.builder.page.costs import Step, kv_shapes
from llmc.profiles import Gpu


@dataclass(frozen=True)
class ModelFacts:
    """`ranks` in order; `eager_launches`: kernels of one step in PyTorch without compiling; `chunk`: tokens of the
    largest step, `block_size`: tokens of a KV block.
    """

    name: str
    precision: str
    kv_dtype: str
    ranks: tuple[RankFacts, ...]
    eager_launches: int
    chunk: int
    block_size: int


@dataclass(frozen=True)
class Workload:
    """`prompt` and `answer`: tokens of a request; `batches`: sequences of the decodes that are shown (empty: powers of
    two as far as memory goes); `rate`: requests a second, or None. `memory_use`: the part of the GPU's memory that is
    used. Assumptions about compiling: seconds of a build, of a launch from Python, and of one inside a graph.
    """

    prompt: int
    answer: int
    batches: tuple[int, ...] = ()
    rate: float | None = None
    memory_use: float = 0.9
    build_seconds: float = 600.0
    eager_launch: float = 5e-6
    graph_launch: float = 1e-6

    @property
    def context(self) -> int:
        """Tokens that a sequence holds in the end."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Row:
    """A decode step of `size` sequences that hold the whole context, or a prefill of `size` tokens: the bound, and
    `rate` tokens a second of all sequences together.
    """

    size: int
    seconds: float
    rate: float
    bound: StepBound


@dataclass(frozen=True)
class Estimate:
    """`sheet` has every figure but those of the tables."""

    model: ModelFacts
    gpu: Gpu
    workload: Workload
    sheet: Sheet
    decode: tuple[Row, ...]
    prefill: tuple[Row, ...]


def estimate(model: ModelFacts, gpu: Gpu, workload: Workload) -> Estimate:
    """Raises UsageError where the model does not fit the GPU, or the GPU lacks a number format of it."""
    sheet = Sheet()
    _memory(sheet, model, gpu, workload)
    _ceilings(sheet, model, gpu)
    most = int(min(sheet["concurrent_sequences"], 1 << 20))
    batches = workload.batches or _powers(most)
    sizes = sorted({n for n in (128, 512, 2048, 8192, 32768) if n < workload.prompt} | {workload.prompt})
    decode = tuple(decode_row(model, gpu, batch, workload.context) for batch in batches)
    prefill = tuple(prefill_row(model, gpu, size) for size in sizes)
    _requests(sheet, model, gpu, workload, prefill[-1])
    _compiling(sheet, model, gpu, workload)
    return Estimate(model, gpu, workload, sheet, decode, prefill)


def decode_row(model: ModelFacts, gpu: Gpu, batch: int, context: int) -> Row:
    """One step of `batch` sequences whose next token is their number `context`."""
    bound = slowest(model.ranks, Step(batch, batch, context, batch), gpu)
    return Row(batch, bound.seconds, batch / bound.seconds, bound)


def prefill_row(model: ModelFacts, gpu: Gpu, tokens: int) -> Row:
    """One prompt from nothing, in steps as large as the engine takes."""
    ends = [min(start + model.chunk, tokens) for start in range(0, tokens, model.chunk)]
    steps = [Step(end - start, int(end == tokens), end) for start, end in zip([0, *ends], ends, strict=False)]
    bound = reduce(add, (slowest(model.ranks, step, gpu) for step in steps))
    return Row(tokens, bound.seconds, tokens / bound.seconds, bound)


def _powers(most: int) -> tuple[int, ...]:
    powers = [1 << n for n in range(11) if 1 << n <= most]
    return tuple(dict.fromkeys([*powers, min(most, 1024)]))


def _memory(sheet: Sheet, model: ModelFacts, gpu: Gpu, workload: Workload) -> None:
    ranks = model.ranks
    largest = "of the largest rank" if len(ranks) > 1 else "of the one rank"
    sheet.give("memory", gpu.memory, "B", f"of one {gpu.name}")
    sheet.give("memory_use", workload.memory_use, "", "--memory-use; the rest is the driver's and the allocator's")
    sheet.give("weights", sum(rank.weights for rank in ranks), "B", "of all ranks, as they are stored")
    sheet.give("rank_weights", max(rank.weights for rank in ranks), "B", largest)
    sheet.give("activations", max(rank.activations for rank in ranks), "B", f"values of a step of {model.chunk} tokens")
    give_kv(sheet, [kv_shapes(rank.graph) for rank in ranks], model.kv_dtype)
    sheet.give("state", max(rank.state_slot for rank in ranks), "B", "recurrent state of a sequence, of a rank")
    sheet.give("block", model.block_size, "tokens", "of a KV block, from the shape profile")
    sheet.give("context", workload.context, "tokens", "prompt and answer of a sequence")
    pool = sheet.derive(
        "kv_pool", "memory * memory_use - rank_weights - activations", "B", "left for keys, values and states, a rank"
    )
    need = sheet.derive(
        "sequence", "ceil(context / block) * block * rank_kv_token + state", "B", "what a sequence needs of it"
    )
    if pool < need:
        has = formatted(sheet["memory"] * sheet["memory_use"], "B")
        held = formatted(sheet["rank_weights"] + sheet["activations"], "B")
        raise UsageError(
            f"{model.name} at {model.precision} does not fit {gpu.name} on {len(ranks)} rank(s): of {has} usable, "
            f"weights and activations take {held} and a sequence of {workload.context} tokens {formatted(need, 'B')}; "
            "choose a higher --tp, --fp8, a smaller --context, or another --gpu"
        )
    sheet.derive("concurrent_tokens", "floor(kv_pool / rank_kv_token)", "tokens", "that the pool holds at once")
    sheet.derive("concurrent_sequences", "floor(kv_pool / sequence)", "sequences", "of full context at once")


def _ceilings(sheet: Sheet, model: ModelFacts, gpu: Gpu) -> None:
    sheet.give("bandwidth", gpu.bandwidth, "B/s", f"of the memory of {gpu.name}")
    sheet.derive(
        "decode_ceiling", "bandwidth / rank_weights", "tokens/s", "of one sequence, if a token read every weight once"
    )
    busiest = max(model.ranks, key=lambda rank: rank.matrix_bytes)
    terms = []
    for kind, flops in sorted(busiest.token_flops.items()):
        sheet.give(f"token_{kind}", flops, "FLOP", f"multiplications and additions of a token in {kind}")
        sheet.give(f"peak_{kind}", peak(gpu, kind), "FLOP/s", f"of {gpu.name} in {kind}, dense")
        terms.append(f"token_{kind} / peak_{kind}")
    sheet.give("matrices", busiest.matrix_bytes, "B", "that a step multiplies by")
    sheet.derive("token_compute", " + ".join(terms), "s", "multiplying one token by all matrices")
    sheet.derive("weights_read", "matrices / bandwidth", "s", "reading all matrices once")
    sheet.derive(
        "crossover_batch",
        "weights_read / token_compute",
        "sequences",
        "from here on a decode computes longer than it reads",
    )


def _requests(sheet: Sheet, model: ModelFacts, gpu: Gpu, workload: Workload, prompt: Row) -> None:
    batch = int(min(sheet["concurrent_sequences"], 1 << 16))
    sheet.give("answer", workload.answer, "tokens", "that a request is answered with")
    sheet.give("prefill", prompt.seconds, "s", f"of a prompt of {workload.prompt} tokens: the time to a first token")
    sheet.give("in_flight", batch, "requests", "sequences decoding at once, as memory allows")
    sheet.give("step", decode_row(model, gpu, batch, workload.context).seconds, "s", "a decode of all of them")
    sheet.derive("request_time", "prefill + answer * step / in_flight", "s", "of the GPU, for one request")
    sheet.derive("most_rate", "1 / request_time", "requests/s", "that can be served")
    sheet.derive("most_tokens", "most_rate * answer", "tokens/s", "answered, prompts included in the time")
    sheet.derive("latency", "in_flight / most_rate", "s", "of a request then: Little's law, in flight = rate * latency")
    if workload.rate is None:
        return
    sheet.give("rate", workload.rate, "requests/s", "--rate")
    sheet.derive("replicas", "ceil(rate / most_rate)", "replicas", "engines that such a rate takes")
    sheet.derive("replica_rate", "rate / replicas", "requests/s", "of one of them")
    needed = _least_batch(model, gpu, workload, prompt.seconds, sheet["replica_rate"], batch)
    sheet.give("needed_in_flight", needed, "requests", "the fewest at once that keep up with that rate")
    sheet.derive("needed_latency", "needed_in_flight / replica_rate", "s", "of a request then: Little's law")


def _least_batch(model: ModelFacts, gpu: Gpu, workload: Workload, prefill: float, rate: float, most: int) -> int:
    """By bisection: the more sequences decode at once, the less of the GPU's time a request takes."""
    low, high = 1, most
    while low < high:
        batch = (low + high) // 2
        step = decode_row(model, gpu, batch, workload.context).seconds
        if prefill + workload.answer * step / batch <= 1 / rate:
            high = batch
        else:
            low = batch + 1
    return low


def _compiling(sheet: Sheet, model: ModelFacts, gpu: Gpu, workload: Workload) -> None:
    single = decode_row(model, gpu, 1, workload.context).seconds
    launches: Sequence[int] = [rank.launches for rank in model.ranks]
    sheet.give("single_step", single, "s", "a decode of one sequence")
    sheet.give("eager_launches", model.eager_launches, "", "kernels of a step in PyTorch without compiling")
    sheet.give("launches", max(launches), "", "kernels of a compiled step")
    sheet.give("eager_launch", workload.eager_launch, "s", "assumed: one launch from Python (--eager-launch-us)")
    sheet.give("graph_launch", workload.graph_launch, "s", "assumed: one launch inside a graph (--graph-launch-us)")
    sheet.give("build", workload.build_seconds, "s", "assumed: a build (--build-minutes)")
    sheet.derive("eager_step", "max(single_step, eager_launches * eager_launch)", "s", "launches hide behind the GPU")
    sheet.derive("compiled_step", "single_step + launches * graph_launch", "s", "kernels follow one another")
    sheet.derive("saved", "max(eager_step - compiled_step, 0)", "s", "by compiling, a step")
    sheet.derive("break_even", "build / saved", "steps", "after which the build has paid for itself")
    sheet.derive("break_even_time", "break_even * compiled_step", "s", "of decoding")
