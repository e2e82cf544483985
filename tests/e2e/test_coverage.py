"""The record of model types is true: whatever it says works is built and compared again; the README says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.coverage import WORKS, Record, check_families

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- llmc models --summary -->\n", "<!-- end of llmc models --summary -->\n"
RECORD = Record.read()
WORKING = [row.model_type for row in RECORD.models if row.status == WORKS]


@pytest.mark.timeout(1800)
def test_what_the_record_says_works_works() -> None:
    """All in one go, as the checks share two processes; a failure names every type that differs, or launches more."""
    results = check_families(WORKING, workers=2)
    assert {row.model_type: row.reason for row in results if row.status != WORKS} == {}
    known = {row.model_type: row.launches_per_layer for row in RECORD.models}
    assert [row.model_type for row in results if row.launches_per_layer > known[row.model_type]] == []


#: What an open-weights server is asked for first.
NAMED = """
llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe gpt2 gpt_neox
gptj gpt_bigcode gpt_oss opt bloom mpt falcon stablelm starcoder2 olmo olmo2 olmo3 olmoe granite granitemoe cohere
cohere2 glm glm4 glm4_moe exaone4 nemotron smollm3 seed_oss ernie4_5 ernie4_5_moe hunyuan_v1_dense arcee apertus helium
dbrx deepseek_v2 deepseek_v3 minimax_m2 flex_olmo codegen biogpt persimmon xglm gpt_neo mvp
"""


def test_the_named_types_work() -> None:
    assert set(NAMED.split()) - set(WORKING) == set()
    assert len(WORKING) >= 60


def test_what_does_not_work_has_a_reason() -> None:
    assert all(row.reason for row in RECORD.models if row.status != WORKS)


def test_the_readme_carries_the_summary() -> None:
    text = (ROOT / "README.md").read_text()
    assert BEGIN in text, f"README.md lacks the line {BEGIN.strip()}"
    assert text.partition(BEGIN)[2].partition(END)[0] == RECORD.summary(), (
        "README.md is not what `llmc models --summary` prints; put its output between the two comments"
    )


def test_the_record_is_of_the_release_that_is_installed() -> None:
    from importlib.metadata import version

    assert RECORD.transformers == version("transformers")
