"""Limits of requests: each error names the parameter, the value and the bound."""

import math
from typing import Any

import pytest

from llmc.runtime.messages import SamplingParams
from llmc.runtime.params import Limits, RequestError, check, check_n, fit, generation_defaults

LIMITS = Limits(vocab_size=100, max_seq_len=32, pool_tokens=64)


@pytest.mark.parametrize(
    ("given", "param", "numbers"),
    [
        ({"temperature": -0.1}, "temperature", ["-0.1", "0"]),
        ({"temperature": math.nan}, "temperature", ["nan"]),
        ({"temperature": math.inf}, "temperature", ["inf"]),
        ({"temperature": 1e300}, "temperature", ["1e+300", "1000"]),
        ({"repetition_penalty": 1e-45}, "repetition_penalty", ["1e-45", "0.001"]),
        ({"repetition_penalty": 1e39}, "repetition_penalty", ["1e+39", "1000"]),
        ({"top_p": 0.0}, "top_p", ["0.0", "more than 0"]),
        ({"top_p": 1.1}, "top_p", ["1.1", "1"]),
        ({"top_k": -1}, "top_k", ["-1"]),
        ({"min_p": 1.5}, "min_p", ["1.5"]),
        ({"repetition_penalty": 0.0}, "repetition_penalty", ["0.0"]),
        ({"presence_penalty": 2.5}, "presence_penalty", ["2.5", "2"]),
        ({"frequency_penalty": -3.0}, "frequency_penalty", ["-3", "-2"]),
        ({"logit_bias": {100: 1.0}}, "logit_bias", ["100", "99"]),
        ({"logit_bias": {1: 101.0}}, "logit_bias", ["101", "100"]),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", ["1025", "1024"]),
        ({"stop": ("x",) * 17}, "stop", ["17", "16"]),
        ({"stop": ("x", "")}, "stop", ["empty"]),
        ({"stop": ("x\ud800",)}, "stop", ["Unicode"]),
        ({"stop_token_ids": (100,)}, "stop_token_ids", ["100", "99"]),
        ({"top_k": 2**31}, "top_k", ["2147483648", "2147483647"]),
        ({"stop": ("x" * 1001,)}, "stop", ["1001", "1000"]),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", ["-1"]),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids", ["65", "64"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
        ({"min_tokens": -1}, "min_tokens", ["-1"]),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["5", "4"]),
        ({"seed": 2**63}, "seed", [str(2**63)]),
    ],
)
def test_values_out_of_range(given: dict[str, Any], param: str, numbers: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check(SamplingParams(**given), LIMITS)
    assert caught.value.param == param
    for number in [param, *numbers]:
        assert number in str(caught.value)


def test_the_edges_are_allowed() -> None:
    check(
        SamplingParams(
            temperature=0,
            top_p=1,
            top_k=0,
            min_p=1,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={0: -100, 99: 100},
            stop=("x" * 1000,) * 16,
            logprobs=20,
            max_tokens=1,
            min_tokens=1,
            seed=-(2**63),
        ),
        LIMITS,
    )


def test_what_the_core_gets_is_normal() -> None:
    params = check(SamplingParams(temperature=1e-9, top_k=10**6, seed=-1), LIMITS)
    assert (params.temperature, params.top_k, params.seed) == (0.0, 100, 2**63 - 1)


def test_a_prompt_too_long_says_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"has 32 tokens.*max_seq_len is 32") as caught:
        fit([1] * 32, SamplingParams(), LIMITS)
    assert caught.value.code == "context_length_exceeded"


def test_prompt_and_answer_too_long_say_three_numbers() -> None:
    with pytest.raises(RequestError, match=r"20 tokens and max_tokens is 13: together 33.*max_seq_len of 32"):
        fit([1] * 20, SamplingParams(max_tokens=13), LIMITS)
    assert fit([1] * 20, SamplingParams(max_tokens=12), LIMITS).max_tokens == 12


def test_the_answer_gets_what_is_left() -> None:
    assert fit([1] * 20, SamplingParams(), LIMITS).max_tokens == 12
    assert fit([1] * 20, SamplingParams(), Limits(100, 32, 24)).max_tokens == 4


def test_a_request_that_the_pool_cannot_hold_names_the_remedy() -> None:
    with pytest.raises(RequestError, match=r"--kv-bytes"):
        fit([1] * 20, SamplingParams(max_tokens=10), Limits(100, 32, 24))


def test_empty_and_foreign_prompts() -> None:
    with pytest.raises(RequestError, match="empty"):
        fit([], SamplingParams(), LIMITS)
    with pytest.raises(RequestError, match=r"100.*99"):
        fit([1, 100], SamplingParams(), LIMITS)
    with pytest.raises(RequestError, match=r"min_tokens is 13.*12"):
        fit([1] * 20, SamplingParams(min_tokens=13), LIMITS)


@pytest.mark.parametrize("n", [0, 129])
def test_n_is_bounded(n: int) -> None:
    with pytest.raises(RequestError, match=f"{n}.*128"):
        check_n(n)


def test_defaults_come_from_the_generation_config() -> None:
    config = {"temperature": 0.2, "top_k": 50.0, "top_p": None, "do_sample": True, "eos_token_id": 2, "min_p": "x"}
    assert generation_defaults(config) == {"temperature": 0.2, "top_k": 50}
