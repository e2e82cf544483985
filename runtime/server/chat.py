"""POST /v1/chat/completions: messages through the plan's chat template, `n` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from llmc.runtime.model_text import ModelText
from llmc.runtime.sequence import Delta, TokenEntry
from llmc.runtime.server.answers import Chunks, EventStream, Usage, collect, events, usage_of
from llmc.runtime.server.body import JsonRoute
from llmc.runtime.server.context import THREAD_CHARS, of, tenant_of
from llmc.runtime.server.protocol import ChatRequest
from llmc.runtime.server.submit import submit
from llmc.runtime.text import Tokenizer

router = APIRouter(route_class=JsonRoute)
_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0  # JSON has no minus infinity
_ROLE = b'"delta":{"role":"assistant","content":""}'


class TopLogprob(msgspec.Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A shown token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Per shown token."""

    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    """The response body."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


def _token(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace"), list(data)


def logprobs_of(tokenizer: Tokenizer, entries: list[TokenEntry]) -> ChatLogprobs:
    """The log-probabilities of shown tokens."""
    content = []
    for entry in entries:
        top = []
        for other in entry.top:
            text, data = _token(tokenizer, other.token)
            top.append(TopLogprob(text, max(other.logprob, _LOWEST), data))
        text, data = _token(tokenizer, entry.token)
        content.append(ContentLogprob(text, max(entry.logprob, _LOWEST), data, top))
    return ChatLogprobs(content)


async def _encode_chat(text: ModelText, body: ChatRequest) -> list[int]:
    messages = body.chat()
    if text.template is not None and "developer" not in text.template.source:
        # OpenAI's newer name for the same role, which most templates do not know.
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "variables": body.chat_template_kwargs,
    }
    if sum(len(m["content"]) for m in messages) > THREAD_CHARS:
        return await asyncio.to_thread(text.encode_chat, messages, **options)
    return text.encode_chat(messages, **options)


@router.post("/v1/chat/completions", summary="Answer a chat")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """See ChatRequest; unsupported parameters are refused."""
    context = of(request)
    service = context.admit(body.model)
    params = service.text.params(body.sampling())
    prompt = await _encode_chat(service.text, body)
    group = request.state.group = submit(
        service, [prompt], params, body.n, "messages", body.handling(tenant_of(request))
    )
    identity: dict[str, Any] = {
        "id": f"chatcmpl-{group.id}",
        "created": context.now(),
        "model": context.model,
        "system_fingerprint": context.fingerprint,
    }
    tokenizer = service.text.tokenizer
    if body.stream:
        chunks = Chunks({"object": "chat.completion.chunk", **identity}, body.include_usage)
        roles = [chunks.chunk(index, _ROLE, b"null", None) for index in range(body.n)]
        return EventStream(group, events(group, body.n, chunks, roles, _renderer(chunks, tokenizer, body.logprobs)))
    choices = []
    for index, answer in enumerate(await collect(group, request.receive)):
        shown = logprobs_of(tokenizer, answer.entries) if body.logprobs else None
        last = answer.last
        choices.append(ChatChoice(index, AnswerMessage(answer.text), shown, last.finish_reason, last.stop_reason))
    done = ChatCompletion(**identity, choices=choices, usage=usage_of(group, body.n))
    return Response(_encode(done), media_type="application/json")


def _renderer(chunks: Chunks, tokenizer: Tokenizer, logprobs: bool) -> Callable[[int, Delta], bytes]:
    def render(index: int, delta: Delta) -> bytes:
        """Content and the reason to end come in chunks of their own, as OpenAI sends them."""
        out = b""
        if delta.text or delta.entries:
            shown = _encode(logprobs_of(tokenizer, delta.entries)) if logprobs else b"null"
            out = chunks.chunk(index, b'"delta":{"content":%b}' % _encode(delta.text), shown, None)
        if delta.finish_reason is not None:
            out += chunks.chunk(index, b'"delta":{}', b"null", delta)
        return out

    return render
