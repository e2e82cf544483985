"""The engine in Python, without HTTP: prompts in, answers out, blocking.

Comes in: the path of a plan, prompts, `SamplingParams`. Goes out: `Answer`s, or `Delta`s as they come.
Must not know: HTTP.

    with Engine("engine.plan") as engine:
        for answer in engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(answer.text)

The front end's event loop runs in a thread of its own, so an Engine also works where a loop already runs.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.plan import Plan
from llmc.runtime.chat_template import Message
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.model_text import ModelText, Request
from llmc.runtime.options import CoreOptions
from llmc.runtime.params import check_handling
from llmc.runtime.sequence import Counts, Delta, TokenEntry
from llmc.runtime.service import Service

__all__ = ["Answer", "Delta", "Engine", "Handling", "SamplingParams"]

T = TypeVar("T")


@dataclass
class Answer:
    """One finished answer. `finish_reason` "stop" or "length"; `stop_reason` the stop string or stop token id, if any.

    `logprobs` has an entry per shown token where the parameters ask for it. `counts` are those of the usage.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    counts: Counts | None = None

    def add(self, delta: Delta) -> None:
        """Appends what a stream has brought."""
        self.text += delta.text
        self.token_ids += delta.tokens
        self.logprobs += delta.entries
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.counts = delta.counts


class Engine:
    """A loaded plan. Raises LlmcError when it cannot be loaded; `close` (or leaving `with`) ends its processes.

    `options` are the fields of `CoreOptions`, each by its name. How requests are treated beside one another (class,
    sharing of prefixes) is said with each call, by a `Handling`. `core_command` stands in for the core in tests.
    """

    def __init__(self, plan: str | Path | Plan, *, core_command: Seq[str] | None = None, **options: Any) -> None:
        opened = plan if isinstance(plan, Plan) else Plan.open(plan, verify=False)
        wanted = CoreOptions.of({"verify": opened is not plan, **options})
        self.plan = opened
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmc-engine", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._service = self._run(Service.start(opened, wanted, command=core_command))
            self._run(self._service.wait_ready())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def text(self) -> ModelText:
        """Tokenizer, chat template, limits and defaults."""
        return self._service.text

    @property
    def load_seconds(self) -> float:
        """Seconds that the core took from its start to being ready."""
        core = self._service.front.core
        assert core is not None
        return core.load_seconds

    # Whole answers

    def generate(
        self,
        prompts: str | list[int] | Seq[str | list[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> list[Answer]:
        """One answer per prompt (text, or token ids), in their order.

        `params` is one for all or one per prompt; None means the plan's defaults. Raises RequestError for a request
        that cannot be honoured, EnvironmentFault when the engine dies.
        """
        many: list[str | list[int]] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        chosen = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(chosen) != len(many):
            raise UsageError(f"{len(many)} prompts and {len(chosen)} SamplingParams: give one, or one per prompt")
        return self._answers([self._request(p, c) for p, c in zip(many, chosen, strict=True)], handling)  # type: ignore[arg-type]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> list[Answer]:
        """One answer per chat: a list of messages with `role` and `content`, or a list of such lists.

        Errors as for `generate`.
        """
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        requests = [self._chat_request(chat, params, chat_template_kwargs) for chat in chats]  # type: ignore[arg-type]
        return self._answers(requests, handling)

    def _answers(self, requests: list[Request], handling: Handling) -> list[Answer]:
        answers = [Answer() for _ in requests]
        for index, delta in self._deltas(requests, handling):
            answers[index].add(delta)
        return answers

    # Streams

    def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> Iterator[Delta]:
        """The answer as it comes. Closing the iterator aborts it."""
        for _, delta in self._deltas([self._request(prompt, params)], handling):
            yield delta

    def chat_stream(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> Iterator[Delta]:
        """The answer to a chat as it comes. Closing the iterator aborts it."""
        for _, delta in self._deltas([self._chat_request(messages, params, chat_template_kwargs)], handling):
            yield delta

    def _request(self, prompt: str | list[int], params: SamplingParams | None) -> Request:
        ids = self.text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self.text.request(ids, params or self.text.params({}))

    def _chat_request(
        self, messages: Seq[Message], params: SamplingParams | None, variables: dict[str, Any] | None
    ) -> Request:
        ids = self.text.encode_chat(messages, variables=variables)
        return self.text.request(ids, params or self.text.params({}), "messages")

    def _deltas(self, requests: list[Request], handling: Handling) -> Iterator[tuple[int, Delta]]:
        if self._closed:
            raise UsageError("this Engine is closed")
        check_handling(handling, self._service.priorities)
        found: queue.SimpleQueue[tuple[int, Delta] | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                with self._service.front.submit(requests, handling) as group:
                    async for index, delta in group:
                        found.put((index, delta))
                found.put(None)
            except BaseException as error:
                found.put(error)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := found.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if item[1].finish_reason == "error":
                    raise EnvironmentFault(f"{self.plan.path}: generation failed: {item[1].error}")
                yield item
        finally:
            task.cancel()

    # Lifetime

    def close(self) -> None:
        """Aborts what runs and ends the core and its ranks; safe to call twice."""
        if not self._closed:
            self._closed = True
            try:
                self._run(self._service.close())
            finally:
                self._stop_loop()

    def _stop_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_one(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int))
