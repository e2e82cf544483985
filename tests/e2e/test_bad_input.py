"""What users get wrong, through the command line: one clear error that names it, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmc.artifacts.plan import Plan
from llmc.cli import main
from tests.builds import SMALL
from tests.models import save_checkpoint

USAGE, CHECKPOINT, UNSUPPORTED, ENVIRONMENT = 2, 3, 4, 6
pytestmark = pytest.mark.timeout(600)


def llmc(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], env=env)


def refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    line = next(line for line in result.output.splitlines() if "rror:" in line)
    for word in words:
        assert word in line, line


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", "llama")


@pytest.fixture(scope="module")
def good_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    model = save_checkpoint(folder / "model", "llama")
    plan = folder / "engine.plan"
    result = llmc("build", "--model", model, "--dtype", "fp32", "--no-evaluate", "--profile", SMALL, "-o", plan)
    assert result.exit_code == 0, result.output
    return plan


def build(model: Path, *options: object, out: Path | None = None) -> Result:
    out = out or model.parent / "engine.plan"
    result = llmc("build", "--model", model, "--dtype", "fp32", "--no-evaluate", "-o", out, *options)
    assert not list(out.parent.glob(".*partial")), "a half-written plan remains"
    if result.exit_code:
        assert not out.exists()
    return result


def test_missing_and_empty_model_paths(tmp_path: Path) -> None:
    refused(build(tmp_path / "nowhere"), CHECKPOINT, "nowhere")
    (tmp_path / "empty").mkdir()
    refused(build(tmp_path / "empty"), CHECKPOINT, "empty folder")


def test_truncated_safetensors(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(build(checkpoint), CHECKPOINT, "model.safetensors")


def test_garbage_instead_of_safetensors(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"
    )
    refused(build(checkpoint), CHECKPOINT, "model.safetensors")


def test_a_config_of_another_shape_or_with_more_layers(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 8}))
    refused(build(checkpoint), CHECKPOINT, "mlp", "shape")
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(build(checkpoint), CHECKPOINT, "layers.2")


def test_more_ranks_than_heads(checkpoint: Path) -> None:
    refused(build(checkpoint, "--tp", 10), UNSUPPORTED, "10", "9")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("token_rangs: []\n", ("token_rangs",)),
        ("token_ranges: [{min: 9, opt: 9, max: 8}]\nmax_num_seqs: 4\n", ("min 9", "max 8")),
        ("- a list\n", ("x.yaml",)),
    ],
)
def test_bad_profiles(checkpoint: Path, text: str, words: tuple[str, ...]) -> None:
    profile = checkpoint.parent / "x.yaml"
    profile.write_text(text)
    refused(build(checkpoint, "--profile", profile), USAGE, *words)
    refused(build(checkpoint, "--profile", "chatt"), USAGE, "chatt", "chat")


def test_a_profile_with_room_for_eight_tokens_is_built_and_asked_within_it(checkpoint: Path) -> None:
    profile, plan = checkpoint.parent / "short.yaml", checkpoint.parent / "engine.plan"
    profile.write_text("token_ranges: [{min: 1, max: 4}]\nmax_num_seqs: 2\nmax_seq_len: 8\n")
    assert build(checkpoint, "--profile", profile).exit_code == 0
    assert json.loads(bytes(Plan.open(plan).section("golden.json")))["tokens"] == 4
    result = llmc("verify", plan, "--run")
    assert result.exit_code == 0, result.output


def test_unknown_target(checkpoint: Path) -> None:
    refused(build(checkpoint, "--target", "cpu:x86-64-v9"), USAGE, "x86-64-v9")


def test_missing_compiler(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = checkpoint.parent / "bin"
    only.mkdir()
    monkeypatch.setenv("PATH", str(only))
    refused(build(checkpoint), ENVIRONMENT, "g++")


def test_an_output_folder_that_cannot_be_written(checkpoint: Path) -> None:
    blocker = checkpoint.parent / "file"
    blocker.write_text("")
    for output in (blocker / "engine.plan", checkpoint):
        result = llmc("build", "--model", checkpoint, "--dtype", "fp32", "--no-evaluate", "-o", output)
        refused(result, ENVIRONMENT, str(output.name if output.is_dir() else blocker), "--output")


def test_what_a_build_would_write_at_its_end_is_refused_at_its_start(checkpoint: Path) -> None:
    blocker, lock = checkpoint.parent / "file", checkpoint.parent / "llmc.lock"
    blocker.write_text("")
    lock.write_text("{")
    refused(build(checkpoint, "--report", blocker / "r.json"), ENVIRONMENT, str(blocker), "--report")
    refused(build(checkpoint, "--lock", blocker / "l.lock"), ENVIRONMENT, str(blocker), "--lock")
    refused(build(checkpoint, "--lock", lock), CHECKPOINT, "llmc.lock", "is not a lock file")
    refused(llmc("calibrate", "--model", checkpoint, "-o", blocker / "t.json"), ENVIRONMENT, str(blocker))


def test_options_that_would_be_ignored_are_refused(good_plan: Path) -> None:
    model = good_plan.parent / "model"
    for option in (("-o", "x.plan"), ("--lock", "x.lock"), ("--no-evaluate",), ("--calib", "x"), ("--report", "r")):
        name = option[0].replace("-o", "--output")
        refused(llmc("build", "--model", model, "--dry-run", *option), USAGE, "--dry-run", name)
    refused(llmc("inspect", good_plan, "--rank", 0), USAGE, "--rank 0", "--graph")
    refused(llmc("inspect", good_plan, "--graph", "--json"), USAGE, "--graph", "--json")


def test_calibration_input(checkpoint: Path, tmp_path: Path) -> None:
    refused(build(checkpoint, "--calib", tmp_path / "x.txt"), USAGE, "--calib", "--fp8")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    result = llmc("build", "--model", checkpoint, "--fp8", "--calib", empty, "-o", tmp_path / "e.plan")
    refused(result, USAGE, "empty.txt")
    table = tmp_path / "table.json"
    table.write_text("{}")
    refused(
        llmc("build", "--model", checkpoint, "--fp8", "--calib", table, "-o", tmp_path / "e.plan"), USAGE, "table.json"
    )
    refused(llmc("build", "--model", checkpoint, "--fp8", "--dtype", "bf16"), USAGE, "--fp8", "--dtype")


def test_damaged_plans_are_refused_before_anything_is_loaded(good_plan: Path, tmp_path: Path) -> None:
    data = good_plan.read_bytes()
    for section in Plan.open(good_plan).manifest.sections:
        path = tmp_path / "flipped.plan"
        flipped = bytearray(data)
        flipped[section.offset + section.size // 2] ^= 4
        path.write_bytes(flipped)
        refused(llmc("run", path, "--prompt", "a"), CHECKPOINT, section.name)
        refused(llmc("verify", path), CHECKPOINT, section.name)
    (tmp_path / "short.plan").write_bytes(data[: len(data) // 2])
    refused(llmc("run", tmp_path / "short.plan", "--prompt", "a"), CHECKPOINT, "short.plan")
    refused(llmc("serve", tmp_path / "short.plan"), CHECKPOINT, "short.plan")
    refused(llmc("inspect", tmp_path / "none.plan"), CHECKPOINT, "none.plan")


def test_a_checkpoint_that_differs_by_one_byte(good_plan: Path, tmp_path: Path) -> None:
    other = shutil.copytree(good_plan.parent / "model", tmp_path / "other")
    assert llmc("verify", good_plan, "--model", other).exit_code == 0
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(llmc("verify", good_plan, "--model", other), CHECKPOINT, "model.safetensors")
    refused(llmc("serve", good_plan, "--model", other), CHECKPOINT, "model.safetensors")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--top-p", "0"), ("top_p",)),
        (("--build-report", "x.json"), ("--build-report", "--table")),
        (("--logprobs", "3"), ("--logprobs", "--json")),
        (("--table", "--json"), ("--table", "--json")),
        (("--system", "Be brief."), ("--system", "--chat")),
        (("--max-tokens", "0"), ("max_tokens",)),
        (("--max-tokens", "100000"), ("100000",)),
        (tuple(x for i in range(40) for x in ("--stop", f"s{i}")), ("stop", "40")),
    ],
)
def test_bad_sampling_options(good_plan: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(llmc("run", good_plan, "--prompt", "the fox", *options), USAGE, *words)


def test_limits_may_only_go_down(good_plan: Path) -> None:
    refused(llmc("serve", good_plan, "--max-num-seqs", "100000"), USAGE, "100000")
    refused(llmc("serve", good_plan, "--kv-bytes", "1"), USAGE, "kv-bytes")


def test_dry_run_needs_no_compiler_and_writes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    result = llmc("build", "--model", checkpoint, "--tp", 2, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)
    assert not (checkpoint.parent / "engine.plan").exists()


def test_a_defect_of_llmc_is_one_line_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("llmc.flow.build", broken)
    result = llmc("build", "--model", checkpoint, "--dtype", "fp32")
    refused(result, 1, "RuntimeError: first line", "LLMC_TRACEBACK=1")
    assert "second line" not in result.output
    with_trace = llmc("build", "--model", checkpoint, "--dtype", "fp32", env={"LLMC_TRACEBACK": "1"})
    assert isinstance(with_trace.exception, RuntimeError)


def test_a_config_that_transformers_refuses(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": "wide"}))
    refused(build(checkpoint), CHECKPOINT, "config.json", "hidden_size")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "max_position_embeddings", 0),
        ("generation_config.json", "eos_token_id", "</s>"),
        ("generation_config.json", "temperature", -1.0),
    ],
)
def test_fields_that_only_the_runtime_needs(checkpoint: Path, file: str, field: str, value: object) -> None:
    path = checkpoint / file
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    refused(build(checkpoint), CHECKPOINT, file, field, str(value))


def test_a_chat_template_that_cannot_be_compiled(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% if")
    refused(build(checkpoint), CHECKPOINT, "chat template", "line 1")
