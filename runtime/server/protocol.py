"""Request bodies: what a client may send, and how it becomes sampling parameters. Nothing that is sent is ignored.

Comes in: JSON objects. Goes out: `CompletionRequest`, `ChatRequest`; sampling arguments. Must not know: the engine.

A parameter that is null counts as left out, as OpenAI has it. One that this server does not honour is refused by name,
unless its value asks for nothing (`response_format` of type "text", an empty list of tools). `user` is accepted and has
no effect: it is a label for the provider's own records.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from llmc.runtime.messages import INTERACTIVE, Handling
from llmc.runtime.params import MAX_LOGPROBS, RequestError, check_n

#: Parameters of OpenAI, vLLM and SGLang that are refused, with the values that ask for nothing and so are let pass.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
#: Members of an answer's message that clients send back with it, and that say nothing when empty.
_EMPTY_IN_MESSAGES = ("annotations", "audio", "function_call", "refusal", "tool_calls", "reasoning_content")


#: Members of any list or object but the prompt: what is checked one by one, and kept as objects, is bounded first.
_MAX_MEMBERS = 16384

#: One way to write each id, so that no two keys of an object mean the same.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.model_fields:
                if name != "prompt" and isinstance(value, list | dict) and len(value) > _MAX_MEMBERS:
                    raise PydanticCustomError(
                        "too_long",
                        "{param} has {count} members; at most {most} are allowed",
                        {"param": name, "count": len(value), "most": _MAX_MEMBERS},
                    )
                given[name] = value
            elif not cls._asks_nothing(name, value):
                known = name in UNSUPPORTED
                raise PydanticCustomError(
                    "unsupported_parameter" if known else "unknown_parameter",
                    "{param} is not supported by this server; leave it out"
                    if known
                    else "unknown parameter {param}; leave it out",
                    {"param": name.encode(errors="replace").decode()},
                )
        return given

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        return any(type(value) is type(empty) and value == empty for empty in UNSUPPORTED.get(name, ()))


class StreamOptions(_Strict):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool = False


class SamplingRequest(_Strict):
    """What both kinds of request share. Ranges are checked by llmc.runtime.params."""

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    priority: str | int | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    def handling(self, tenant: str = "") -> Handling:
        """How the request is treated; raises RequestError. `tenant`: whose prefix cache it shares, "" for everybody's.

        `priority` names a class; 0 is what other servers call the default, and asks for nothing here.
        """
        priority = INTERACTIVE if self.priority in (None, 0) else self.priority
        if not isinstance(priority, str):
            raise RequestError(f"priority is {priority}; it must be the name of a class", "priority")
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty; give it at least one character, or leave it out", "cache_salt")
        return Handling(
            priority=priority,
            tenant=tenant,
            cache_salt=self.cache_salt or "",
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of SamplingParams for what the request gives; raises RequestError."""
        check_n(self.n)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        names = (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("seed", "max_tokens", "min_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            given["logit_bias"] = _token_ids(self.logit_bias)
        return given

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise RequestError(f"logit_bias has the key {token[:40]!r}; keys must be token ids", "logit_bias")
    return {int(token): value for token, value in bias.items()}


_Prompt = str | list[str] | list[int] | list[list[int]]


def _prompt(value: Any) -> Any:
    """A prompt as it is, or one error: a union would check it as each of its members, and keep an error a token."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {str} or kinds <= {int}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise PydanticCustomError("prompt", "a string, a list of strings, a list of token ids, or a list of such lists")


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions. `max_tokens` is 16 when left out, as OpenAI has it."""

    prompt: Annotated[_Prompt, PlainValidator(_prompt, json_schema_input_type=_Prompt)]
    echo: bool = False
    logprobs: int | None = None

    def sampling(self) -> dict[str, Any]:
        """See SamplingRequest.sampling."""
        given = {"max_tokens": 16, **super().sampling()}
        if self.logprobs is not None:
            if self.echo:
                raise RequestError("logprobs with echo (those of the prompt) are not supported", "logprobs")
            given["logprobs"] = self.logprobs
        return given

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(_Strict):
    """A part of a message's content."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported_content",
                "a part of type {kind}; this model takes text only",
                {"kind": repr(kind.encode(errors="replace").decode())},
            )
        return data


class ChatMessage(_Strict):
    """A message. Its content is text, or parts of type "text" (joined by line ends)."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        return name in _EMPTY_IN_MESSAGES and not value


class ChatRequest(SamplingRequest):
    """Body of POST /v1/chat/completions. Without a limit the answer may fill what max_seq_len leaves."""

    messages: Annotated[list[ChatMessage], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def sampling(self) -> dict[str, Any]:
        """See SamplingRequest.sampling."""
        given = super().sampling()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise RequestError(
                    f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}: give one",
                    "max_completion_tokens",
                )
            given["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_LOGPROBS}", "top_logprobs"
                )
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them; raises RequestError for a role or content that it cannot."""
        return [_plain(i, message) for i, message in enumerate(self.messages)]


_ROLES = ("system", "developer", "user", "assistant")


def _plain(index: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise RequestError(f"{where}.role is {message.role!r}; it must be one of {', '.join(_ROLES)}", f"{where}.role")
    content = message.content
    if content is None:
        raise RequestError(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else {**plain, "name": message.name}
