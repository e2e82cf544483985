"""The arithmetic of capacity: published figures, figures by hand, and that what is shown is what was computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmc.artifacts.errors import UsageError
from llmc.builder import pipeline
from llmc.builder.capacity.estimate import ModelFacts, Workload, decode_row, estimate, prefill_row
from llmc.builder.capacity.kv import give_kv
from llmc.builder.capacity.model import rank_facts
from llmc.builder.capacity.sheet import Sheet, formatted
from llmc.builder.page.costs import KvShape, Step
from llmc.builder.trace.tracer import trace_model
from llmc.profiles import Gpu, load_gpu
from tests.models import tiny_config

pytestmark = pytest.mark.timeout(600)
#: Llama-3.1-8B and 70B, as their config.json has them.
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip


def facts(family: str, options: pipeline.CompileOptions, **config: Any) -> ModelFacts:
    traced = trace_model(tiny_config(family, **config))
    compiled = pipeline.run(traced.graph, options)
    ranks = tuple(rank_facts(graph, compiled.kv_dtype, 512, 64) for graph in compiled.graphs)
    return ModelFacts(family, options.precision, compiled.kv_dtype, ranks, traced.eager_launches, 512, 16)


@pytest.fixture(scope="module")
def llama_8b() -> ModelFacts:
    return facts("llama", pipeline.CompileOptions("bf16"), **LLAMA_8B)


@pytest.fixture(scope="module")
def tiny() -> ModelFacts:
    return facts("qwen3", pipeline.CompileOptions("bf16"))


WORK = Workload(3840, 256)
TINY_WORK = Workload(200, 56)


def test_llama_8b_on_h100(llama_8b: ModelFacts) -> None:
    sheet = estimate(llama_8b, load_gpu("h100-sxm"), WORK).sheet
    assert sheet["kv_token"] == 128 * 1024
    assert sheet["weights"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert round(sheet["decode_ceiling"]) == 209  # 3.35 TB/s / 16 GB


def explained(sheet: Sheet, *names: str) -> list[str]:
    return [sheet.quantities[name].explain().partition("  #")[0] for name in names]


def test_bytes_of_a_token_are_a_formula(llama_8b: ModelFacts) -> None:
    sheet = estimate(llama_8b, load_gpu("h100-sxm"), WORK).sheet
    assert sheet["rank_kv_token"] == sheet["kv_token"] == llama_8b.ranks[0].kv_bytes
    assert explained(sheet, "kv_layers", "kv_heads", "kv_width", "kv_item", "kv_token") == [
        "kv_layers = 32 layers", "kv_heads = 8 KV heads", "kv_width = 256 numbers", "kv_item = 2 B",
        "kv_token = kv_layers * kv_heads * kv_width * kv_item = 32 layers * 8 KV heads * 256 numbers * 2 B = 131,072 B",
    ]  # fmt: skip


def test_bytes_of_a_token_by_rank_and_by_kind_of_layer() -> None:
    uneven, sheet = [{0: KvShape(2, 8, 8, False)}, {0: KvShape(1, 8, 8, False)}], Sheet()
    give_kv(sheet, uneven, "bf16")
    assert (sheet["kv_heads"], sheet["kv_token"], sheet["rank_kv_heads"], sheet["rank_kv_token"]) == (3, 96, 2, 64)
    mixed = {0: KvShape(2, 8, 8, False), 1: KvShape(1, 512, 64, True), 2: KvShape(2, 8, 8, False)}
    sheet = Sheet()
    give_kv(sheet, [mixed], "f8e4m3")
    first, second, whole = explained(sheet, "kv_token_1", "kv_token_2", "kv_token")
    assert first.endswith(" = 2 layers * 2 KV heads * 16 numbers * 1 B = 64 B")
    assert second.endswith(" = 1 layers * 1 KV heads * 576 numbers * 1 B = 576 B")
    assert whole == "kv_token = kv_token_1 + kv_token_2 = 64 B + 576 B = 640 B"
    assert sheet.quantities["kv_width_2"].note == "a latent of 512, its rotated part of 64"


def test_crossover_batch_of_a100(llama_8b: ModelFacts) -> None:
    # 312 TFLOP/s / 2.0 TB/s = 156: published figures round the bandwidth of 2,039 GB/s, with which it is 153.
    a100 = load_gpu("a100-sxm-80gb")
    assert estimate(llama_8b, replace(a100, bandwidth=2.0e12), WORK).sheet["crossover_batch"] == pytest.approx(156)
    assert estimate(llama_8b, a100, WORK).sheet["crossover_batch"] == pytest.approx(153.0, abs=0.1)


def test_decodes_change_sides_at_the_crossover(llama_8b: ModelFacts) -> None:
    gpu = load_gpu("h100-sxm")  # 295
    assert [decode_row(llama_8b, gpu, batch, 1).bound.by for batch in (290, 300)] == ["reads", "FLOPs"]


def test_llama_70b_on_four_ranks() -> None:
    model = facts("llama", pipeline.CompileOptions("fp8", tp=4), **LLAMA_70B)
    sheet = estimate(model, load_gpu("h100-sxm"), WORK).sheet
    assert sheet["kv_token"] == 320 * 1024
    assert sheet["rank_kv_token"] == 80 * 1024
    assert sheet["rank_weights"] < 0.3 * sheet["weights"]
    assert decode_row(model, load_gpu("h100-sxm"), 8, 1024).bound.link_seconds > 0


def test_step_by_hand() -> None:
    # One layer of each width 64, its head kept apart: bytes and operations that can be counted on paper.
    model = facts("llama", pipeline.CompileOptions("bf16"), hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                  num_attention_heads=4, num_key_value_heads=2, vocab_size=256, tie_word_embeddings=False)  # fmt: skip
    numbers = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 256 * 64  # qkv, o, mlp, head
    (rank,) = model.ranks
    assert rank.matrix_bytes == 2 * numbers
    assert rank.token_flops == {"bf16": 2 * numbers}
    assert rank.kv_bytes == 2 * 2 * 16 * 2
    gpu = Gpu("slow", 90, 1 << 30, 1e6, 1e15, None, 1.0)
    bound = rank.bound(Step(3, 3, 10, 3), gpu)
    assert bound.kv == 3 * 10 * rank.kv_bytes + 3 * rank.kv_bytes  # read, and the new token's written
    vectors = 4 * (64 * 3 + 8) + 2 * 3 * 64  # three norms, rotary frequencies, three rows of the embedding
    assert bound.weights == 2 * numbers + vectors
    assert bound.seconds == pytest.approx((bound.weights + bound.kv) / 1e6, rel=1e-3)
    assert bound.flops["bf16"] == 3 * 2 * numbers + 4 * 3 * 10 * 4 * 16


def test_prefill_reads_the_weights_once_a_step(tiny: ModelFacts) -> None:
    gpu = load_gpu("h100-sxm")
    one, three = prefill_row(tiny, gpu, 512), prefill_row(tiny, gpu, 1100)
    assert three.bound.weights == pytest.approx(3 * one.bound.weights, rel=0.5)
    assert three.seconds > 2 * one.seconds


def test_littles_law_and_the_rate(tiny: ModelFacts) -> None:
    gpu = load_gpu("h100-sxm")
    free = estimate(tiny, gpu, TINY_WORK).sheet
    assert free["in_flight"] == pytest.approx(free["most_rate"] * free["latency"])
    asked = estimate(tiny, gpu, replace(TINY_WORK, rate=free["most_rate"] * 2.5)).sheet
    assert asked["replicas"] == 3
    needed = int(asked["needed_in_flight"])
    assert asked["needed_latency"] == pytest.approx(needed / asked["replica_rate"])

    def most(batch: int) -> float:
        step = decode_row(tiny, gpu, batch, TINY_WORK.context).seconds
        return 1 / (asked["prefill"] + TINY_WORK.answer * step / batch)

    assert most(needed) >= asked["replica_rate"] > most(needed - 1)


def test_compiling_pays_after_what_a_launch_costs(tiny: ModelFacts) -> None:
    sheet = estimate(tiny, load_gpu("h100-sxm"), replace(TINY_WORK, build_seconds=60, eager_launch=10e-6)).sheet
    eager, compiled = sheet["eager_launches"] * 10e-6, sheet["single_step"] + sheet["launches"] * 1e-6
    assert sheet["break_even"] == pytest.approx(60 / (eager - compiled))
    never = estimate(tiny, load_gpu("h100-sxm"), replace(TINY_WORK, eager_launch=0)).sheet
    assert never["break_even"] == float("inf")


def test_recurrent_states_limit_sequences() -> None:
    model = facts("mamba2", pipeline.CompileOptions("bf16"))
    sheet = estimate(model, load_gpu("l4"), TINY_WORK).sheet
    assert sheet["kv_token"] == 0
    assert sheet["concurrent_tokens"] == float("inf")
    assert sheet["concurrent_sequences"] == sheet["kv_pool"] // sheet["state"]


def test_what_does_not_fit_is_refused_with_the_numbers(llama_8b: ModelFacts) -> None:
    with pytest.raises(UsageError, match=r"does not fit L4 .*of 21\.6 GB usable.* take 16\.11 GB.*--tp"):
        estimate(llama_8b, load_gpu("l4"), Workload(60000, 256))


def test_a_format_that_the_gpu_lacks_is_named() -> None:
    model = facts("llama", pipeline.CompileOptions("fp8"))
    with pytest.raises(UsageError, match=r"A100.*no FP8"):
        decode_row(model, load_gpu("a100-sxm-80gb"), 1, 16)


def test_formulas_show_what_they_compute() -> None:
    sheet = Sheet()
    sheet.give("bytes", 16e9, "B", "given")
    sheet.give("rate", 3.35e12, "B/s", "given")
    assert sheet.derive("ceiling", "rate / bytes", "tokens/s", "so many") == pytest.approx(209.375)
    line = sheet.quantities["ceiling"].explain()
    assert line == "ceiling = rate / bytes = 3.35 TB/s / 16 GB = 209 tokens/s  # so many"
    assert sheet.derive("most", "floor(max(bytes / 0, 1))", "", "no bound") == float("inf")
    with pytest.raises(KeyError):
        sheet.derive("x", "nothing + 1", "", "")
    with pytest.raises(ValueError, match="no part of a formula"):
        sheet.derive("x", "__import__('os')", "", "")
    with pytest.raises(ValueError, match="already"):
        sheet.give("rate", 1, "", "")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(131072, "B", "131,072 B"), (16.06e9, "B", "16.06 GB"), (0.0072, "s", "7.2 ms"), (4800, "s", "1.333 h"),
     (989.4e12, "FLOP/s", "989.4 TFLOP/s"), (0, "B", "0 B"), (0, "s", "0 us"), (12.34, "x", "12.3 x")],
)  # fmt: skip
def test_numbers_for_people(value: float, unit: str, text: str) -> None:
    assert formatted(value, unit) == text
