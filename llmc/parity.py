"""Holds the runtime's tokenizer and chat template against transformers': the same text, the same ids, or no plan.

Comes in: a `Checkpoint`. Goes out: `Parity`, or CheckpointError naming the conversation or text and the first
difference. Must not know: plans, engines.

The reference is the class that the checkpoint names, on the checkpoint's own files. A GGUF has none: there it is
transformers' tokenizer of the tokenizer.json that was converted from it. What a template refuses (no system role, roles
out of order) both sides must refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint import Checkpoint
from llmc.conversations import Conversation, conversations, texts
from llmc.runtime.chat_template import ChatTemplate, special_tokens
from llmc.runtime.text import Tokenizer

#: Special tokens that are put inside texts; some vocabularies have thousands.
_SPECIAL = 8
#: Classes that take tokenizer.json as it is. AutoTokenizer puts what a model type usually has in their place.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Characters shown around a difference.
_SHOWN = 24


@dataclass(frozen=True)
class Parity:
    """What was compared: plain texts, conversations, and how many of those the template refuses, on both sides."""

    texts: int
    conversations: int
    refused: int

    def __str__(self) -> str:
        if not self.conversations:
            return f"{self.texts} texts as transformers; no chat template"
        refused = f" ({self.refused} refused by the template)" if self.refused else ""
        return f"{self.texts} texts and {self.conversations} conversations{refused} as transformers"


def check_parity(checkpoint: Checkpoint) -> Parity:
    """Raises CheckpointError at the first difference in rendering, ids or decoded text, whole or streamed, and for a
    tokenizer with ids that the model has no row for.
    """
    info = checkpoint.model_info()
    backend = Backend.from_str(checkpoint.tokenizer_json.decode())
    _check_ids(checkpoint, backend, info.vocab_size)
    reference = _reference(checkpoint, backend)
    tokenizer = Tokenizer(bytes(checkpoint.tokenizer_json), info.bos_token_id if info.add_bos else None)
    check = _Check(checkpoint, tokenizer, reference)
    added = sorted(backend.get_added_tokens_decoder().items())
    special = [token.content for _, token in added if token.special][:_SPECIAL]
    plain = texts(special)
    for text in plain:
        check.text(text)
    if checkpoint.chat_template is None:
        return Parity(len(plain), 0, 0)
    template = ChatTemplate(checkpoint.chat_template, checkpoint.tokenizer_config)
    chats = conversations(special or list(special_tokens(checkpoint.tokenizer_config).values()))
    refused = sum(not check.conversation(template, chat) for chat in chats)
    return Parity(len(plain), len(chats), refused)


def _reference(checkpoint: Checkpoint, backend: Backend) -> Any:
    """transformers' tokenizer; raises CheckpointError where it cannot be loaded."""
    from transformers import AutoTokenizer, TokenizersBackend

    if checkpoint.format == "gguf":
        special = special_tokens(checkpoint.tokenizer_config)
        return TokenizersBackend(tokenizer_object=backend, chat_template=checkpoint.chat_template, **special)
    generic = checkpoint.tokenizer_config.get("tokenizer_class") in _GENERIC
    try:
        return (TokenizersBackend if generic else AutoTokenizer).from_pretrained(str(checkpoint.path))
    except Exception as error:  # each tokenizer class raises what it likes
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{checkpoint.path}: transformers cannot load the tokenizer that the runtime is held against: {reason}; "
            f"check tokenizer_config.json"
        ) from error


def _check_ids(checkpoint: Checkpoint, backend: Backend, vocab_size: int) -> None:
    """A token without a row in the embedding would be read from beyond its end."""
    token, number = max(backend.get_vocab().items(), key=lambda item: item[1])
    if number >= vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer gives {token!r} the id {number}, but the model's vocab_size is "
            f"{vocab_size}: the tokenizer belongs to another model, or a token was added without resizing the "
            f"embedding; take it out of tokenizer.json, or resize the model"
        )


@dataclass(frozen=True)
class _Check:
    """Raises CheckpointError where runtime and reference differ."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    reference: Any

    def text(self, text: str) -> None:
        """Ids of a plain prompt, and those ids as text again."""
        where = f"text {text!r}"
        ids = self.tokenizer.encode(text)
        self._same(where, "encodes", ids, list(self.reference(text).input_ids))
        self._decoded(where, ids)

    def conversation(self, template: ChatTemplate, chat: Conversation) -> bool:
        """False where both refuse."""
        where = f"conversation {chat.name!r}"
        options: dict[str, Any] = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "tools": None if chat.tools is None else list(chat.tools),
        }

        def theirs() -> str:
            messages = [dict(message) for message in chat.messages]
            return str(self.reference.apply_chat_template(messages, tokenize=False, **options))

        for last in (False, True):
            mine, expected = _outcome(lambda: template.render(chat.messages, **options)), _outcome(theirs)
            if mine == expected or last:  # a template may show the time, which may have moved on: once
                break
        if mine is None or expected is None:
            if mine is not expected:
                sides = ("runtime", "transformers")
                refuses, renders = sides if mine is None else sides[::-1]
                raise CheckpointError(
                    f"{self.checkpoint.path}: chat template: {where}: {refuses} refuses what {renders} renders"
                )
            return False
        self._same(where, "renders", mine, expected)
        ids = self.tokenizer.encode(mine, add_special_tokens=False)
        self._same(where, "encodes", ids, list(self.reference(expected, add_special_tokens=False).input_ids))
        self._decoded(where, ids)
        return True

    def _decoded(self, where: str, ids: list[int]) -> None:
        """The text of ids, at once and token by token."""
        for skip in (True, False):
            text = self.tokenizer.decode(ids, skip_special_tokens=skip)
            expected = self.reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            self._same(where, "decodes", text, expected)
            stream = self.tokenizer.detokenizer((), skip)
            streamed = "".join([*(stream.push(token) for token in ids), stream.flush()])
            self._same(where, "decodes token by token", streamed, expected)

    def _same(self, where: str, verb: str, mine: Sequence[Any], expected: Sequence[Any]) -> None:
        if mine == expected:
            return
        pairs = enumerate(zip(mine, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(expected)))
        shown = slice(max(0, at - _SHOWN // 2), at + _SHOWN)
        unit = "character" if isinstance(mine, str) else "token"
        raise CheckpointError(
            f"{self.checkpoint.path}: {where}: the runtime {verb} {mine[shown]!r}, transformers {expected[shown]!r} "
            f"(they differ from {unit} {at} on): a plan of it would answer another prompt than the model was trained "
            f"on; check tokenizer.json, tokenizer_config.json and the chat template"
        )


def _outcome(render: Callable[[], str]) -> str | None:
    """What is rendered, or None for a refusal: a template is a program, and raises what it likes."""
    try:
        return render()
    except Exception:
        return None
