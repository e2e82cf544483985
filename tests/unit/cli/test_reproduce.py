"""What `llmc inspect --command` and `--config` say of plans of each kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Choice, Ranges, RoundedFile
from llmc.artifacts.plan import Plan, PlanWriter
from llmc.artifacts.schema import BuildInfo, CheckpointPin, ShapeProfile, SourceFile, Target, TokenRange
from llmc.cli import main, reproduce
from tests.unit.artifacts.test_plan import manifest

CONFIG: dict[str, object] = {
    "precision": "fp8", "kv_dtype": "bf16", "tp": 2, "profile": "chat", "target": "cpu:x86-64-v3",
    "fp8_activations": "token", "fp8_scales": "llmc's", "gate": "ppl=1.5%,kl=0.02", "eval_windows": 12,
    "eval_length": 512, "fp8_budget": 1.1, "lm_head_dtype": "fp8",
}  # fmt: skip
DATA = CalibrationData("documentation strings", "0" * 64, 1, 2, 0)
RANGES = CalibrationTable("d" * 64, "0.47", "max", DATA, {"a": Ranges(1.0, (1.0,))})
ROUNDED = dataclasses.replace(
    RANGES,
    tensors={"a": Ranges(1.0, (1.0,), Choice(False, 0.25, 1.0, 0.03))},
    activations="token",
    budget=1.1,
    rounded=RoundedFile("t.safetensors", "e" * 64),
)


def write(
    path: Path,
    table: CalibrationTable | None,
    config: dict[str, object],
    flags: tuple[str, ...] = (),
    **changes: object,
) -> Plan:
    build = BuildInfo("llmc 0.1.0", "g++ 12", flags, str(config["precision"]), "bf16", 2, config, {"torch": "2.13"})
    with PlanWriter(path) as writer:
        if table is not None:
            writer.add("calibration.json", table.to_json())
        writer.seal(manifest(build=build, **changes))
        writer.publish()
    return Plan.open(path)


def test_a_table_of_ranges_comes_out_of_the_plan(tmp_path: Path) -> None:
    text = reproduce.command(write(tmp_path / "x.plan", RANGES, CONFIG))
    *comments, line = text.splitlines()
    assert line == (
        "llmc build --model tiny --fp8 --profile chat --kv-cache-dtype bf16 --tp 2 --target cpu:x86-64-v3 "
        "--fp8-activations token --gate ppl=1.5%,kl=0.02 --eval-windows 12 --eval-length 512 --fp8-budget 1.1 "
        "--lm-head-dtype fp8 "
        "--calib calibration.json --output x.plan"
    )
    assert comments == [
        f"# tiny: the checkpoint with digest {'d' * 64}",
        "# the same bytes with llmc 0.1.0, g++ 12, torch 2.13",
        f"# calibration.json: unzip -p {tmp_path}/x.plan calibration.json > calibration.json",
    ]


def test_rounded_weights_are_named_by_their_hash(tmp_path: Path) -> None:
    text = reproduce.config(write(tmp_path / "x.plan", ROUNDED, CONFIG))
    assert f"# calibration.json: the table of this build (documentation strings), beside it its rounded weights with sha256 {'e' * 64}" in text  # fmt: skip  # noqa: E501
    assert yaml.safe_load(text)["calib"] == "calibration.json"


def test_the_name_of_a_tables_file_is_not_in_its_bytes() -> None:
    other = dataclasses.replace(ROUNDED, rounded=RoundedFile("u.safetensors", "e" * 64))
    assert ROUNDED.to_json() != other.to_json()
    assert ROUNDED.named("calibration").to_json() == other.named("calibration").to_json()
    assert RANGES.named("calibration") == RANGES


def test_scales_that_a_checkpoint_brought_are_no_options(tmp_path: Path) -> None:
    config = {**CONFIG, "fp8_activations": "static", "fp8_scales": "the checkpoint's (modelopt)"}
    del config["fp8_budget"], config["lm_head_dtype"]
    options = reproduce.options(write(tmp_path / "x.plan", None, config))
    assert options["fp8"] is True
    assert not {name for name in options if name.startswith("fp8-")}


def test_every_name_that_is_printed_is_an_option(tmp_path: Path) -> None:
    from llmc.cli.build import command
    from llmc.cli.config import option_name

    printed = reproduce.options(
        write(tmp_path / "x.plan", ROUNDED, {**CONFIG, "eval": "mine.txt", "no_evaluate": True})
    )
    assert printed.keys() <= {option_name(parameter) for parameter in command.params}


def test_a_profile_of_ones_own_and_a_gguf_and_a_text(tmp_path: Path) -> None:
    pin = CheckpointPin("d" * 64, "gguf", (SourceFile("tiny.gguf", 2, "a" * 64),))
    config = {**CONFIG, "precision": "bf16", "profile": "short", "eval": "mine.txt", "gate": "off"}
    plan = write(
        tmp_path / "x.plan",
        None,
        config,
        checkpoint=pin,
        profile=ShapeProfile("short", (TokenRange(1, 4, 4),), 2, 8, 16),
    )
    text = reproduce.config(plan)
    options = yaml.safe_load(text)
    assert (options["model"], options["dtype"], options["profile"]) == ("tiny.gguf", "bf16", "short.yaml")
    assert (options["eval"], options["gate"]) == ("mine.txt", "off")
    (comment,) = [line for line in text.splitlines() if line.startswith("# short.yaml: ")]
    assert yaml.safe_load(comment.removeprefix("# short.yaml: ")) == {
        "token_ranges": [{"min": 1, "opt": 4, "max": 4}], "max_num_seqs": 2, "max_seq_len": 8, "block_size": 16,
        "outside": "reject",
    }  # fmt: skip


FLAGS = ("-O3", "-DLLMC_PACKED_ROWS=8", "-DLLMC_BLOCK=256", "-DLLMC_CHUNK_ROWS=240", "-DLLMC_PREFETCH_BYTES=2048")
NUMBERS = "{packed_rows: 8, block: 256, chunk_rows: 240, prefetch_bytes: 2048}"
SM_90 = Target("cuda", "sm_90", (), 13000)


@pytest.mark.parametrize(
    ("config", "flags", "changes", "shown"),
    [
        ({}, FLAGS, {}, f"default: {NUMBERS}"),
        ({"tactics": "mine.yaml"}, FLAGS, {}, f"mine.yaml: {NUMBERS}"),
        ({}, FLAGS, {"target": SM_90}, "default, of cuda:sm_90"),
        (
            {"tactics": "mine.yaml"},
            ("--tactic=linear.few.rows=16", *FLAGS),
            {"target": SM_90},
            "mine.yaml: {linear: {few: {rows: 16}}}",
        ),
        ({}, FLAGS, {"target": Target("tensorrt", "sm_90", (), 13000)}, None),
    ],
)
def test_the_tactics_of_a_plan(
    tmp_path: Path, config: dict[str, object], flags: tuple[str, ...], changes: dict[str, object], shown: str | None
) -> None:
    assert reproduce.tactics(write(tmp_path / "x.plan", None, {**CONFIG, **config}, flags, **changes)) == shown


@pytest.mark.parametrize("forms", [("--command", "--config"), ("--json", "--command")])
def test_one_form_at_a_time(tmp_path: Path, forms: tuple[str, ...]) -> None:
    write(tmp_path / "x.plan", None, CONFIG)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "x.plan"), *forms])
    assert result.exit_code == 2
    assert "exclude one another" in result.output
