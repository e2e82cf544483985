"""One answer in the making: the core's tokens become text, cut at stop strings, with log-probabilities that fit it.

Comes in: `Output` messages of one request id. Goes out: `Delta`s. Must not know: sockets, tasks, HTTP.

Everything a client sees of an answer is decided here, for streams and whole answers alike, so they cannot differ.
"""

from __future__ import annotations

from collections import deque

import msgspec

from llmc.runtime.messages import Cause, FinishReason, Logprob, Output, SamplingParams, TokenLogprobs
from llmc.runtime.stops import StopMatcher
from llmc.runtime.text import Detokenizer


class TokenEntry(msgspec.Struct, gc=False):
    """A shown token: its place in the answer's text (characters) and its log-probabilities."""

    token: int
    offset: int
    logprob: float
    rank: int
    top: list[Logprob]


class Counts(msgspec.Struct):
    """Tokens of a finished answer; `completion_tokens` counts up to its end, stop token included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Delta(msgspec.Struct):
    """What an answer has gained since the last one. The last has `finish_reason`, `counts`, and with "error" `error`,
    `cause` and `retry_after` where the core turned the request away.

    `tokens` are those the core sent; `entries` (with logprobs) those whose text is shown, so they may lag behind.
    """

    text: str = ""
    tokens: list[int] = []
    entries: list[TokenEntry] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    counts: Counts | None = None
    cause: Cause | None = None
    retry_after: int = 0

    def merge(self, later: Delta) -> None:
        """Appends a later delta to this one."""
        self.text += later.text
        self.tokens = self.tokens + later.tokens
        self.entries = self.entries + later.entries
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.counts, self.cause, self.retry_after = later.counts, later.cause, later.retry_after


class Sequence:
    """The state of one answer. `completion_tokens` counts every token up to its end, stop token included."""

    def __init__(self, params: SamplingParams, prompt_tokens: int, detokenizer: Detokenizer) -> None:
        self.params = params
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._decoded = 0  # characters made from tokens
        self._shown = 0  # characters let through by the matcher
        self._waiting: deque[TokenEntry] = deque()  # entries whose text is held back

    def accept(self, output: Output) -> Delta:
        """Takes what the core sent. A delta whose stop_reason is a string means: tell the core to stop."""
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        parts: list[str] = []
        taken = 0
        for i, token in enumerate(output.tokens):
            taken = i + 1
            self._take(token, output.logprobs[i] if output.logprobs else None, parts)
            if self._matcher.matched is not None:
                break
        reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = None
        if reason is not None and self._matcher.matched is None:
            self._end(output, parts)
            if output.stop_token in self.params.stop_token_ids:
                stop_reason = output.stop_token
        if self._matcher.matched is not None:
            reason, stop_reason = "stop", self._matcher.matched
        self.finish_reason = reason
        text = "".join(parts)
        self._shown += len(text)
        return Delta(
            text,
            output.tokens[:taken],
            self._release(),
            reason,
            stop_reason,
            output.error if reason == "error" else None,
            self.counts() if reason is not None else None,
            output.cause,
            output.retry_after,
        )

    def counts(self) -> Counts:
        """The counts so far."""
        return Counts(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    def _take(self, token: int, logprobs: TokenLogprobs | None, parts: list[str]) -> None:
        self.completion_tokens += 1
        if logprobs is not None:
            entry = TokenEntry(token, self._decoded, logprobs.logprob, logprobs.rank, logprobs.top)
            self._waiting.append(entry)
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        parts.append(self._matcher.push(text, self.completion_tokens > self.params.min_tokens))

    def _end(self, output: Output, parts: list[str]) -> None:
        if output.stop_token is not None:
            self.completion_tokens += 1
        tail = self._detokenizer.flush()
        self._decoded += len(tail)
        parts.append(self._matcher.push(tail, self.completion_tokens > self.params.min_tokens))
        if self._matcher.matched is None:
            parts.append(self._matcher.flush())

    def _release(self) -> list[TokenEntry]:
        """Entries whose text has begun to show; at an end other than a stop string, all of them."""
        if not self._waiting:
            return []
        everything = self.finish_reason is not None and self._matcher.matched is None
        released = []
        while self._waiting and (everything or self._waiting[0].offset < self._shown):
            released.append(self._waiting.popleft())
        return released
