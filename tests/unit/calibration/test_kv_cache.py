"""Scales of keys and values: powers of two with room, of the tokens that are real, kept by what they were made from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.kv_scales import KVScaleTable
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.reference import load_reference
from llmc.calibration.kv_cache import kv_scales, measure, scale_for
from tests.models import save_checkpoint, tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save_checkpoint(tmp_path_factory.mktemp("kv") / "tiny", "llama"))


@pytest.mark.parametrize("largest", [1e-6, 0.37, 1.0, 3.5, 223.9, 224.0, 224.1, 448.0, 5000.0])
def test_a_scale_is_a_power_of_two_with_room_for_twice_the_largest(largest: float) -> None:
    scale = scale_for(largest)
    assert math.frexp(scale)[0] == 0.5
    assert 224 < 2 * largest / scale <= 448
    assert scale_for(0) == 1


def test_padding_behind_samples_does_not_count() -> None:
    model, ids = tiny_model("llama"), [7, 8, 9, 10, 200, 11]
    alone, padded = measure(model, [ids[:2]]), measure(model, [ids[:2], ids])
    whole = measure(model, [ids])
    for layer, ranges in padded.items():
        for have, short, long in zip(ranges, alone[layer], whole[layer], strict=True):
            torch.testing.assert_close(have, torch.maximum(short, long))


def test_a_table_is_kept_by_what_it_was_made_from(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache, text = ObjectCache(tmp_path / "cache", suffix=".json"), tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 40)
    calls = []

    def reference() -> object:
        calls.append(1)
        return load_reference(checkpoint)

    table, reused = kv_scales(checkpoint, text, reference, cache)
    assert not reused
    assert table.source == "calibrated"
    assert table.data is not None
    assert table.data.source == "text of text.txt"
    assert {layer: tuple(map(len, scales)) for layer, scales in table.layers.items()} == {0: (3, 3), 1: (3, 3)}
    again, reused = kv_scales(checkpoint, text, reference, cache)
    assert reused
    assert again == table == KVScaleTable.from_json(table.to_json())
    text.write_text("ten nine eight seven six five four three two one " * 40)
    assert not kv_scales(checkpoint, text, reference, cache)[1]
    assert len(calls) == 2


def test_keys_that_are_no_numbers_are_named(checkpoint: Checkpoint) -> None:
    model = tiny_model("llama")
    model.get_submodule("model.layers.1.self_attn.v_proj").weight.data[0, 0] = math.nan
    with pytest.raises(CheckpointError, match="values of layer 1 are not finite"):
        kv_scales(checkpoint, None, lambda: model, None)


def test_a_model_without_a_cache_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedError, match=r"no cache of transformers.*--kv-cache-dtype bf16"):
        kv_scales(checkpoint, None, lambda: lambda *_, **__: None, None)
