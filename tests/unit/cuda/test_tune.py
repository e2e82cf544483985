"""`llmc tune` for a GPU: which blockings are tried, which one is taken, what the file says. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.plan import Plan
from llmc.artifacts.types import TensorType
from llmc.cli import main
from llmc.plugins.cuda.call import CudaEnv
from llmc.plugins.paged_attention import OPERATOR, Attrs
from llmc.profiles import CudaTarget, changed_tactics, load_target
from llmc.runtime.cuda.gpus import Gpu, Survey
from llmc.tune import CUDA_CHOICES, STEPS, Trial, _flat, tune
from tests.models import save_checkpoint
from tests.unit.cuda.harness import launches

SHAPE = {"precision": "bf16", "profile": ""}
#: Two blockings that a bf16 model may have, and one that it has not.
KEYS = ("linear.skinny.warps", "linear.skinny.columns", "linear.int4.warps", "linear.int4.columns")


def test_what_is_faster_is_taken_and_what_no_kernel_has_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_checkpoint(tmp_path / "tiny", "llama")
    profile = tmp_path / "small.yaml"
    profile.write_text("token_ranges: [{min: 1, max: 32}]\nmax_num_seqs: 8\nmax_seq_len: 64\n")

    def seconds(path: Path, repeats: int) -> dict[int, float]:
        """Sixteen columns are the best, and eight warps the worst. There are two plans, and nobody has asked them."""
        assert len(list(path.parent.glob("*.plan"))) == 2
        assert "golden.json" not in Plan.open(path)
        own = yaml.safe_load(path.with_suffix(".yaml").read_text()).get("linear", {}).get("skinny", {})
        return dict.fromkeys(STEPS, own.get("warps", 4) * 0.1 + own.get("columns", 32) / 16)

    def flat(target: CudaTarget) -> dict[str, int]:
        return {key: value for key, value in _flat(target).items() if key in KEYS}

    monkeypatch.setattr("llmc.tune.survey", lambda: Survey(13000, (Gpu("A", 90, 1, 1),)))
    monkeypatch.setattr("llmc.tune._gpu_seconds", seconds)
    monkeypatch.setattr("llmc.tune._flat", flat)
    monkeypatch.setattr("llmc.tune.CUDA_CHOICES", {"warps": (4, 8), "columns": (16, 32)})
    heard: list[tuple[str, int, bool]] = []

    def tell(trial: Trial, taken: bool) -> None:
        heard.append((trial.key, trial.value, taken))

    found = tune(model, "cuda:sm_90", {**SHAPE, "profile": str(profile)}, 1, tell)
    assert heard == [("linear.skinny.warps", 8, False), ("linear.skinny.columns", 16, True)]
    assert yaml.safe_load(found) == {"linear": {"skinny": {"columns": 16}}}
    file = tmp_path / "tactics.yaml"
    file.write_text(found)
    target = load_target("cuda:sm_90", file)
    assert isinstance(target, CudaTarget)
    changed: Mapping[str, object] = changed_tactics(target)
    assert changed == yaml.safe_load(found)


def test_without_such_a_gpu_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["tune", "--model", str(tmp_path), "--target", "cuda:sm_90", "-o", str(tmp_path / "t.yaml")]
    monkeypatch.setattr("llmc.runtime.cuda.gpus.has_gpu_driver", lambda: False)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 6
    assert "this machine has no driver of an NVIDIA GPU" in done.output
    monkeypatch.setattr("llmc.tune.survey", lambda: Survey(13000, (Gpu("A", 89, 1, 1),)))
    with pytest.raises(EnvironmentFault, match=r"GPU 0 \(A\) is of sm_89"):
        tune(tmp_path, "cuda:sm_90", SHAPE, 1, lambda trial, taken: None)


@pytest.mark.parametrize("isa", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_attention_is_tuned_and_takes_a_files_numbers(isa: str, tmp_path: Path) -> None:
    target = load_target(f"cuda:{isa}")
    assert isinstance(target, CudaTarget)
    for key in ("paged_attention.decode.partition", "paged_attention.mixed_wide.keys", "latent_attention.mixed.rows"):
        assert key in _flat(target)
        assert len(CUDA_CHOICES[key.rpartition(".")[2]]) > 1
    file = tmp_path / "tactics.yaml"
    file.write_text("paged_attention: {decode: {partition: 512, keys: 32, warps: 8}, mixed: {rows: 32}}\n")
    changed = load_target(f"cuda:{isa}", file)
    assert isinstance(changed, CudaTarget)
    env = CudaEnv(target.sm, (1, 64), True, max_context=4096, tactics=changed.tactics["paged_attention"])
    attrs, types = Attrs(0, 8, 2, 64, 0.125), [TensorType("f32", ("T", 8, 64))]
    decode, _ = launches(OPERATOR, attrs, types, env)
    assert (decode.constexprs["PARTITION"], decode.constexprs["KEYS"], decode.num_warps) == (512, 32, 8)
    (mixed,) = launches(OPERATOR, attrs, types, replace(env, decode=False))
    assert (mixed.constexprs["ROWS"], mixed.num_warps) == (32, 4)
