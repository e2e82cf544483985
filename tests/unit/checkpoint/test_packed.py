"""GPTQ and AWQ checkpoints: what they stand for, their own numbers by groups of 128, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint import open_checkpoint
from llmc.plugins.linear import dequantize
from tests.quantized import save_packed

DOWN = "model.layers.1.mlp.down_proj"
FORMATS = [("gptq", 128, False), ("gptq", 256, True), ("awq", 128, False), ("awq", -1, False), ("gptq", 64, False)]


@pytest.fixture(scope="module", params=FORMATS, ids=lambda p: "-".join(map(str, p)))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    method, group, v2 = request.param
    return save_packed(tmp_path_factory.mktemp("packed"), method, group, v2=v2), group


def test_every_weight_is_what_its_numbers_stand_for(saved: tuple[Path, int]) -> None:
    packed, plain = open_checkpoint(saved[0]), open_checkpoint(saved[0].parent / "plain")
    assert packed.tensors.keys() == plain.tensors.keys()
    for name, info in plain.tensors.items():
        assert packed.tensors[name].shape == info.shape
        np.testing.assert_array_equal(packed.read(name), plain.read(name))
    np.testing.assert_array_equal(packed.read(f"{DOWN}.weight", 5, 40), plain.read(f"{DOWN}.weight", 5, 40))


def test_numbers_are_kept_by_groups_of_128_where_they_fit(saved: tuple[Path, int]) -> None:
    packed, group = open_checkpoint(saved[0]), saved[1]
    own = packed.quantization
    assert own is not None
    if group == 64:
        assert not own.linears
        assert "not kept (its groups are of 64 columns, not of 128)" in own.notes("int4")[0]
        return
    entry = own.linears[DOWN]
    assert entry.zero is not None
    parts = [packed.stored(name, 3, 50) for name in (entry.weight, entry.scale, entry.zero)]
    assert [str(part.dtype) for part in parts] == ["uint4", "float16", "uint4"]
    assert packed.stored_shape(entry.scale) == (288, 3)
    np.testing.assert_array_equal(dequantize(parts[0], parts[1], parts[2]), packed.read(entry.weight, 3, 50))
    assert "count as the numbers that they stand for" in own.notes("bf16")[0]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"bits": 3}, UnsupportedError, "gptq with bits 3 is not supported"),
        ({"desc_act": True}, UnsupportedError, "desc_act True is not supported"),
        ({"checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, UnsupportedError, "awq with version 'gemv'"),
        ({"group_size": "all"}, CheckpointError, "group_size is 'all'"),
        ({"group_size": 96}, CheckpointError, r"needs \[3, 12\]|needs \[4, "),
    ],
)
def test_other_packings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], named: str
) -> None:
    folder = save_packed(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=named):
        open_checkpoint(folder)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = save_packed(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.g_idx"] = tensors[f"{DOWN}.g_idx"][::-1].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=rf"{DOWN}\.g_idx.*desc_act"):
        open_checkpoint(folder).read(f"{DOWN}.weight")


def test_a_config_without_packed_tensors_is_refused(tmp_path: Path) -> None:
    folder = save_packed(tmp_path, "awq")
    shutil.copy(folder.parent / "plain" / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor qweight"):
        open_checkpoint(folder)
