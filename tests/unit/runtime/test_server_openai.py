"""The endpoints as OpenAI's own client sees them. The fake core answers with the prompt, over and over."""

from typing import Any

import openai
import pytest

from llmc.artifacts.schema import FORMAT_VERSION
from llmc.runtime.text import Tokenizer
from tests.unit.runtime.fake_plan import byte_level
from tests.unit.runtime.servers import Server

TOKENIZER = Tokenizer(byte_level().to_str().encode())
PROMPT = "one two three"
IDS = TOKENIZER.encode(PROMPT)
CHAT: Any = [{"role": "user", "content": "hello 日本"}]
CHAT_TEXT = "user\nhello 日本\nassistant\n"  # what the fake core answers, without special tokens


def chat_tokens(extra: int = 0) -> int:
    rendered = "<|im_start|>user\nhello 日本<|im_end|>\n<|im_start|>assistant\n"
    return len(TOKENIZER.encode(rendered)) + extra


def test_models(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert model.id == "fake"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 512
    assert model.model_extra["sampling_defaults"] == {"temperature": 0.7}
    assert server.client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion(server: Server) -> None:
    done = server.client.completions.create(model="fake", prompt=PROMPT, max_tokens=len(IDS))
    assert done.choices[0].text == PROMPT
    assert done.choices[0].finish_reason == "length"
    assert done.object == "text_completion"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(IDS), len(IDS))
    assert done.usage.total_tokens == 2 * len(IDS)


def test_max_tokens_defaults_to_16_for_completions(server: Server) -> None:
    done = server.client.completions.create(model="fake", prompt=PROMPT)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


def test_prompts_in_every_form(server: Server) -> None:
    forms: list[Any] = [PROMPT, [PROMPT], IDS, [IDS]]
    for prompt in forms:
        done = server.client.completions.create(model="fake", prompt=prompt, max_tokens=len(IDS))
        assert [c.text for c in done.choices] == [PROMPT]


def test_many_prompts_times_n(server: Server) -> None:
    done = server.client.completions.create(model="fake", prompt=["one", "two"], n=2, max_tokens=1, seed=1)
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert done.choices[0].text == done.choices[1].text != done.choices[2].text
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(TOKENIZER.encode("one")) + len(TOKENIZER.encode("two"))
    assert done.usage.completion_tokens == 4


def test_a_streamed_completion(server: Server) -> None:
    stream = server.client.completions.create(
        model="fake", prompt=PROMPT, max_tokens=2 * len(IDS), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == PROMPT * 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * len(IDS)
    assert len({c.id for c in [*chunks, last]}) == 1


def test_a_stream_ends_with_done(server: Server) -> None:
    body = {"model": "fake", "prompt": PROMPT, "stream": True, "max_tokens": 2}
    response = server.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert "usage" not in response.text


def test_echo(server: Server) -> None:
    for prompt in (PROMPT, IDS):
        done = server.client.completions.create(model="fake", prompt=prompt, echo=True, max_tokens=len(IDS))
        assert done.choices[0].text == PROMPT * 2
        stream = server.client.completions.create(
            model="fake", prompt=prompt, echo=True, max_tokens=len(IDS), stream=True
        )
        assert "".join(c.choices[0].text for c in stream) == PROMPT * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "one two"), (True, "one two th")])
def test_stop_strings(server: Server, stream: bool, include: bool, text: str) -> None:
    arguments: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "stop": ["X", " th"], "max_tokens": 40}
    extra = {"include_stop_str_in_output": include}
    if stream:
        chunks = list(server.client.completions.create(**arguments, stream=True, extra_body=extra))
        assert "".join(c.choices[0].text for c in chunks) == text
        last = chunks[-1].choices[0]
    else:
        done = server.client.completions.create(**arguments, extra_body=extra)
        last = done.choices[0]
        assert last.text == text
        assert done.usage is not None
        assert done.usage.completion_tokens <= len(IDS)
    assert last.finish_reason == "stop"
    assert last.model_extra == {"stop_reason": " th"}


def test_stop_token_ids(server: Server) -> None:
    extra = {"stop_token_ids": [IDS[1]]}
    done = server.client.completions.create(model="fake", prompt=PROMPT, extra_body=extra)
    assert done.choices[0].text == TOKENIZER.decode(IDS[:1])
    assert done.choices[0].model_extra == {"stop_reason": IDS[1]}
    assert done.usage is not None
    assert done.usage.completion_tokens == 2


def test_completion_logprobs(server: Server) -> None:
    done = server.client.completions.create(model="fake", prompt="日本 one", logprobs=2, max_tokens=30)
    choice = done.choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == 30
    assert any(token.startswith("bytes:\\x") for token in found.tokens)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)


def test_a_chat(server: Server) -> None:
    done = server.client.chat.completions.create(model="fake", messages=CHAT, max_tokens=2 * chat_tokens())
    message = done.choices[0].message
    assert (message.role, done.choices[0].finish_reason) == ("assistant", "stop")  # <|im_end|> is this model's end
    assert message.content == "user\nhello 日本"
    assert done.usage is not None
    assert done.usage.prompt_tokens == chat_tokens()


def test_eos_can_be_ignored(server: Server) -> None:
    done = server.client.chat.completions.create(
        model="fake", messages=CHAT, max_completion_tokens=chat_tokens(), extra_body={"ignore_eos": True}
    )
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (CHAT_TEXT, "length")
    done = server.client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=chat_tokens(),
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert done.choices[0].message.content == "<|im_start|>user\nhello 日本<|im_end|>\n<|im_start|>assistant\n"


def test_a_streamed_chat(server: Server) -> None:
    stream = server.client.chat.completions.create(
        model="fake", messages=CHAT, stream=True, n=2, stream_options={"include_usage": True}, max_tokens=100
    )
    chunks = list(stream)
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(c.delta.role is None for c in own[1:])
        assert "".join(c.delta.content or "" for c in own) == "user\nhello 日本"
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"]
        assert own[-1].finish_reason == "stop"
        assert own[-1].delta.content is None
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == chat_tokens()


def test_chat_logprobs(server: Server) -> None:
    done = server.client.chat.completions.create(
        model="fake", messages=CHAT, logprobs=True, top_logprobs=3, max_tokens=100
    )
    choice = done.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    shown = b"".join(bytes(entry.bytes or []) for entry in content)
    assert shown == b"<|im_start|>user\nhello \xe6\x97\xa5\xe6\x9c\xac"
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert content[0].logprob == -0.5


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    arguments: dict[str, Any] = {"model": "fake", "messages": CHAT, "logprobs": True, "stop": ["lo "], "max_tokens": 99}
    whole = server.client.chat.completions.create(**arguments).choices[0]
    streamed: list[Any] = []
    text = ""
    for chunk in server.client.chat.completions.create(**arguments, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        streamed += choice.logprobs.content or [] if choice.logprobs else []
    assert whole.logprobs is not None
    assert text == whole.message.content == "user\nhel"
    assert streamed == whole.logprobs.content


def test_messages_in_every_accepted_form(server: Server) -> None:
    messages: Any = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "d", "name": "me"},
    ]
    done = server.client.chat.completions.create(
        model="fake", messages=messages, max_tokens=60, extra_body={"ignore_eos": True}
    )
    assert (done.choices[0].message.content or "").startswith(
        "system\ns\nuser\na\nb\nassistant\nc\nuser\nd\nassistant\n"
    )


def test_the_last_message_can_be_continued(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True}
    rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe answer"
    done = server.client.chat.completions.create(model="fake", messages=messages, max_tokens=1, extra_body=extra)
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(TOKENIZER.encode(rendered))


def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    done = server.client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=3,
        user="somebody",
        tools=[],
        store=False,
        response_format={"type": "text"},
        stop=None,
        temperature=None,
    )
    assert done.choices[0].finish_reason == "length"


def test_version_health_and_ready(server: Server) -> None:
    version = server.http.get("/version").json()
    assert version["checkpoint_digest"] == "c" * 64
    assert version["format"] == FORMAT_VERSION
    assert len(version["plan_digest"]) == 64
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_metrics(server: Server) -> None:
    before = {name: server.metric(name) for name in ("generation_tokens_total", "request_success_total")}
    server.client.completions.create(model="fake", prompt=PROMPT, max_tokens=7)
    server.wait_for(lambda: server.metric("generation_tokens_total") >= before["generation_tokens_total"] + 7)
    assert server.metric("request_success_total") == before["request_success_total"] + 1
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("inter_token_latency_seconds_count") >= 6
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        server.metric(name)
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "e2e_request_latency_seconds_sum"):
        server.metric(name)
    text = server.http.get("/metrics").text
    assert 'llmc:request_success_total{finished_reason="length",model_name="fake"}' in text
    assert 'llmc:inter_token_latency_seconds_bucket{le="0.001",model_name="fake"}' in text
    assert "llmc:plan_info{" in text
