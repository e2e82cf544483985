"""What must be known of a tokenizer at build time. Comes in: tokenizer.json and tokenizer_config.json.

Goes out: `TokenizerFacts`. Must not know: where they came from; torch, transformers.

tokenizer.json alone decides what is put around a text. transformers has it so too: where there is a tokenizer.json, the
flags `add_bos_token` and `add_eos_token` of tokenizer_config.json are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.errors import CheckpointError


@dataclass(frozen=True)
class TokenizerFacts:
    """`add_bos`: whether something is put before a plain text; the ids of the tokens called BOS and EOS, if any."""

    add_bos: bool
    bos: frozenset[int]
    eos: frozenset[int]


def read_tokenizer(where: Path, raw: bytes, config: dict[str, Any]) -> TokenizerFacts:
    """Raises CheckpointError naming `where` if the tokenizer cannot be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise CheckpointError(f"{where}: the tokenizer cannot be read: {error}") from None
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    return TokenizerFacts(
        add_bos=whole[: len(plain)] != plain,
        bos=_special(tokenizer, config.get("bos_token")),
        eos=_special(tokenizer, config.get("eos_token")),
    )


def _special(tokenizer: Any, token: Any) -> frozenset[int]:
    """The id of a token as tokenizer_config.json has it: text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    number = tokenizer.token_to_id(text) if text else None
    return frozenset() if number is None else frozenset({number})
