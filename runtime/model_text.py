"""All that a plan says about text: tokenizer, chat template, defaults, limits. Requests become prompts here.

Comes in: an open `Plan`, texts, chats, sampling parameters. Goes out: checked (ids, parameters, detokenizer) triples.
Must not know: HTTP, the core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.artifacts.plan import Plan
from llmc.runtime.chat_template import ChatTemplate, Message
from llmc.runtime.messages import Ready, SamplingParams
from llmc.runtime.params import Limits, RequestError, check, fit, generation_defaults
from llmc.runtime.text import Detokenizer, Tokenizer

Request = tuple[list[int], SamplingParams, Detokenizer]


class ModelText:
    """`defaults` are the plan's sampling defaults; `limits` bound a request, and are narrowed once a core is ready."""

    def __init__(self, plan: Plan) -> None:
        model, max_seq_len = plan.manifest.model, plan.manifest.profile.max_seq_len
        self.tokenizer = Tokenizer(
            bytes(plan.section("tokenizer/tokenizer.json")), model.bos_token_id if model.add_bos else None, max_seq_len
        )
        self.template: ChatTemplate | None = None
        if "tokenizer/chat_template.jinja" in plan:
            source = bytes(plan.section("tokenizer/chat_template.jinja")).decode()
            self.template = ChatTemplate(source, _json_section(plan, "tokenizer/tokenizer_config.json"))
        self.defaults = generation_defaults(_json_section(plan, "tokenizer/generation_config.json"))
        self._block_size = plan.manifest.profile.block_size
        self.limits = Limits(model.vocab_size, max_seq_len, max_seq_len)

    def narrow(self, core: Ready) -> None:
        """Takes the size of the KV pool that a core has allocated into the limits."""
        pool = core.num_blocks * self._block_size
        self.limits = Limits(self.limits.vocab_size, self.limits.max_seq_len, pool)

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters with the plan's defaults for those that `given` leaves out."""
        return SamplingParams(**{**self.defaults, **given})

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt of a chat (options: see ChatTemplate.render); raises RequestError without a template."""
        if self.template is None:
            raise RequestError(
                "this plan has no chat template, so it cannot chat: use completions, or rebuild it from a checkpoint "
                "with a chat template",
                "messages",
                "no_chat_template",
            )
        return self.tokenizer.encode(
            self.template.render(messages, **options), add_special_tokens=False, param="messages"
        )

    def request(self, prompt: list[int], params: SamplingParams, param: str = "prompt") -> Request:
        """A checked request. A completion's text goes on from the prompt's; the answer to `messages` stands alone."""
        params = fit(prompt, check(params, self.limits), self.limits, param)
        context = () if param == "messages" else prompt
        return prompt, params, self.tokenizer.detokenizer(context, params.skip_special_tokens)


def _json_section(plan: Plan, name: str) -> dict[str, Any]:
    value = json.loads(bytes(plan.section(name))) if name in plan else {}
    assert isinstance(value, dict), f"{name} must hold an object"
    return value
