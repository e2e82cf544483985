"""Chat messages to one prompt text, rendered by the plan's template as transformers renders it.

Comes in: tokenizer/chat_template.jinja and tokenizer_config.json of a plan, messages. Goes out: text that already
holds every special token (so that it is encoded without adding any). Must not know: HTTP, transformers.

The environment is the one of transformers (utils/chat_template_utils.py): sandboxed, because a template is code
that came with a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.artifacts.errors import PlanError
from llmc.runtime.params import RequestError

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
#: What a request may not set through chat_template_kwargs.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

Message = Mapping[str, Any]


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %}...{% endgeneration %}` pass: it marks text for training and renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names by which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot set the attribute {name!r} of a namespace")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The variables bos_token, eos_token and so on of a tokenizer_config.json."""
    found = {}
    for name, value in tokenizer_config.items():
        if isinstance(value, Mapping):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            found[name] = value
    return found


class ChatTemplate:
    """A compiled template; `render` is all there is to do with it. Raises PlanError for one that cannot be compiled."""

    def __init__(self, source: str, tokenizer_config: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = special_tokens(tokenizer_config)
        try:
            self._template = _environment().from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise PlanError(f"the chat template cannot be compiled: {error.message} (line {error.lineno})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; raises RequestError when the template refuses the messages.

        `continue_final_message` leaves the last message open, for the model to go on with it; `tools` are JSON schemas.
        """
        if not messages:
            raise RequestError("messages is empty; at least one message is needed", "messages")
        for name in variables or {}:
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs cannot set {name!r}", "chat_template_kwargs")
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
                )
            messages[-1] = {**messages[-1], "content": messages[-1].get("content", "") + _CONTINUE}
        # What is not given is None, not undefined: templates ask `if tools is not none`.
        scope = {**self._variables, "tools": tools, "documents": None, **(variables or {})}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **scope)
        except Exception as error:  # a template is a program, and what it is given came with the request
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        return _cut_open_message(text) if continue_final_message else text


def _cut_open_message(text: str) -> str:
    where = text.rfind(_CONTINUE.strip())
    if where < 0:
        raise RequestError(
            "the chat template does not show the final message, so it cannot be continued", "continue_final_message"
        )
    kept = text[:where]
    # A template that trims messages has also trimmed the mark's own space.
    return kept if text[where : where + len(_CONTINUE)] == _CONTINUE else kept.rstrip()
