"""The record of model types, how it is read and shown, and the shrinking of configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmc.artifacts.errors import UsageError
from llmc.cli import main
from llmc.coverage import DIFFERS, WORKS, Coverage, Record, check_families
from llmc.tiny import LENGTH, VOCAB, WINDOW, tiny_config

ROWS = (
    Coverage("alpha", WORKS, "AlphaForCausalLM", 1.0, True, 34.0, 8.0),
    Coverage("beta", DIFFERS, "BetaForCausalLM", 0.5, False, reason="worst cosine 0.5"),
)


def test_a_record_reads_back_what_was_written(tmp_path: Path) -> None:
    record = Record("5.24.0", ROWS)
    record.write(tmp_path / "models.json")
    assert Record.read(tmp_path / "models.json") == record


def test_an_update_replaces_rows_and_drops_those_of_another_release() -> None:
    newer = Coverage("beta", WORKS)
    assert Record("5.24.0", ROWS).updated([newer], "5.24.0").models == (ROWS[0], newer)
    assert Record("5.24.0", ROWS).updated([newer], "5.25.0") == Record("5.25.0", (newer,))


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(UsageError, match=r"'gamma' is not in the record .*llmc models --check gamma"):
        Record("5.24.0", ROWS).select(["gamma"])


def test_the_command_shows_the_record_and_selects(tmp_path: Path) -> None:
    known = Record.read()
    name = known.models[0].model_type
    shown = CliRunner().invoke(main, ["models", name, "--json"])
    assert [row["model_type"] for row in json.loads(shown.output)["models"]] == [name]
    assert name in CliRunner().invoke(main, ["models"]).output
    assert f"transformers {known.transformers}" in CliRunner().invoke(main, ["models", "--summary"]).output


def test_a_record_without_a_check_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["models", "--record", str(tmp_path / "r.json")])
    assert result.exit_code == 2
    assert "only --check has results" in result.output


@pytest.mark.timeout(600)
def test_a_check_that_dies_or_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = check_families(["llama"], timeout=0.01)
    assert (row.status, row.reason) == ("failed", "no answer in 0.01 s")
    monkeypatch.setattr("sys.executable", "/bin/false")
    (row,) = check_families(["llama"], timeout=60)
    assert (row.status, row.reason) == ("failed", "the check's process ended with 1")


def test_configs_are_shrunk_by_the_meaning_of_their_fields() -> None:
    config = tiny_config("gemma3_text")
    assert (config.vocab_size, config.max_position_embeddings, config.sliding_window) == (VOCAB, LENGTH, WINDOW)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.head_dim * config.num_attention_heads != config.hidden_size
    latent = tiny_config("deepseek_v3")
    assert latent.qk_head_dim == latent.qk_nope_head_dim + latent.qk_rope_head_dim
    assert latent.first_k_dense_replace < latent.num_hidden_layers
    assert latent.num_experts_per_tok < latent.n_routed_experts
    shared = tiny_config("zamba2")  # its attention reads hidden states and the embeddings beside them
    assert shared.attention_hidden_size == 2 * shared.hidden_size
    with pytest.raises(UsageError, match="'gamma' is none"):
        tiny_config("gamma")
