"""What a tokenizer puts around a text, and that it is what transformers puts there."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.checkpoint.tokenizer import read_tokenizer
from tests.models import BOS, EOS, tiny_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


@pytest.mark.parametrize(
    ("template", "add_bos"), [("<s> $A", True), ("<s> $A </s>", True), ("$A </s>", False), ("$A", False)]
)
def test_add_bos(template: str, add_bos: bool) -> None:
    backend = tiny_tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    facts = read_tokenizer(Path("x"), backend.to_str().encode(), TOKENS)
    assert (facts.add_bos, facts.bos, facts.eos) == (add_bos, {BOS}, {EOS})


def test_tokens_that_the_vocabulary_lacks_have_no_id(saved: Path) -> None:
    facts = read_tokenizer(Path("x"), (saved / "tokenizer.json").read_bytes(), {"bos_token": None, "eos_token": "<?>"})
    assert (facts.bos, facts.eos) == (frozenset(), frozenset())


def test_the_json_is_passed_on_and_encodes_as_transformers_does(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    for flag in (True, False):
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag}
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
        raw = open_checkpoint(copy).tokenizer_json
        assert raw == (saved / "tokenizer.json").read_bytes()
        ours = Tokenizer.from_str(raw.decode())
        assert ours.encode("the other fox").ids == AutoTokenizer.from_pretrained(copy)("the other fox").input_ids, flag
