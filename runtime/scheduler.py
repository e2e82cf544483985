"""Which tokens of which sequence each step computes, decided anew before every step.

Comes in: `Sequence`s, a `BlockPool`, the tokens that a step produced. Goes out: `StepBatch`es, finished sequences.
Must not know: logits, processes, messages beyond `SamplingParams`. Standard library only; nothing here waits.

A step takes one token of every decoding sequence, then chunks of prompts, oldest first, until the token budget is
used, then admits waiting sequences, oldest first, while blocks for their whole prompt fit beside a reserve. Admission
does not count what an answer may grow to. When blocks run out, the youngest running sequence gives up its own and
waits again; later its tokens are computed anew, as a prompt, so it goes on where it stopped. The oldest sequence is
thus never set back, and as a sequence alone always fits, every sequence ends. With its blocks a sequence holds a state
slot, of which there are as many as sequences may run; set back, it carries no state along, as it starts anew.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from llmc.artifacts.errors import UsageError
from llmc.runtime.blocks import ROOT, BlockPool
from llmc.runtime.messages import FinishReason, SamplingParams
from llmc.runtime.slots import StateSlots
from llmc.runtime.step import Chunk, StepBatch

#: Share of the pool that admission leaves free for the growth of what runs already.
RESERVE = 0.01


class Sequence:
    """A request at work. `tokens` is the prompt and what was generated, without the stop token.

    The first `computed` tokens are in the KV cache, in `blocks`; the first `committed` of those blocks can be found by
    others. `cached_tokens` came from the prefix cache at first admission. `state_slot` is held as long as blocks are.
    `slot` belongs to the sampler.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "committed",
        "computed",
        "finish_reason",
        "generated",
        "limit",
        "num_prompt",
        "params",
        "request_id",
        "seed",
        "slot",
        "state_slot",
        "stop_ids",
        "stop_token",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Seq[int],
        params: SamplingParams,
        eos_token_ids: Seq[int] = (),
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.tokens = array("i", prompt)
        self.num_prompt = len(prompt)
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self.seed = seed
        self.limit = 0  # length at which it ends; set on submission
        self.generated = 0  # tokens sampled, a stop token included
        self.computed = 0
        self.committed = 0
        self.cached_tokens: int | None = None
        self.blocks = array("i")
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.state_slot = -1
        self.slot: object = None


@dataclass(slots=True)
class Scheduled(Chunk):
    """A chunk and the sequence that it belongs to."""

    sequence: Sequence


class Scheduler:
    """Owns the pool and every unfinished sequence. Counters count from its start."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_seq_len: int) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_seq_len = max_seq_len
        # With no more seats than tokens, every decode fits each step and a prompt gets at least one token.
        self._seats = min(max_num_seqs, max_num_batched_tokens)
        self._slots = StateSlots(self._seats)
        self._reserve = max(1, int(pool.num_blocks * RESERVE))
        self._running: list[Sequence] = []  # oldest first
        self._waiting: deque[Sequence] = deque()  # oldest first; all are younger than what runs
        self._by_id: dict[str, Sequence] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # those found
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none, the preempted included."""
        return len(self._waiting)

    def sequences(self) -> Iterator[Sequence]:
        """Every unfinished sequence, in order of submission."""
        return iter(tuple(self._by_id.values()))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises UsageError, with the numbers, for one that could never end within the limits."""
        n, pool_tokens = sequence.num_prompt, self.pool.num_blocks * self.pool.block_size
        wanted = sequence.params.max_tokens
        if n == 0:
            raise UsageError("the prompt has no tokens; at least one is needed")
        if wanted is not None and wanted < 1:
            raise UsageError(f"max_tokens is {wanted}; it must be at least 1")
        least = n + (wanted or 1)
        what = f"{n} tokens of prompt and {wanted or 1} to be generated are {least}"
        if least > self.max_seq_len:
            raise UsageError(f"{what}, more than this engine's max_seq_len of {self.max_seq_len}")
        if least > pool_tokens:
            raise UsageError(
                f"{what}, more than the {pool_tokens} that the KV pool holds ({self.pool.num_blocks} blocks of "
                f"{self.pool.block_size}); a larger --kv-bytes would help"
            )
        if sequence.request_id in self._by_id:
            raise ValueError(f"request id {sequence.request_id!r} is in use")
        sequence.limit = min(self.max_seq_len, pool_tokens, n + wanted if wanted is not None else self.max_seq_len)
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Sequence | None:
        """Ends a sequence, wherever it is, between two steps; None when there is none of that id."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence

    def schedule(self) -> StepBatch[Scheduled] | None:
        """The next step; None when there is nothing to do. `update` must follow before the next call."""
        chunks: list[Scheduled] = []
        preempted = self._schedule_decodes(chunks)
        budget = self.max_num_batched_tokens - len(chunks)
        for sequence in self._running:
            if budget and len(sequence.tokens) - sequence.computed > 1:
                budget -= self._append(chunks, sequence, budget)
        # After a preemption nobody is admitted: it would only take the blocks that were given up.
        while budget and not preempted and self._waiting and len(self._running) < self._seats:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            self._running.append(self._waiting.popleft())
            budget -= self._append(chunks, sequence, budget)
        assert chunks or not self._by_id, "sequences are left, but none of them can run"
        return StepBatch(chunks) if chunks else None

    def _schedule_decodes(self, chunks: list[Scheduled]) -> bool:
        """Appends a token of each decoding sequence; True if one had to be preempted for want of blocks."""
        running, preempted, index = self._running, False, 0
        while index < len(running):
            sequence = running[index]
            if len(sequence.tokens) - sequence.computed == 1:
                # Whoever gives way is the youngest, so nobody who was appended already.
                while running[-1] is not sequence and not self._has_room(sequence):
                    self._preempt(running.pop())
                    preempted = True
                if not self._has_room(sequence):
                    self._preempt(running.pop())
                    return True
                self._append(chunks, sequence, 1)
            index += 1
        return preempted

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is a block for every token, once one more was allocated if need be."""
        if len(sequence.blocks) * self.pool.block_size < len(sequence.tokens):
            if not self.pool.num_available:
                return False
            sequence.blocks.append(self.pool.allocate())
        return True

    def _append(self, chunks: list[Scheduled], sequence: Sequence, budget: int) -> int:
        start, end = sequence.computed, len(sequence.tokens)
        stop = min(end, start + budget)
        rows, slot = int(stop == end), sequence.state_slot
        chunks.append(Scheduled(sequence.tokens[start:stop], start, sequence.blocks, rows, slot, sequence))
        return stop - start

    def _admit(self, sequence: Sequence) -> bool:
        """Gives the sequence blocks for all its tokens, or none if they do not fit beside the reserve."""
        pool, n = self.pool, len(sequence.tokens)
        # The last token is always computed, as its logits are wanted; and it never lands in a block that is shared.
        prefix = pool.match(sequence.tokens, (n - 1) // pool.block_size)
        fresh = pool.blocks_for(n) - len(prefix)
        if fresh + (self._reserve if self._running else 0) > pool.available_besides(prefix):
            return False
        pool.hold(prefix)
        sequence.state_slot = self._slots.take()
        sequence.blocks = array("i", prefix)
        sequence.blocks.extend([pool.allocate() for _ in range(fresh)])
        sequence.committed = len(prefix)
        sequence.computed = len(prefix) * pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.prompt_tokens += n
            if pool.caching:
                self.prefix_queries += n
                self.prefix_hits += sequence.computed
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def update(self, batch: StepBatch[Scheduled], tokens: Seq[int]) -> list[Sequence]:
        """Takes what the step produced: a token per row, -1 where none could be chosen, which ends that sequence.

        Returns the sequences of the rows, in order. One that has ended has its `finish_reason`; one that goes on has
        gained its token.
        """
        gained: list[Sequence] = []
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sequence.computed += len(chunk.tokens)
            token = tokens[len(gained)] if chunk.rows else None
            if token != -1:  # what gave no token is not offered to others
                self._commit(sequence)
            if token is not None:
                gained.append(sequence)
                self._take(sequence, token)
        return gained

    def _take(self, sequence: Sequence, token: int) -> None:
        if token == -1:
            self._finish(sequence, "error")
            return
        sequence.generated += 1
        self.generation_tokens += 1
        if token in sequence.stop_ids and sequence.generated > sequence.params.min_tokens:
            sequence.stop_token = token
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token)
        if len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")

    def _commit(self, sequence: Sequence) -> None:
        """Offers the blocks that the step has filled to the prefix cache."""
        size, blocks = self.pool.block_size, sequence.blocks
        while (sequence.committed + 1) * size <= sequence.computed:
            i = sequence.committed
            key = tuple(sequence.tokens[i * size : (i + 1) * size])
            blocks[i] = self.pool.commit(blocks[i - 1] if i else ROOT, key, blocks[i])
            sequence.committed += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._by_id[sequence.request_id]
        if sequence.blocks:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish_reason = reason

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._slots.give_back(sequence.state_slot)
        sequence.state_slot = -1
        sequence.blocks = array("i")
        sequence.computed = sequence.committed = 0

    def check(self) -> None:
        """Raises AssertionError unless every block and every sequence is accounted for."""
        self.pool.check(sequence.blocks for sequence in self._running)
        self._slots.check(sequence.state_slot for sequence in self._running)
        assert not any(sequence.blocks or sequence.state_slot != -1 for sequence in self._waiting)
        assert [*self._running, *self._waiting] == list(self._by_id.values()), "not in the order of submission"
        assert len(self._running) <= self._seats
        for sequence in self._running:
            assert len(sequence.blocks) * self.pool.block_size >= sequence.computed
