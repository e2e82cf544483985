"""What the parity check asks: conversations and texts that tokenizers and chat templates are known to differ on.

Comes in: the written forms of a tokenizer's special tokens. Goes out: `Conversation`s and texts. Must not know: who
renders them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`add_generation_prompt` and `continue_final_message` as in transformers' apply_chat_template."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city; naïve “quotes” & <tags>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}

TEXTS = (
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces, three   spaces, a\ttab,\nand\n\n\nlines\r\nof two systems",
    "def f(x):\n    return x ** 2  # 4 spaces\n",
    "12345 3.14159 1,000,000 0x7f 2026-11-29",
    "don't we'll I'M they'RE",
    "naïve café, Straße, Ångström, e\u0301 (combining)",
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요",
    "שלום עולם مرحبا بالعالم नमस्ते ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇨🇭 ∑∫√∞ ½ ﬁ Ａ",
    "zero\u200bwidth, no\u00a0break, \ufeffBOM, \u2028 separator",
    "<html><b>not & special</b></html> [TOOL] </x> <|nothing|> {{ braces }} {% tag %}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "=" * 80,
)


def texts(special: Sequence[str]) -> tuple[str, ...]:
    """Plain texts, the tokenizer's own special tokens among them."""
    return (*TEXTS, *(f"before{token}between {token} after" for token in special))


def conversations(special: Sequence[str]) -> tuple[Conversation, ...]:
    """Conversations, with the tokenizer's special tokens inside what a user says."""
    user = _message("user", "What is the capital of France?")
    system = _message("system", "You are terse.\nAnswer in one word.")
    answer = _message("assistant", "Paris.")
    again = _message("user", "And of Italy?")
    return (
        Conversation("one question", (user,)),
        Conversation("no generation prompt", (user, answer), add_generation_prompt=False),
        Conversation("system", (system, user)),
        Conversation("several turns", (system, user, answer, again)),
        Conversation("tools", (system, user), tools=(_WEATHER,)),
        Conversation("a tool's answer", _tool_turns(), tools=(_WEATHER,)),
        Conversation("unicode", tuple(_message("user", text) for text in (TEXTS[8] + TEXTS[9] + TEXTS[10],))),
        Conversation("emoji", (_message("user", TEXTS[11]), _message("assistant", "😀"), _message("user", TEXTS[12]))),
        Conversation("white space", (_message("user", f"  {TEXTS[4]}  "), answer, _message("user", "\n\n \t"))),
        Conversation("special tokens in user text", (_message("user", "".join(f"a {t} b{t}" for t in special)),)),
        Conversation("markup in user text", (_message("user", TEXTS[13]),)),
        Conversation("empty content", (_message("user", ""),)),
        Conversation("empty system", (_message("system", ""), user)),
        Conversation("a prefilled answer", (user, _message("assistant", "The capital is")), None, False, True),
        Conversation("two questions in a row", (user, again)),
        Conversation("answer first", (answer, user)),
        Conversation("unknown role", (_message("narrator", "Meanwhile..."), user)),
    )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _tool_turns() -> tuple[Message, ...]:
    return (
        _message("user", "How is the weather in Zürich?"),
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"celsius": -3.5}'},
    )
