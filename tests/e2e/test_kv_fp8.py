"""`llmc build --kv-cache-dtype fp8` from end to end: calibrated, or with the scales that a checkpoint brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc import flow
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.plan import Plan
from llmc.cli import reproduce
from tests.builds import SMALL
from tests.models import save_checkpoint
from tests.quantized import save_compressed

pytestmark = pytest.mark.timeout(900)

LOOSE = "ppl=5%,kl=0.05,top1=0.6,cosine=0.95,greedy=0.5"  # of a model without training: its logits are flat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("kv") / "tiny", "llama")


def test_a_calibrated_cache_takes_half_and_answers_as_the_checkpoint(model: Path, tmp_path: Path) -> None:
    plans = {}
    for name, kv_dtype in (("half", "fp8"), ("whole", "bf16")):
        report = flow.build(
            model, tmp_path / f"{name}.plan", precision="bf16", tp=2, kv_dtype=kv_dtype, gate=LOOSE, eval_windows=3,
            eval_length=64, profile=SMALL,
        )  # fmt: skip
        assert report.quality["verdict"] == "passed"
        plans[name] = Plan.open(tmp_path / f"{name}.plan")
    half = plans["half"].manifest
    assert half.kv_block_bytes * 2 == plans["whole"].manifest.kv_block_bytes
    assert half.build.kv_dtype == "f8e4m3"
    assert {layer.dtype for rank in half.ranks for layer in rank.kv_layers} == {"f8e4m3"}
    assert half.build.config["kv_scales"] == "calibrated"
    scales = json.loads(bytes(plans["half"].section("kv_scales.json")))
    assert [len(scales["layers"]["1"][0]), len(scales["layers"]["1"][1])] == [3, 3]
    assert f"kv_scales=(({scales['layers']['0'][0][2]},)," in bytes(plans["half"].section("graph/rank1.ir")).decode()
    assert "kv_scales.json" not in plans["whole"]
    memory = flow.plan_memory(model, precision="bf16", tp=2, profile=SMALL, target="cpu", kv_dtype="fp8")
    assert memory.kv_block_bytes == half.kv_block_bytes
    command = reproduce.command(plans["half"])
    assert "--kv-cache-dtype fp8" in command
    assert "scales of keys and values: calibrated" in command


def test_a_checkpoint_that_brings_scales_keeps_them(tmp_path: Path) -> None:
    folder = save_compressed(tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.0625 * (layer + 1)])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.03125)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (folder / "config.json").write_text(json.dumps(config))

    report = flow.build(folder, tmp_path / "a.plan", kv_dtype="fp8_e4m3", evaluate=False, profile=SMALL)
    graph = bytes(Plan.open(tmp_path / "a.plan").section("graph/rank0.ir")).decode()
    for layer in range(2):
        assert graph.count(f"kv_scales={((0.0625 * (layer + 1),) * 2, (0.03125,) * 2)}") == 2
    assert any("scales of keys and values are the checkpoint's" in note for note in report.notes)
    assert not any("is not kept" in note for note in report.notes)
    (tmp_path / "text.txt").write_text("some words " * 100)
    with pytest.raises(UsageError, match="brings its own scales; drop --calib"):
        flow.build(folder, tmp_path / "b.plan", kv_dtype="fp8", calib=tmp_path / "text.txt", evaluate=False)


def test_what_cannot_be_is_refused_with_a_remedy(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--kv-cache-dtype int8: is not one of auto, fp32, .*fp8"):
        flow.build(model, tmp_path / "a.plan", kv_dtype="int8")
    with pytest.raises(UsageError, match=r"--calib t\.json: a table has ranges of linear layers"):
        flow.build(model, tmp_path / "a.plan", precision="bf16", kv_dtype="fp8", calib="t.json")
    with pytest.raises(UsageError, match="--kv-cache-dtype fp8: fuse_attention, which needs it, does not run before"):
        flow.dump_passes(model, tmp_path / "dump", "canonicalize", precision="bf16", kv_dtype="fp8")
    latent = save_checkpoint(tmp_path / "latent", "deepseek_v3")
    with pytest.raises(UnsupportedError, match="latent attention is f32 or bf16, not fp8"):
        flow.plan_memory(latent, precision="bf16", tp=1, profile="chat", target="cpu", kv_dtype="fp8")
    for calibration in ("run._calibrate", "kv_cache.measure"):
        monkeypatch.setattr(f"llmc.calibration.{calibration}", lambda *_: pytest.fail("calibrated for nothing"))
    with pytest.raises(UnsupportedError, match="latent attention is f32 or bf16, not fp8"):
        flow.build(latent, tmp_path / "a.plan", precision="fp8", kv_dtype="fp8", evaluate=False)
