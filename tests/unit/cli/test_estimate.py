"""`llmc estimate` on the command line: from a checkpoint and from a config alone, as table, JSON and formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmc.cli import main
from tests.models import save_checkpoint, tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    tiny_config("qwen2").save_pretrained(folder)
    return folder


def run(model: Path, *options: str, target: str = "cuda:sm_90") -> Result:
    return CliRunner().invoke(main, ["estimate", "--target", target, "--model", str(model), *options])


def test_a_config_alone_says_what_its_checkpoint_says(config: Path, tmp_path: Path) -> None:
    whole = save_checkpoint(tmp_path / "model", "qwen2")
    answers = [run(model, "--fp8", "--tp", "2", "--json") for model in (config, whole)]
    assert [a.exit_code for a in answers] == [0, 0], answers[0].output
    first, second = (json.loads(a.output) for a in answers)
    assert first["figures"] == second["figures"]
    assert (first["decode"], first["prefill"]) == (second["decode"], second["prefill"])
    assert first["tp"] == 2
    assert first["gpu"] == "H100 SXM"


def test_table_and_formulas(config: Path) -> None:
    result = run(config, "--batch", "1,16", "--context", "128", "--rate", "10", "--explain")
    assert result.exit_code == 0, result.output
    for word in (
        "decode ceiling",
        "crossover batch",
        "replicas for --rate",
        "decode_ceiling = bandwidth / rank_weights",
    ):
        assert word in result.output
    data = json.loads(run(config, "--batch", "1,16", "--context", "128", "--json", "--explain").output)
    assert [row["batch"] for row in data["decode"]] == [1, 16]
    assert data["figures"]["decode_ceiling"]["formula"] == "bandwidth / rank_weights"


@pytest.mark.parametrize(
    ("options", "target", "code", "word"),
    [
        ((), "cpu", 2, "llmc bench"),
        ((), "cuda:sm_70", 2, "cuda:sm_80"),
        (("--gpu", "h100"), "cuda:sm_90", 2, "h100-sxm"),
        (("--gpu", "a100-sxm-80gb"), "cuda:sm_90", 2, "sm_80"),
        (("--int8",), "cuda:sm_90", 2, "--fp8"),
        (("--fp8",), "cuda:sm_80", 2, "no FP8"),
        (("--kv-cache-dtype", "fp8"), "cuda:sm_80", 2, "--kv-cache-dtype"),
        (("--kv-cache-dtype", "fp7"), "cuda:sm_90", 2, "fp7"),
        (("--context", "100000"), "cuda:sm_90", 2, "256"),
        (("--context", "64", "--answer", "64"), "cuda:sm_90", 2, "--answer"),
        (("--fp8", "--int8"), "cuda:sm_90", 2, "exclude"),
    ],
)
def test_mistakes_are_named(config: Path, options: tuple[str, ...], target: str, code: int, word: str) -> None:
    result = run(config, *options, target=target)
    assert result.exit_code == code
    assert "error: " in result.output
    assert word in result.output


def test_a_quantized_config_needs_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {}}))
    result = run(tmp_path)
    assert result.exit_code == 3
    assert "quantization_config" in result.output
