"""Checkpoints that are missing, cut short or altered: one error each, naming the file and the numbers."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint import open_checkpoint
from tests.models import save_checkpoint


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_and_empty_paths(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such file or folder")
    refused(tmp_path, "is an empty folder")
    with pytest.raises(CheckpointError, match="--model is empty"):
        open_checkpoint("")
    (tmp_path / "x.gguf").touch()
    refused(tmp_path / "x.gguf", "empty file")
    refused(tmp_path, "x.gguf", "pass it itself")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", ["has no config.json"]),
        ("tokenizer.json", ["has no tokenizer.json", "save_pretrained"]),
        ("model.safetensors", ["has no weights", "model.safetensors.index.json"]),
    ],
)
def test_a_missing_file_is_named(copy: Path, name: str, words: list[str]) -> None:
    (copy / name).unlink()
    refused(copy, str(copy), *words)


def test_pickled_weights_are_not_read(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, "pytorch_model.bin is not read", "safetensors")


def rewrite_header(path: Path, change: Callable[[dict], None]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_a_truncated_file_gives_the_tensor_and_both_sizes(copy: Path) -> None:
    path = copy / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    refused(copy, "model.safetensors", "model.norm.weight", f"to {size}", f"has {size - 100}", "truncated")


@pytest.mark.parametrize("kept", [0, 5, 40])
def test_a_truncated_header(copy: Path, kept: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(copy, "model.safetensors", f"the file has {kept}")


def test_bytes_behind_the_last_tensor(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(copy, "model.safetensors", "end at byte")


def test_a_header_that_is_not_json(copy: Path) -> None:
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[8] = 0
    (copy / "model.safetensors").write_bytes(raw)
    refused(copy, "model.safetensors", "not JSON")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F7"}, ["'F7'"]),
        ({"shape": [73]}, ["needs 292 bytes", "gives it 288"]),
        ({"data_offsets": [10**9, 10**9 + 288]}, ["the file has", "truncated"]),
        ({"data_offsets": [-288, 0]}, ["damaged entry"]),
        ({"data_offsets": "x"}, ["damaged entry"]),
    ],
)
def test_a_damaged_entry_names_the_tensor(copy: Path, change: dict, words: list[str]) -> None:
    rewrite_header(copy / "model.safetensors", lambda header: header["model.norm.weight"].update(change))
    refused(copy, "model.norm.weight", *words)


def test_git_lfs_pointers_are_called_so(copy: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n"
    (copy / "model.safetensors").write_text(pointer)
    refused(copy, "model.safetensors", "git-LFS pointer", "git lfs pull")
    (copy / "tokenizer.json").write_text(pointer)
    refused(copy, "tokenizer.json", "git-LFS pointer")


def test_json_files_that_are_not_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    refused(copy, "config.json", "not JSON")
    (copy / "config.json").write_text("[]")
    refused(copy, "config.json", "list")


def test_a_tokenizer_that_cannot_be_read(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        open_checkpoint(copy).model_info()


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "sharded", "llama", max_shard_size="50KB")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, shard.name, "is missing (1 of")


def test_an_index_that_promises_too_much(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.extra.weight": shard}}))
    refused(sharded, shard, "model.extra.weight")
    path.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    refused(sharded, "'../model.safetensors'")
    path.write_text("{}")
    refused(sharded, "no weight_map")


def test_a_file_that_shrinks_after_opening(copy: Path) -> None:
    checkpoint = open_checkpoint(copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*needs 288 bytes.*gave 0"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("part", [0.0001, 0.02, 0.2, 0.6, 0.9999])
def test_a_truncated_gguf(gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, part: float) -> None:
    raw = gguf[0].read_bytes()
    kept = max(5, int(len(raw) * part))
    (tmp_path / "cut.gguf").write_bytes(raw[:kept])
    refused(tmp_path / "cut.gguf", "cut.gguf", f"the file has {kept}", "truncated")


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(tmp_path / "x.gguf", "not a GGUF file")
    (tmp_path / "x.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path / "x.gguf", "git-LFS pointer")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedError, match="version 1"):
        open_checkpoint(tmp_path / "x.gguf")
