"""Checkpoints that are FP8 already: the engine has their bytes and scales, and answers as the tool that wrote them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc import flow
from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.runtime.selftest import Probe
from tests.builds import SMALL
from tests.models import save_checkpoint
from tests.quantized import save_blocks, save_compressed, save_experts, save_modelopt

IDS = [5, 17, 101, 33, 250, 8, 64, 299, 12, 40]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine of two rows."""
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


@pytest.mark.parametrize(
    ("strategy", "dynamic", "number", "tp"),
    [("channel", True, "float", 1), ("channel", True, "int", 2), ("tensor", False, "float", 2),
     ("tensor", False, "int", 1)],
)  # fmt: skip
def test_compressed_tensors_answers_as_its_own_library(
    tmp_path: Path, strategy: str, dynamic: bool, number: str, tp: int
) -> None:
    """transformers runs the checkpoint with compressed-tensors' own quantization of weights and activations."""
    from transformers import AutoModelForCausalLM

    folder = save_compressed(tmp_path / "quantized", strategy=strategy, dynamic=dynamic, number=number)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS])).logits[0].float().numpy()
    report = flow.build(folder, tmp_path / "p.plan", tp=tp, evaluate=False, profile=SMALL)
    plan = Plan.open(report.plan)
    with Probe(plan) as probe:
        got = probe.logits(IDS)
    # Beside it: bf16 head and cache, and roundings of activations that fall on the other side, 1/16 away.
    assert cosine(wanted, got) > 0.995
    name = {"float": "fp8", "int": "int8"}[number]
    assert plan.manifest.build.precision == name
    assert plan.manifest.build.config[f"{name}_scales"] == f"the checkpoint's (compressed-tensors {name.upper()})"
    if number == "float":
        assert plan.manifest.build.config["fp8_activations"] == ("token" if dynamic else "static")
    assert f"x_per_token={dynamic}" in bytes(plan.section("graph/rank0.ir")).decode()
    assert "calibration.json" not in {section.name for section in plan.manifest.sections}


def test_modelopts_bytes_and_scales_are_in_the_plan(tmp_path: Path) -> None:
    folder = save_modelopt(tmp_path / "fp8", "llama")
    report = flow.build(folder, tmp_path / "p.plan", precision="fp8", tp=2, evaluate=False, profile=SMALL)
    plan = Plan.open(report.plan)
    note = next(p.notes for p in plan.manifest.build.passes if p.name == "quantize")
    assert "keep the FP8 weights and scales of the checkpoint" in " ".join(note)
    graph = bytes(plan.section("graph/rank0.ir")).decode()
    assert "stored('model.layers.0.mlp.down_proj.weight', 'f8e4m3')" in graph
    assert "fp8_scale(" not in graph
    with pytest.raises(UsageError, match="brings its own scales"):
        flow.build(folder, tmp_path / "q.plan", precision="fp8", calib=tmp_path / "table.json")


def test_the_output_head_that_a_checkpoint_left_alone_is_rounded_where_that_is_asked(tmp_path: Path) -> None:
    folder = save_modelopt(tmp_path / "fp8", "llama")
    got = {}
    for head in ("bf16", "fp8"):
        report = flow.build(
            folder, tmp_path / f"{head}.plan", precision="fp8", lm_head_dtype=head, evaluate=False, profile=SMALL
        )
        plan = Plan.open(report.plan)
        assert plan.manifest.build.config["lm_head_dtype"] == head
        assert ("the output head is rounded to FP8" in quantize_notes(plan)) == (head == "fp8")
        assert ("fp8_scale(" in bytes(plan.section("graph/rank0.ir")).decode()) == (head == "fp8")
        with Probe(plan) as probe:
            got[head] = probe.logits(IDS)
    assert 0.99 < cosine(got["bf16"], got["fp8"]) < 1 - 1e-6


def test_an_output_head_that_a_checkpoint_has_quantized_stays_as_it_is(tmp_path: Path) -> None:
    folder = save_compressed(tmp_path / "fp8", ignore=())
    flow.build(folder, tmp_path / "p.plan", evaluate=False, profile=SMALL)
    plan = Plan.open(tmp_path / "p.plan")
    assert "lm_head_dtype" not in plan.manifest.build.config
    assert "stored('lm_head.weight', 'f8e4m3')" in bytes(plan.section("graph/rank0.ir")).decode()
    for head in ("bf16", "fp8"):
        with pytest.raises(UsageError, match=rf"--lm-head-dtype {head}: .*output head \(lm_head\) in FP8 itself"):
            flow.build(folder, tmp_path / "q.plan", lm_head_dtype=head, evaluate=False, profile=SMALL)


def test_modelopts_bytes_are_kept_where_one_tensor_is_several_layers(tmp_path: Path) -> None:
    flow.dump_passes(save_modelopt(tmp_path / "fp8", "phi3"), tmp_path / "ir", "quantize", precision="fp8")
    graph = max((tmp_path / "ir").iterdir()).read_text()
    assert "stored('model.layers.0.mlp.down_proj.weight', 'f8e4m3')" in graph
    assert "stored('model.layers.0.mlp.gate_up_proj.weight', 'f8e4m3')" in graph
    assert "fp8_scale(" not in graph


def test_other_precisions_take_the_values_that_it_stands_for(tmp_path: Path) -> None:
    from llmc.builder.reference import load_reference, logits

    for folder in (save_modelopt(tmp_path / "modelopt"), save_blocks(tmp_path / "blocks")[0]):
        report = flow.build(folder, tmp_path / "p.plan", precision="fp32", evaluate=False, profile=SMALL)
        with Probe(Plan.open(report.plan)) as probe:
            got = probe.logits(IDS)
        assert cosine(logits(load_reference(open_checkpoint(folder)), IDS), got) > 1 - 1e-6


def quantize_notes(plan: Plan) -> str:
    return " ".join(next(p.notes for p in plan.manifest.build.passes if p.name == "quantize"))


def test_experts_keep_their_bytes_and_scales(tmp_path: Path) -> None:
    """Held against Hugging Face with the numbers that the checkpoint stands for: beside it activations are FP8."""
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.reference import load_reference, logits

    folder = save_experts(tmp_path / "fp8")
    report = flow.build(folder, tmp_path / "p.plan", precision="fp8", tp=2, evaluate=False, profile=SMALL)
    plan = Plan.open(report.plan)
    assert "fp8_scale(" not in bytes(plan.section("graph/rank0.ir")).decode()
    assert plan.manifest.build.config["fp8_scales"] == "the checkpoint's (compressed-tensors FP8)"
    assert report.notes[-2] == "FP8 scales are the checkpoint's (compressed-tensors FP8)"
    assert "quantized cache" in report.notes[-1]
    assert "--kv-cache-dtype fp8 keeps it" in report.notes[-1]
    with Probe(plan) as probe:
        got = probe.logits(IDS)
    assert cosine(logits(load_reference(open_checkpoint(folder)), IDS), got) > 0.99


@pytest.mark.parametrize("dynamic", [True, False])
def test_experts_of_one_layer_are_stacked_as_they_are_stored(tmp_path: Path, dynamic: bool) -> None:
    from llmc.builder.checkpoint import open_checkpoint

    folder = save_experts(tmp_path / "fp8", dynamic=dynamic)
    flow.dump_passes(folder, tmp_path / "ir", "quantize", precision="fp8", verify_passes=True)
    graph = max((tmp_path / "ir").iterdir()).read_text()
    assert "fp8_scale(" not in graph
    assert graph.count("stored('model.layers.0.block_sparse_moe.experts.1.w3.weight', 'f8e4m3')") == 1
    assert graph.count("stored('model.layers.0.block_sparse_moe.experts.1.w3.weight_scale', 'f32')") == 1
    if not dynamic:  # an input that experts share has the largest of their scales
        quantization = open_checkpoint(folder).quantization
        assert quantization is not None
        experts = "model.layers.0.block_sparse_moe.experts."
        down = [e.input_scale for e in quantization.linears.values() if re.match(rf"{experts}\d\.w2", e.weight)]
        assert len(set(down)) > 1
        assert repr(max(scale for scale in down if scale is not None)) in graph


def test_blocks_are_rounded_anew_and_say_so(tmp_path: Path) -> None:
    folder, _ = save_blocks(tmp_path / "blocks")
    report = flow.build(folder, tmp_path / "p.plan", precision="fp8", evaluate=False, profile=SMALL)
    plan = Plan.open(report.plan)
    assert plan.manifest.build.config["fp8_scales"] == "llmc's"
    assert report.notes[-2] == "FP8 scales are llmc's"
    assert "block of 16 x 16, not to rows): its weights are rounded anew" in report.notes[-1]
    assert report.notes[-1] in quantize_notes(plan)
    assert ("note", report.notes[-1]) in report.rows()


def test_weights_alone_in_fp8_multiply_float32(tmp_path: Path) -> None:
    from llmc.builder.reference import load_reference, logits

    folder = save_compressed(tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))
    report = flow.build(folder, tmp_path / "p.plan", tp=2, evaluate=False, kv_dtype="f32", profile=SMALL)
    plan = Plan.open(report.plan)
    assert plan.manifest.build.config["fp8_activations"] == "none"
    assert "fp8_scale(" not in bytes(plan.section("graph/rank0.ir")).decode()
    with Probe(plan) as probe:
        got = probe.logits(IDS)
    # Beside the numbers that it stands for: head and embedding alone are rounded, to bf16 (1e-5).
    assert cosine(logits(load_reference(open_checkpoint(folder)), IDS), got) > 1 - 3e-5


def test_a_build_without_a_precision_keeps_what_the_checkpoint_is(tmp_path: Path) -> None:
    for folder, precision in {
        save_modelopt(tmp_path / "modelopt"): "fp8",
        save_blocks(tmp_path / "blocks")[0]: "bf16",
        save_checkpoint(tmp_path / "plain"): "bf16",
    }.items():
        assert flow.default_precision(open_checkpoint(folder)) == precision
