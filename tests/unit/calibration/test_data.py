"""Calibration data: what is cut from files, what a model writes, and bad files refused with the line's number."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmc.artifacts.errors import UsageError
from llmc.builder.checkpoint import Checkpoint
from llmc.calibration.data import Samples, documentation, read_samples
from llmc.calibration.quality import evaluation_windows
from tests.models import BOS

TEXT = "the quick brown fox jumps over the lazy dog and then there are other things\n" * 40


def encode(checkpoint: Checkpoint, text: str, special: bool = True) -> list[int]:
    return Tokenizer.from_str(checkpoint.tokenizer_json.decode()).encode(text, add_special_tokens=special).ids


def test_a_long_text_gives_samples_that_each_start_with_bos(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    samples = read_samples(checkpoint, tmp_path / "a.txt", 100, 32, 0)
    assert {sample[0] for sample in samples.ids} == {BOS}
    assert {len(sample) for sample in samples.ids[:-1]} == {32}
    joined = [i for sample in samples.ids for i in sample[1:]]
    ids = encode(checkpoint, TEXT, special=False)
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < 16
    assert samples.source == "text of a.txt"


def test_the_seed_chooses_the_samples(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)

    def chosen(seed: int) -> Samples:
        return read_samples(checkpoint, tmp_path, 3, 16, seed)

    assert chosen(0) == chosen(0)
    assert chosen(0).ids != chosen(1).ids
    assert len(chosen(0).ids) == 3
    assert chosen(0).sha256 != chosen(1).sha256


def test_jsonl_takes_texts_and_messages(checkpoint: Checkpoint, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    lines = [json.dumps({"text": "the lazy dog"}), "", json.dumps({"messages": messages})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    samples = read_samples(checkpoint, tmp_path / "a.jsonl", 8, 64, 0)
    chat = encode(checkpoint, "<s><|user|>the fox</s>", special=False)
    assert samples.ids == (tuple(encode(checkpoint, "the lazy dog")), tuple(chat))
    assert chat[0] == BOS


def test_a_folder_is_read_in_order_of_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("the dog")
    (tmp_path / "a.jsonl").write_text('{"text": "the fox"}')
    (tmp_path / "sub" / "c.txt").write_text("the weather")
    (tmp_path / "notes.md").write_text("not this")
    samples = read_samples(checkpoint, tmp_path, 8, 64, 0)
    assert samples.ids == tuple(tuple(encode(checkpoint, t)) for t in ("the fox", "the dog", "the weather"))
    assert samples.source == "text of a.jsonl, b.txt, c.txt"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": "the fox"}\n\n{"text": \n', r"a\.jsonl line 3: is not JSON"),
        ("a.jsonl", b'{"text": "the fox"}\n["the fox"]\n', r"a\.jsonl line 2: has neither"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl line 1: has neither"),
        ("a.jsonl", b'{"messages": [7]}\n', r"a\.jsonl line 1: the chat template refuses"),
        ("a.csv", b"the fox", r"a\.csv: calibration data is a \.txt"),
    ],
)
def test_bad_files(checkpoint: Checkpoint, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_samples(checkpoint, tmp_path / name, 8, 64, 0)


def test_missing_and_empty_folders(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_samples(checkpoint, tmp_path / "x.txt", 8, 64, 0)
    with pytest.raises(UsageError, match=r"holds no \.txt or \.jsonl"):
        read_samples(checkpoint, tmp_path, 8, 64, 0)


def test_documentation_comes_from_many_modules_and_is_not_what_builds_are_evaluated_on(checkpoint: Checkpoint) -> None:
    samples = documentation(checkpoint, 5, 20, 0)
    assert [len(sample) for sample in samples.ids] == [20] * 5
    assert {sample[0] for sample in samples.ids} == {BOS}
    assert len(set(samples.ids)) == 5
    assert documentation(checkpoint, 5, 20, 0) == samples
    assert documentation(checkpoint, 5, 20, 1) != samples
    judged = evaluation_windows(lambda text: encode(checkpoint, text, special=False))
    pieces = {tuple(window[i : i + 19]) for window in judged for i in range(len(window))}
    assert not pieces & {sample[1:] for sample in documentation(checkpoint, 40, 20, 0).ids}


def test_the_hash_tells_where_samples_end() -> None:
    assert Samples("", ((1, 2), (3,))).sha256 != Samples("", ((1,), (2, 3))).sha256
