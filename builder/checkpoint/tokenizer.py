"""What must be known of a tokenizer at build time, and the tokenizer.json that says the same to every reader.

Comes in: tokenizer.json and tokenizer_config.json. Goes out: `TokenizerFacts`. Must not know: where they came from;
torch, transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.errors import CheckpointError


@dataclass(frozen=True)
class TokenizerFacts:
    """`json` is tokenizer.json as served; `add_bos` whether it puts BOS before a plain text; ids of BOS and EOS."""

    json: bytes
    add_bos: bool
    bos: frozenset[int]
    eos: frozenset[int]


def read_tokenizer(where: Path, raw: bytes, config: dict[str, Any]) -> TokenizerFacts:
    """Raises CheckpointError naming `where` if the tokenizer cannot be read.

    `add_bos_token` and `add_eos_token` of tokenizer_config.json overrule what tokenizer.json does (transformers does
    so as well); where they differ, the returned JSON has the overruling post-processor.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise CheckpointError(f"{where}: the tokenizer cannot be read: {error}") from None
    bos, eos = (_special(tokenizer, config.get(key)) for key in ("bos_token", "eos_token"))
    wanted = (config.get("add_bos_token"), config.get("add_eos_token"))
    has = _adds(tokenizer)
    target = tuple(h if w is None else bool(w and ids) for w, h, ids in zip(wanted, has, (bos, eos), strict=True))
    if target != has:
        tokenizer.post_processor = _template(config, bos if target[0] else (), eos if target[1] else ())
        raw = tokenizer.to_str().encode()
    adds_first = tokenizer.encode("a").ids[:1]
    add_bos = _adds(tokenizer)[0] and (not bos or set(adds_first) <= bos)
    return TokenizerFacts(raw, add_bos, bos, eos)


def _text(token: Any) -> str | None:
    """A token as tokenizer_config.json has it: text, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _special(tokenizer: Any, token: Any) -> frozenset[int]:
    text = _text(token)
    number = tokenizer.token_to_id(text) if text else None
    return frozenset() if number is None else frozenset({number})


def _adds(tokenizer: Any) -> tuple[bool, bool]:
    """Whether something is put before and behind a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    extra = len(whole) - len(plain)
    before = next((i for i in range(extra + 1) if whole[i : i + len(plain)] == plain), extra)
    return before > 0, extra - before > 0


def _template(config: dict[str, Any], bos: Any, eos: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    pieces, special = ["$A:0"], []
    for ids, key in ((bos, "bos_token"), (eos, "eos_token")):
        for number in ids:
            text = str(_text(config[key]))
            special.append((text, number))
            pieces.insert(0 if key == "bos_token" else len(pieces), f"{text}:0")
    return TemplateProcessing(single=pieces, special_tokens=special)
