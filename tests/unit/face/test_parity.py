"""Tokenizer and chat template of a checkpoint against transformers: the same, or an error that names the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint import open_checkpoint
from llmc.conversations import conversations, texts
from llmc.parity import Parity, check_parity
from llmc.runtime.chat_template import ChatTemplate
from llmc.runtime.text import Tokenizer
from tests.models import CHAT_TEMPLATE, FAMILIES, VOCAB, save_checkpoint

SPECIAL = ["<s>", "</s>"]
#: A template with what published ones do: system only first, roles in turn, tools as JSON, contents trimmed.
STRICT = """{%- if tools is not none %}[TOOLS]{{ tools | tojson(indent=2) }}{% endif %}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_and_writes_text_as_transformers_does(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path / family, family))
    found = check_parity(checkpoint)
    assert (found.conversations, found.refused) == (len(conversations(SPECIAL)), 0)
    assert found.texts == len(texts(())) + 6


def test_what_a_template_refuses_both_refuse(model: Path, tmp_path: Path) -> None:
    found = check_parity(open_checkpoint(changed(model, tmp_path, "chat_template.jinja", STRICT)))
    assert 4 < found.refused < found.conversations - 4
    assert str(found) == f"{found.texts} texts and {found.conversations} conversations ({found.refused} refused by the template) as transformers"  # fmt: skip  # noqa: E501


def test_a_checkpoint_without_a_template(model: Path, tmp_path: Path) -> None:
    copy = changed(model, tmp_path, "chat_template.jinja", None)
    assert check_parity(open_checkpoint(copy)) == Parity(len(texts(())) + 6, 0, 0)


def test_a_rendering_that_differs_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: honest(*a, **k).replace("terse", "verbose"))
    with pytest.raises(
        CheckpointError, match=r"conversation 'system': the runtime renders .*verbo.* transformers .*ters"
    ):
        check_parity(open_checkpoint(model))


def test_a_refusal_on_one_side_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ChatTemplate.render

    def render(self: ChatTemplate, messages, **options) -> str:  # type: ignore[no-untyped-def]
        if messages[0]["role"] == "narrator":
            raise ValueError("no narrators")
        return honest(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", render)
    with pytest.raises(CheckpointError, match="'unknown role': runtime refuses what transformers renders"):
        check_parity(open_checkpoint(model))


def test_ids_that_differ_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **k: honest(self, text.replace("\t", " "), **k))
    with pytest.raises(CheckpointError, match=r"text 'two  spaces.*runtime encodes \[.*they differ from token \d+ on"):
        check_parity(open_checkpoint(model))


def test_streamed_text_that_differs_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.text._ByteDetokenizer.flush", lambda self: "!")
    with pytest.raises(CheckpointError, match="the runtime decodes token by token '!', transformers ''"):
        check_parity(open_checkpoint(model))


def test_a_token_without_a_row_in_the_embedding(model: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": VOCAB, "content": "<|extra|>"}
    tokenizer["added_tokens"].append(extra)
    copy = changed(model, tmp_path, "tokenizer.json", json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=rf"gives '<\|extra\|>' the id {VOCAB}, but the model's vocab_size is {VOCAB}"
    ):
        check_parity(open_checkpoint(copy))


def test_a_tokenizer_that_transformers_cannot_load(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    bad = json.dumps({**config, "tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}})
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer"):
        check_parity(open_checkpoint(changed(model, tmp_path, "tokenizer_config.json", bad)))


def changed(model: Path, folder: Path, name: str, text: str | None) -> Path:
    """A copy of the checkpoint with one file of other content, or none."""
    assert CHAT_TEMPLATE in (model / "chat_template.jinja").read_text()
    copy = folder / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / name).unlink()
    if text is not None:
        (copy / name).write_text(text)
    return copy


@pytest.mark.real_model
def test_the_real_model(real_gguf: Path) -> None:
    found = check_parity(open_checkpoint(real_gguf))
    assert found.conversations > 10
    assert found.refused < 3
