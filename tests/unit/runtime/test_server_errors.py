"""What cannot be honoured is refused, in OpenAI's error shape, naming the parameter. Nothing is ignored."""

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.runtime.server.protocol import UNSUPPORTED, ChatRequest, CompletionRequest
from tests.unit.runtime.servers import Server

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"prompt": "one two"}


def refused(server: Server, body: dict[str, Any], path: str | None = None, status: int = 400) -> dict[str, Any]:
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["type"] == "invalid_request_error"
    return error["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"1000000": 1}),
        ("logit_bias", {"one": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {"1": 1, "01": 2}),
        ("seed", 2**64),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("n", 0),
        ("n", 129),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
    ],
)
@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_parameters_out_of_range_are_named(server: Server, base: dict[str, Any], param: str, value: object) -> None:
    error = refused(server, {**base, param: value})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**COMPLETION, "logprobs": 21}, "logprobs"),
        ({**COMPLETION, "logprobs": 1, "echo": True}, "logprobs"),
        ({**COMPLETION, "logprobs": True}, "logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({**CHAT, "max_completion_tokens": 0}, "max_tokens"),
        ({**CHAT, "continue_final_message": True}, "continue_final_message"),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_other_parameters_are_named(server: Server, body: dict[str, Any], param: str) -> None:
    assert refused(server, body)["param"] == param


@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_what_is_not_supported_is_refused_by_name(server: Server, base: dict[str, Any]) -> None:
    model = ChatRequest if base is CHAT else CompletionRequest
    for name in UNSUPPORTED.keys() - model.model_fields.keys():
        error = refused(server, {**base, name: {"type": "json_object"}})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]


def test_what_asks_for_nothing_is_let_pass(server: Server) -> None:
    for name, values in UNSUPPORTED.items():
        for value in (None, *values):
            if name not in ChatRequest.model_fields:
                response = server.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1, name: value})
                assert response.status_code == 200, response.text


def test_unknown_parameters_are_refused(server: Server) -> None:
    error = refused(server, {**CHAT, "temprature": 1})
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    error = refused(server, {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert error["param"] == "stream_options.continuous_usage_stats"


def test_a_prompt_longer_than_max_seq_len_says_both_numbers(server: Server) -> None:
    error = refused(server, {"prompt": [9] * 600})
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert "512" in error["message"]
    error = refused(server, {"prompt": [9] * 500, "max_tokens": 13})
    for number in ("500", "13", "513", "512"):
        assert number in error["message"]
    long = {"messages": [{"role": "user", "content": "one " * 9000}]}
    assert refused(server, long)["param"] == "messages"


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}'])
def test_invalid_json(server: Server, body: bytes) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "word"),
    [(b'{"a":' * 50_000, "nested"), (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "digits")],
)
def test_json_beyond_what_is_read(server: Server, body: bytes, word: str) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, ("image_url", "text only")),
        ({"type": "text", "text": "x", "cache": 1}, ("unknown parameter cache",)),
        ({"type": "text"}, ("content",)),
    ],
)
def test_parts_of_a_message_that_it_does_not_take(server: Server, part: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refused(server, {"messages": [{"role": "user", "content": [part]}]})
    assert error["param"] == "messages[0].content"
    for word in ("messages[0].content", *words):
        assert word in error["message"]


def test_another_content_type(server: Server) -> None:
    response = server.http.post("/v1/completions", content=b"prompt=x", headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_another_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="gpt-4", messages=CHAT["messages"])  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "fake" in str(caught.value)


def test_another_path_and_method(server: Server) -> None:
    assert refused(server, {}, "/v1/embeddings", 404)["code"] == "not_found"
    response = server.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


TEXT = st.text(st.characters(), max_size=5)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ODD = [10**30, -1, "\ud800", "", [], {}, [10**30], ["\ud800"], {"9" * 5000: 1}, {"-1": 0}, {"1_0": 0}, {"\ud800": 1}]

#: Without "prompt": of the fake core's token ids, some make it hang or die.
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "\ud800"} - {"prompt"})


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(FIELDS), JSON)
def test_no_value_makes_the_server_fail(server: Server, name: str, value: Any) -> None:
    post(server, name, value)


@pytest.mark.parametrize("name", sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "x"}))
def test_no_odd_value_makes_the_server_fail(server: Server, name: str) -> None:
    for value in ODD:
        post(server, name, value)


def post(server: Server, name: str, value: Any) -> None:
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        body = json.dumps({**base, "max_tokens": 1, name: value})
        headers = {"Content-Type": "application/json"}
        response = server.http.post(path, content=body, headers=headers)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_too_large(server: Server, announced: bool) -> None:
    data = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'
    content: Any = data if announced else iter([data[: 2**20], data[2**20 :]])
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "8388608" in response.json()["error"]["message"]


def test_an_error_of_the_engine_is_a_server_error(server: Server) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "<|refuse|>"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "refused" in response.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="refused"):
        list(server.client.completions.create(model="fake", prompt="<|refuse|>", stream=True))
    assert server.status("/ready") == 200


def test_the_openapi_document_describes_the_parameters(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "temperature", "top_k", "logit_bias"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
