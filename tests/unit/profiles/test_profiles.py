"""Shape profiles: what comes with llmc is valid, and every mistake in a file is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.profiles import load_profile, load_target, profile_names

RANGES = "token_ranges: [{min: 1, opt: 1, max: 1}, {min: 2, max: 64}]\n"


def load(text: str, tmp_path: Path, longest: int = 2048) -> ShapeProfile:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return load_profile(path, longest, load_target("cpu"))


def test_the_profiles_of_the_issue_exist() -> None:
    assert profile_names() == ["batch", "chat", "long-context"]


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_cover_every_step_from_one_token_on(name: str) -> None:
    profile = load_profile(name, 4096, load_target("cpu"))
    assert profile.name == name
    assert profile.max_seq_len == 4096
    steps = [n for r in profile.token_ranges for n in range(r.min, r.max + 1)]
    assert steps == list(range(1, profile.max_num_batched_tokens + 1))


def test_defaults_come_from_the_ranges_and_the_model(tmp_path: Path) -> None:
    ranges = (TokenRange(1, 1, 1), TokenRange(2, 64, 64))
    assert load(RANGES, tmp_path, 777) == ShapeProfile("own", ranges, 64, 777, 16, "reject")
    assert load("token_ranges: [{min: 1, max: 8}]", tmp_path).max_num_seqs == 8


def test_values_of_the_file_count(tmp_path: Path) -> None:
    profile = load(RANGES + "max_num_seqs: 3\nmax_seq_len: 100\nblock_size: 32\n", tmp_path)
    assert (profile.max_num_seqs, profile.max_seq_len, profile.block_size) == (3, 100, 32)


def test_a_model_without_a_limit_takes_what_the_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(RANGES + "max_seq_len: 9000\n")
    assert load_profile(path, 2048, load_target("cpu"), limited=False).max_seq_len == 9000
    path.write_text(RANGES)
    assert load_profile(path, 2048, load_target("cpu"), limited=False).max_seq_len == 2048


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RANGES + "max_num_seq: 3", r"unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        (RANGES + "7: 3", r"unknown key 7\. The keys are token_ranges"),
        ("token_ranges: [{min: 1, max: 1, best: 1}]", r"token_ranges\[0\]: unknown key 'best'"),
        ("token_ranges: [{min: 1, max: 1}, {min: 9, max: 3}]", r"token_ranges\[1\]: min 9 is larger than max 3"),
        ("token_ranges: [{min: 1, max: 4}, {min: 6, max: 9}]", r"token_ranges\[1\]: min is 6; .* 5 is needed"),
        ("token_ranges: [{min: 1, max: 4}, {min: 4, max: 9}]", r"token_ranges\[1\]: min is 4; .* 5 is needed"),
        ("token_ranges: [{min: 2, max: 4}]", r"min is 2; .* 1 is needed"),
        ("token_ranges: [{min: 1, opt: 9, max: 4}]", r"opt is 9; it lies outside 1\.\.4"),
        ("token_ranges: [{min: 0, max: 4}]", "min is 0; a whole number of at least 1"),
        ("token_ranges: [{min: 1, max: true}]", "max is True; a whole number"),
        ("token_ranges: [5]", r"token_ranges\[0\]: is 5, a mapping"),
        ("token_ranges: 5", "token_ranges is 5; a list"),
        ("max_num_seqs: 4", "token_ranges is None; a list"),
        (RANGES + "max_num_seqs: 65", "max_num_seqs is 65; the largest step has 64 tokens"),
        (RANGES + "max_num_seqs: many", "max_num_seqs is 'many'; a whole number"),
        (RANGES + "max_seq_len: 2049", "max_seq_len is 2049; .*max_position_embeddings is 2048"),
        (RANGES + "max_seq_len: 1", "max_seq_len is 1; at least 2 are needed, for a prompt and an answer"),
        (RANGES + "max_seq_len: long", "max_seq_len is 'long'; a whole number, or auto"),
        (RANGES + "block_size: 24", "block_size is 24; kernels of cpu:x86-64-v3 have 16, 32"),
        (RANGES + "outside: split", "outside is 'split'; only 'reject' exists"),
        ("- 1\n- 2", r"own\.yaml: is \[1, 2\], a mapping"),
        ("", "is None, a mapping"),
        ("a: [", "is not YAML"),
    ],
)
def test_mistakes_name_file_field_and_value(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        load(text, tmp_path)
    assert "own.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chatt", r"'chatt' is neither a file nor one of batch, chat, long-context; did you mean 'chat'"),
        ("missing.yaml", "missing.yaml: no such file; the names without a file are batch"),
        ("./folder/none", "no such file"),
    ],
)
def test_unknown_profiles_are_named(name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_profile(name, 100, load_target("cpu"))
