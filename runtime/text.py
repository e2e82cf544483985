"""Text to token ids and back: the plan's tokenizer, and a detokenizer that works token by token.

Comes in: tokenizer/tokenizer.json of a plan. Goes out: ids, text, the bytes of a token. Must not know: HTTP, the core,
transformers.

The increments of a detokenizer, joined, equal the text of all tokens decoded at once. Bytes that are not yet a whole
character are held back. (A SentencePiece tokenizer decodes a run of byte tokens with one bad byte in it to nothing but
U+FFFD; whole characters that were already shown stay shown.)
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from llmc.artifacts.errors import PlanError
from llmc.runtime.params import RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Tokens of the prompt that a detokenizer may look back at: enough for a word and its space.
_CONTEXT = 6
#: After so many tokens without a whole character the bytes will never become one.
_MAX_HELD = 16
#: A text of fewer characters a token than this is split to see how many tokens it has.
_SHORT = 16


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""


def _gpt2_bytes() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this is the way back (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_CHAR_TO_BYTE = _gpt2_bytes()


class _Pieces(dict[int, bytes]):
    """The bytes of each token, worked out once when first asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, byte_level: bool, sentencepiece: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._sentencepiece = sentencepiece

    def __missing__(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:  # a row that pads the vocabulary
            piece = b""
        elif self._byte_level:
            try:
                piece = bytes([_CHAR_TO_BYTE[c] for c in name])
            except KeyError:  # an added token is written as it is
                piece = name.encode()
        elif match := _BYTE_TOKEN.fullmatch(name):
            piece = bytes([int(match[1], 16)])
        elif self._sentencepiece:
            piece = name.replace("▁", " ").encode()
        else:
            piece = self._tokenizer.decode([token], skip_special_tokens=False).encode()
        self[token] = piece
        return piece


class _ByteDetokenizer:
    """For byte-level BPE: a token is its bytes, whatever stands around it."""

    def __init__(self, pieces: _Pieces, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return "" if token in self._skip else self._decode(self._pieces[token])

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """For every other tokenizer: decodes a window that starts far enough back for the decoder to see its context."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context)
        self._shown = len(self._ids)  # ids before this index have been shown
        self._clean: list[int] = []  # indices where a character ended: a window may start there
        self._prefix = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _MAX_HELD:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return "" if self._shown == len(self._ids) else self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._prefix = text
        self._shown = len(self._ids)
        if not text.endswith("\ufffd"):
            self._clean.append(self._shown)
        if self._shown > 3 * _CONTEXT:
            self._shorten()
        return new

    def _shorten(self) -> None:
        """Moves the window's start to a character's end, if what remains decodes to something.

        A window that decodes to nothing would make the decoder take the next token for the start of the text.
        """
        start = max((i for i in self._clean if i <= len(self._ids) - _CONTEXT), default=0)
        if start and (prefix := self._decode(self._ids[start:])):
            self._ids = self._ids[start:]
            self._shown = len(self._ids)
            self._prefix = prefix
            self._clean = [i - start for i in self._clean if i > start]


class Tokenizer:
    """The plan's tokenizer. `bos` is the id that a plain prompt starts with, if it does.

    A text that cannot fit into `most` tokens is refused unread: splitting one takes 150 times its size in memory.
    """

    def __init__(self, tokenizer_json: bytes, bos: int | None = None, most: int | None = None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises nothing more precise
            raise PlanError(f"section tokenizer/tokenizer.json cannot be read: {error}; rebuild the plan") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder: dict[str, Any] = {}
        if self._tokenizer.decoder is not None:
            decoder = json.loads(self._tokenizer.decoder.__getstate__())
        parts = decoder.get("decoders", [decoder])
        self._byte_level = [part.get("type") for part in parts] == ["ByteLevel"]
        self._pieces = _Pieces(self._tokenizer, self._byte_level, "▁" in json.dumps(decoder, ensure_ascii=False))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._bos = bos
        self._most = most

    @functools.cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids; with `add_special_tokens` BOS comes first where the model wants it, and only once.

        Raises RequestError, naming `param`, for a text with half of a surrogate pair in it (no UTF-8 can write it), and
        for one of more characters than the longest tokens could cover.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is not valid Unicode: {error.reason}", param) from error
        if self._most is not None and len(text) > _SHORT * self._most and len(text) > self._longest * self._most:
            raise RequestError(
                f"{param} has {len(text)} characters; this engine's max_seq_len is {self._most} tokens, of at most "
                f"{self._longest} characters each. Shorten it, or build with a profile of a larger max_seq_len",
                param,
                "context_length_exceeded",
            )
        # The batch call lets go of the interpreter lock, the single one does not.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens or self._bos is None:
            return ids
        if ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids[1:] if ids[1:2] == [self._bos] else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; special tokens as they are written."""
        return self._pieces[token]

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer of an answer to the prompt `context` (empty: the answer stands alone)."""
        if self._byte_level:
            return _ByteDetokenizer(self._pieces, self._special if skip_special_tokens else frozenset())
        tail = list(context[-_CONTEXT:])
        while tail and _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(tail[0]) or ""):
            del tail[0]  # perhaps the middle of a character
        return _WindowDetokenizer(self._tokenizer, tail, skip_special_tokens)
