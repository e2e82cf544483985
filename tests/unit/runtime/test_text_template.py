"""Chats are rendered as transformers renders them."""

from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.chat_template import ChatTemplate, special_tokens
from llmc.runtime.params import RequestError

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&</b> 日本 🎉"}],
    [
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "Yes.\n"},
        {"role": "user", "content": "{{ no_template }}"},
    ],
]
#: Templates that use what transformers' environment offers beyond plain jinja2.
SOURCES = {
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "blocks are trimmed": "  {% if true %}\n  x\n  {% endif %}\ny",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "absent tools": "{% if tools is not none %}tools{% else %}none{% endif %}{{ bos_token }}|{{ eos_token }}",
    "dict": "{{ dict(a=1) | tojson }}",
    "own variables": "{{ thinking | default(false) }}",
    "generation prompt": "{{ messages[-1].role }}{% if add_generation_prompt %}>{% endif %}",
}


@pytest.fixture(scope="module")
def tokenizer(real_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(real_gguf.parent), gguf_file=real_gguf.name)


def config_of(tokenizer: Any) -> dict[str, Any]:
    return {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}


@pytest.mark.real_model
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation", [True, False])
def test_the_real_template_renders_as_in_transformers(
    tokenizer: Any, chat: list[dict[str, str]], generation: bool
) -> None:
    ours = ChatTemplate(tokenizer.chat_template, config_of(tokenizer))
    theirs = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
    assert ours.render(chat, add_generation_prompt=generation) == theirs


@pytest.mark.real_model
def test_the_prompt_has_the_ids_of_transformers(tokenizer: Any) -> None:
    from llmc.runtime.text import Tokenizer

    ours = Tokenizer(tokenizer.backend_tokenizer.to_str().encode(), bos=tokenizer.bos_token_id)
    template = ChatTemplate(tokenizer.chat_template, config_of(tokenizer))
    for chat in CHATS:
        ids = ours.encode(template.render(chat), add_special_tokens=False)
        assert ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("chat", CHATS)
def test_other_templates_render_as_in_transformers(name: str, chat: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    ((theirs,), _) = render_jinja_template(
        conversations=[chat], chat_template=SOURCES[name], add_generation_prompt=True, **variables
    )
    assert ChatTemplate(SOURCES[name], variables).render(chat) == theirs


@pytest.mark.parametrize("keep", [True, False])
def test_the_last_message_can_be_left_open(keep: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    content = "m.content" if keep else "m.content | trim"
    source = "{% for m in messages %}<{{ m.role }}>{{ " + content + " }}</>{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is "}]
    ours = ChatTemplate(source, {}).render(chat, add_generation_prompt=False, continue_final_message=True)
    ((theirs,), _) = render_jinja_template(conversations=[chat], chat_template=source, continue_final_message=True)
    assert ours == theirs
    assert ours.endswith("<assistant>The answer is " if keep else "<assistant>The answer is")


def test_what_a_template_refuses_is_a_bad_request() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render(CHATS[0])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="empty"):
        template.render([])


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set n = namespace(__class__=1) %}"):
        with pytest.raises(RequestError):
            ChatTemplate(source, {}).render(CHATS[0])


def test_variables_cannot_replace_the_messages() -> None:
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate("", {}).render(CHATS[0], variables={"messages": []})


def test_special_tokens_are_text_in_either_form() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
