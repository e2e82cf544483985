"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Comes in: a header. Goes out: bytes and dicts as a Hugging Face directory holds them. Must not know: weights.
"""

from __future__ import annotations

from typing import Any

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint.gguf_header import GgufHeader

#: `tokenizer.ggml.pre` of vocabularies whose text is cut as GPT-2 cuts it (source: llama.cpp, llama-vocab.cpp).
_GPT2_SPLIT = ("default", "gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "roberta-bpe")
#: The same after every digit was cut off by itself (source: the same table).
_DIGITS_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(header: GgufHeader) -> tuple[bytes, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; raises for a file without vocabulary or an unknown kind of one."""
    from transformers import TokenizersBackend

    path = header.path
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise CheckpointError(f"{path}: has no tokenizer.ggml.tokens: a file without tokenizer cannot be served")
    digits = _splits_digits(header)
    try:
        # The class that AutoTokenizer ends at for every GGUF; it would convert the whole config a second time first.
        tokenizer = TokenizersBackend.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError, IndexError) as error:
        raise UnsupportedError(
            f"{path}: transformers cannot convert its tokenizer ({error}); build from the Hugging Face directory"
        ) from error
    backend = tokenizer.backend_tokenizer
    if digits:
        from tokenizers import pre_tokenizers

        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return backend.to_str().encode(), _tokenizer_config(header)


def _splits_digits(header: GgufHeader) -> bool:
    """Whether digits are cut apart; raises UnsupportedError for a byte-level vocabulary of unknown cutting."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or pre in GGUF_PRE_TOKENIZER_SPLITS:
        return False
    if pre not in (*_GPT2_SPLIT, *_DIGITS_SPLIT):
        raise UnsupportedError(
            f"{header.path}: tokenizer.ggml.pre is {pre!r}: how that vocabulary cuts text is not known, and guessing "
            f"would give other tokens; build from the Hugging Face directory"
        )
    return pre in _DIGITS_SPLIT


def _token(header: GgufHeader, key: str) -> str | None:
    number = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    tokens = header.metadata["tokenizer.ggml.tokens"]
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{key}_token_id is {number}, the vocabulary has {len(tokens)} tokens"
        )
    return str(tokens[number])


def _tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    config: dict[str, Any] = {ours: _token(header, theirs) for ours, theirs in _TOKENS.items()}
    for flag in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{flag}" in header.metadata:
            config[flag] = header.metadata[f"tokenizer.ggml.{flag}"]
    return {key: value for key, value in config.items() if value is not None}


def chat_template(header: GgufHeader) -> str | None:
    """The key tokenizer.chat_template."""
    template = header.metadata.get("tokenizer.chat_template")
    return None if template is None else str(template)


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """BOS, and every token that ends a generation: end of text, of turn, of message."""
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config = {
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({int(e) for e in ends if e is not None}) or None,
    }
    return {key: value for key, value in config.items() if value is not None}
