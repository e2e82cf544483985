"""Checkpoints whose weights are FP8 already: the values they stand for, the bytes and scales as stored, and damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint import open_checkpoint
from tests.quantized import save_blocks, save_compressed, save_modelopt

DOWN = "model.layers.1.mlp.down_proj"
WEIGHT, SCALE = f"{DOWN}.weight", f"{DOWN}.weight_scale"


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_modelopt(tmp_path_factory.mktemp("modelopt") / "fp8")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_compressed(tmp_path_factory.mktemp("compressed") / "fp8")


def edited(source: Path, target: Path, tensors: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy whose tensors a function has changed in place."""
    shutil.copytree(source, target)
    content = load_file(target / "model.safetensors")
    tensors(content)
    save_file(content, target / "model.safetensors", {"format": "pt"})
    return target


def test_compressed_tensors_reads_as_transformers_decompresses_it(compressed: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    plain = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(compressed, dtype=torch.float32, quantization_config=plain)
    checkpoint = open_checkpoint(compressed)
    for name, parameter in model.named_parameters():
        if not name.endswith("scale"):
            assert np.array_equal(checkpoint.read(name).astype(np.float32), parameter.detach().numpy()), name
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.scheme.activations == "token"
    assert checkpoint.quantization.linears[DOWN].input_scale is None
    assert len(checkpoint.quantization.linears) == 14


def test_int8_of_compressed_tensors_reads_as_it_is_stored(tmp_path: Path) -> None:
    folder = save_compressed(tmp_path / "int8", number="int")
    checkpoint, tensors = open_checkpoint(folder), load_file(folder / "model.safetensors")
    assert checkpoint.quantization is not None
    scheme = checkpoint.quantization.scheme
    assert (scheme.name, scheme.weights, scheme.activations) == ("compressed-tensors INT8", "int8", "token")
    assert checkpoint.stored(WEIGHT, 3, 9).dtype == np.int8
    assert np.array_equal(checkpoint.stored(WEIGHT, 3, 9), tensors[WEIGHT][3:9].numpy())
    assert np.array_equal(checkpoint.read(WEIGHT), (tensors[WEIGHT].float() * tensors[SCALE].float()).numpy())
    assert len(checkpoint.quantization.linears) == 14


def test_modelopt_scales_are_its_own(modelopt: Path) -> None:
    checkpoint, tensors = open_checkpoint(modelopt), load_file(modelopt / "model.safetensors")
    assert checkpoint.quantization is not None
    entry = checkpoint.quantization.linears[DOWN]
    assert entry.input_scale == float(tensors[f"{DOWN}.input_scale"])
    stored = checkpoint.stored(entry.weight, 3, 9)
    assert np.array_equal(stored.view(np.uint8), tensors[WEIGHT][3:9].view(torch.uint8).numpy())
    assert np.array_equal(checkpoint.stored(entry.scale, 3, 9), np.full(6, tensors[SCALE].item(), np.float32))
    assert np.array_equal(checkpoint.read(WEIGHT, 3, 9), stored.astype(np.float32) * tensors[SCALE].item())
    assert not [name for name in checkpoint.tensors if name.endswith("scale")]
    assert "quantization_config" not in checkpoint.config
    assert "hf_quant_config.json" in {file.name for file in checkpoint.pin().files}


def test_modelopts_own_file_is_enough(modelopt: Path, tmp_path: Path) -> None:
    """Older exports say it in hf_quant_config.json alone."""
    copy = shutil.copytree(modelopt, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(copy).quantization == open_checkpoint(modelopt).quantization


def test_blocks_read_as_what_they_stand_for(tmp_path: Path) -> None:
    folder, values = save_blocks(tmp_path, intermediate_size=100)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization is not None
    assert not checkpoint.quantization.linears
    for name, value in values.items():
        assert np.array_equal(checkpoint.read(name), value), name
        assert np.array_equal(checkpoint.read(name, 5, 31), value[5:31]), name


def test_a_quantized_tensor_without_scale_is_named(modelopt: Path, tmp_path: Path) -> None:
    copy = edited(modelopt, tmp_path / "copy", lambda tensors: tensors.pop(SCALE))
    with pytest.raises(CheckpointError, match=f"{WEIGHT}.*no scale '{SCALE}'"):
        open_checkpoint(copy)


def test_scales_of_the_cache_are_by_layer(compressed: Path, tmp_path: Path) -> None:
    """As ModelOpt names them, beside the projections, and as compressed-tensors does; one number, or one a head."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
        tensors["model.layers.0.self_attn.v_proj.v_scale"] = torch.tensor(0.25)
        tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.125, 2.0])
        tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([1.0])

    checkpoint = open_checkpoint(edited(compressed, tmp_path / "copy", add))
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.kv == {0: ((0.5,), (0.25,)), 1: ((0.125, 2.0), (1.0,))}
    assert not [name for name in checkpoint.tensors if name.endswith("scale")]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.125])

    with pytest.raises(CheckpointError, match="of layer 1's cache there is k_scale, and not the other"):
        _ = open_checkpoint(edited(compressed, tmp_path / "spoiled", spoil)).quantization


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_named(modelopt: Path, tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALE] = torch.tensor(value)
        tensors[f"{DOWN}.input_scale"] = torch.tensor(value)

    checkpoint = open_checkpoint(edited(modelopt, tmp_path / "copy", spoil))
    with pytest.raises(CheckpointError, match=f"{SCALE}.*not positive"):
        checkpoint.read(WEIGHT)
    with pytest.raises(CheckpointError, match=f"{DOWN}.input_scale.*positive"):
        _ = checkpoint.quantization


def test_scales_of_another_shape_are_named(modelopt: Path, tmp_path: Path) -> None:
    copy = edited(modelopt, tmp_path / "copy", lambda tensors: tensors.update({SCALE: torch.ones(7)}))
    with pytest.raises(CheckpointError, match=rf"{SCALE}.* has shape \[7\], the weight \[64, 100\]"):
        open_checkpoint(copy)


def test_a_static_scheme_needs_its_input_scales(modelopt: Path, tmp_path: Path) -> None:
    copy = edited(modelopt, tmp_path / "copy", lambda tensors: tensors.pop(f"{DOWN}.input_scale"))
    with pytest.raises(CheckpointError, match=f"{DOWN}.input_scale"):
        _ = open_checkpoint(copy).quantization


def int_quantized(**changed: object) -> dict[str, object]:
    """A W8A8 config of compressed-tensors, with changes of its one group."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"weights": number | {"strategy": "channel"}, "input_activations": number | {"dynamic": True}} | changed
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group}}


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}}}, "pack-quant"),
        ({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, "'W8A8_SQ_PER_CHANNEL'"),
        (int_quantized(input_activations=None), "INT8 weights alone"),
        (int_quantized(weights={"num_bits": 8, "type": "int", "symmetric": False}), "8 bits int, not symmetric"),
        (int_quantized(weights={"num_bits": 4, "type": "int", "symmetric": True}), "weights of 4 bits int"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
    ],
)
def test_other_quantizations_are_refused_by_name(
    modelopt: Path, tmp_path: Path, declared: dict[str, object], named: str
) -> None:
    copy = shutil.copytree(modelopt, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | {"quantization_config": declared}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"{named}.*not supported"):
        open_checkpoint(copy)


def test_a_config_that_declares_what_no_tensor_is(tmp_path: Path, compressed: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].float()

    with pytest.raises(CheckpointError, match="none of its tensors is F8_E4M3"):
        open_checkpoint(edited(compressed, tmp_path / "copy", widen))
