"""The gate's bounds: how they are written, which figures break them."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.errors import UsageError
from llmc.gate import DEFAULTS, Gate, judged_as, parse_gate

SOUND = {"perplexity_change": 0.0, "kl": 0.0, "top1": 1.0, "cosine_p5": 1.0, "greedy": 1.0}
BOUNDS = Gate(ppl=0.015, kl=0.02, top1=0.93, cosine=0.99, greedy=0.9)
TEXT = "ppl=1.5%,kl=0.02,top1=0.93,cosine=0.99,greedy=0.9"


@pytest.mark.parametrize("precision", DEFAULTS)
def test_without_the_option_the_precisions_default_holds(precision: str) -> None:
    assert parse_gate(None, precision) == DEFAULTS[precision]
    assert parse_gate("off", precision) is None
    assert parse_gate(str(DEFAULTS[precision]), precision) == DEFAULTS[precision]


def test_all_bounds_as_text_and_back() -> None:
    assert parse_gate(TEXT, "fp8") == BOUNDS
    assert str(BOUNDS) == TEXT
    assert parse_gate(" ppl = 0.015 , top1 = 93%", "fp8") == dataclasses.replace(DEFAULTS["fp8"], ppl=0.015, top1=0.93)


@given(st.builds(Gate, *[st.floats(0, 1)] * 5))
def test_two_gates_that_differ_are_written_differently(gate: Gate) -> None:
    assert parse_gate(str(gate), "fp8") == gate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ppl", "'ppl' is no bound"),
        ("perplexity=1%", "'perplexity=1%' is no bound.*ppl, kl, top1, cosine, greedy"),
        ("", "'' is no bound"),
        ("kl=much", "kl is 'much'; a number from 0 on"),
        ("kl=-1", "kl is '-1'"),
        ("kl=inf", "kl is 'inf'"),
        ("kl=nan", "kl is 'nan'"),
        ("top1=93", "top1 is '93'; a number from 0 to 1, or that in percent"),
        ("kl=1,kl=2", "kl is given twice"),
    ],
)
def test_a_bound_that_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_gate(text, "fp8")


def test_no_precision_that_does_not_exist_has_a_gate() -> None:
    with pytest.raises(UsageError, match="'fp16' is not one of fp32, bf16, fp8"):
        parse_gate(None, "fp16")


@pytest.mark.parametrize(
    ("figure", "at", "beyond", "words"),
    [
        ("perplexity_change", 0.015, 0.0151, r"perplexity rose by 1.51 % \(ppl: at most 1.5 %\)"),
        ("kl", 0.02, 0.03, r"KL divergence is 0.03 \(kl: at most 0.02\)"),
        ("top1", 0.93, 0.92, r"top-1 agreement is 0.92 \(top1: at least 0.93\)"),
        ("cosine_p5", 0.99, 0.98, r"cosine is 0.98 \(cosine: at least 0.99\)"),
        ("greedy", 0.9, 0.89, r"greedy agreement is 0.89 \(greedy: at least 0.9\)"),
    ],
)
def test_a_figure_on_its_bound_passes_and_one_beyond_it_is_named(
    figure: str, at: float, beyond: float, words: str
) -> None:
    assert BOUNDS.broken({**SOUND, figure: at}) == ()
    (reason,) = BOUNDS.broken({**SOUND, figure: beyond})
    assert re.search(words, reason), reason
    assert len(BOUNDS.broken({**SOUND, figure: "nan"})) == 1


def test_text_that_became_easier_to_predict_is_no_loss() -> None:
    assert BOUNDS.broken({**SOUND, "perplexity_change": -0.05}) == ()


def test_everything_that_is_broken_is_named() -> None:
    assert len(BOUNDS.broken(dict.fromkeys(SOUND, float("nan")))) == 5


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "expected"),
    [("bf16", None, "bf16"), ("bf16", "f8e4m3", "fp8"), ("fp32", "f8e4m3", "fp8"), ("int4", "f8e4m3", "int4")],
)
def test_an_fp8_cache_is_judged_as_fp8_at_least(precision: str, kv_dtype: str | None, expected: str) -> None:
    assert judged_as(precision, kv_dtype) == expected
