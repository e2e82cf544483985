"""Which tokens of which sequence each step computes, decided anew before every step.

Comes in: `Sequence`s, a `BlockPool`, the tokens that a step produced. Goes out: `StepBatch`es, finished sequences.
Must not know: logits, processes, messages beyond their types. Standard library only; nothing here waits.

A step takes one token of every decoding sequence. What is left of its tokens goes to prompts in small grants, each to
whom `Policy` chooses among the prompts at work and, while seats are free, the waiting. A waiting sequence that is
chosen is admitted if the blocks of its prompt fit beside a watermark, now and at the peak that `peak_blocks` expects;
if they do not, it is next, as `Waiting` says.

When blocks run out all the same, sequences give up their own and wait again, lowest class and youngest first; later
their tokens are computed anew, as a prompt, or copied back from where `Parking` has put them, so they go on where they
stopped. The oldest sequence of all is never set back, and a sequence alone always fits, so every sequence ends. With
its blocks a sequence holds a state slot, of which there are as many as sequences may run.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

from llmc.artifacts.errors import UsageError
from llmc.runtime.admission import Forecast, Patience, most_tokens
from llmc.runtime.blocks import BlockPool
from llmc.runtime.core_sequence import Scheduled, Sequence
from llmc.runtime.disk_shelf import DiskShelf
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.messages import INTERACTIVE, Cause, FinishReason
from llmc.runtime.pacing import Pace
from llmc.runtime.parking import Parking
from llmc.runtime.policy import Policy
from llmc.runtime.sharing import Sharing
from llmc.runtime.shelf import Shelf
from llmc.runtime.slots import StateSlots
from llmc.runtime.step import StepBatch
from llmc.runtime.waiting import Waiting

#: Into how many grants a step's prompt tokens are cut at least.
_GRANTS = 8
#: A paced step takes so many prompt tokens beside its decodes, however slow it is: prompts must go on.
LEAST_CHUNK = 4
#: A prompt is long while more of it is left than so many full steps compute.
LONG_STEPS = 4
_ENDED_WELL = ("stop", "length")


class Scheduler:
    """Owns the pool and every unfinished sequence. Counters count from its start.

    `weights` are the priority classes; `max_long_prefills` bounds the long prompts of a class that are at work at once
    (None: no bound), `patience` the queue; `pace`, fed by whoever runs the steps, bounds the tokens of a step in which
    anybody decodes. `memory` is host memory for those who are set back, which carry a state if they `need_state`, and
    for what the prefix cache evicts, which goes on to `disk` from there. `clock` gives seconds.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_seq_len: int,
        weights: Mapping[str, float] | None = None,
        max_long_prefills: int | None = None,
        patience: Patience | None = None,
        pace: Pace | None = None,
        memory: HostMemory | None = None,
        disk: DiskShelf | None = None,
        needs_state: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._memory = memory or HostMemory(0)
        self.parking = Parking(self._memory, pool.block_size, needs_state=needs_state)
        self.shelf = Shelf(self._memory, pool.block_size, disk) if pool.caching and self._memory.num_blocks else None
        self._sharing = Sharing(pool, self.shelf)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_seq_len = max_seq_len
        self.policy: Policy[Sequence] = Policy(weights or {INTERACTIVE: 1.0})
        self._max_long = max_num_seqs if max_long_prefills is None else max_long_prefills
        self._patience = patience or Patience(None, None)
        self._pace = pace
        self._clock = clock
        # With no more seats than tokens, every decode fits each step and a prompt gets at least one token.
        self._seats = min(max_num_seqs, max_num_batched_tokens)
        self._slots = StateSlots(self._seats)
        self._forecast = Forecast(pool.num_blocks, pool.block_size)
        self._running: list[Sequence] = []  # by standing: whoever gives way first is last
        self._waiting = Waiting(self.policy.weights, self._patience)
        self._by_id: dict[str, Sequence] = {}
        self._serial = 0
        self._room = 0  # tokens that the step composed last could still take
        self.prompt_tokens = self.generation_tokens = self.preemptions = 0
        self.rejections: Counter[Cause] = Counter()

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none, the preempted included."""
        return len(self._waiting)

    def waiting_by_class(self) -> dict[str, int]:
        """How many wait, by priority class."""
        return self._waiting.sizes()

    def sequences(self) -> Iterator[Sequence]:
        """Every unfinished sequence, in order of submission."""
        return iter(tuple(self._by_id.values()))

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises UsageError, with the numbers, for one that could never end within the limits."""
        pool, wanted = self.pool, sequence.params.max_tokens
        limit = most_tokens(sequence.num_prompt, wanted, self.max_seq_len, pool.num_blocks, pool.block_size)
        if sequence.priority not in self.policy.weights:
            raise UsageError(f"priority is {sequence.priority!r}; there is {', '.join(self.policy.weights)}")
        if sequence.request_id in self._by_id:
            raise ValueError(f"request id {sequence.request_id!r} is in use")
        sequence.limit, sequence.serial, sequence.arrived = limit, self._serial, self._clock()
        sequence.shareable = sequence.shareable and self.pool.caching
        self._serial += 1
        self._by_id[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Sequence | None:
        """Ends a sequence, wherever it is, between two steps; None when there is none of that id."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence

    def turn_away(self) -> list[Sequence]:
        """Ends those who have waited too long or are too many; each has its `cause`. To be called after `schedule`,
        which has admitted all it could.
        """
        turned = self._waiting.impatient(self._clock())
        for sequence in turned:
            assert sequence.cause is not None
            self.rejections[sequence.cause] += 1
            self._finish(sequence, "error")
        return turned

    def retry_after(self) -> int:
        """Whole seconds after which one that is turned away now should come again."""
        return self._patience.retry_after(len(self._waiting), self._clock())

    # A step

    def schedule(self) -> StepBatch[Scheduled] | None:
        """The next step, or None when there is nothing to do. From now on the books say that it was computed, and that
        whoever's last token is in it goes on; `update` takes the tokens, and must follow before the second next call.
        """
        self._waiting.call_back(self._sharing.answered())
        self._memory.settle()
        # Not earlier: blocks are given back here that the last step, whoever joined it late included, still wrote.
        for sequence in self._running:
            self._sharing.commit(sequence)
        chunks: list[Scheduled] = []
        preempted = self._schedule_decodes(chunks)
        self._room = self.max_num_batched_tokens
        if chunks and self._pace is not None:
            self._room = min(max(self._pace.tokens(), len(chunks) + LEAST_CHUNK), self._room)
        self._room -= len(chunks)
        self._schedule_prompts(chunks, admit=not preempted)
        if preempted:
            self._room = 0  # whoever is admitted now would only take the blocks that were given up
        waits = self._waiting.num_aside or any(sequence.pending for sequence in self._running)
        stuck = not chunks and self._by_id and not waits
        assert not stuck, "sequences are left, but none of them can run"
        self._count_as_done(chunks)
        return StepBatch(chunks, self._memory.take_copies()) if chunks else None

    def extend(self, batch: StepBatch[Scheduled]) -> None:
        """Takes more of those who wait into the step composed last, which has not begun, if it has room for them."""
        # With room left, every prompt at work is in it to its end.
        more: list[Scheduled] = []
        if self._room and len(self._waiting):
            self._schedule_prompts(more, admit=True)
        self._count_as_done(more)
        batch.chunks += more
        batch.copies.extend(self._memory.take_copies())

    def _schedule_prompts(self, chunks: list[Scheduled], *, admit: bool) -> None:
        """Appends what prompts get of the step's room."""
        for sequence, tokens in self._share_out(self._room, admit=admit).items():
            chunks.append(Scheduled.of(sequence, tokens))
            self._room -= tokens

    def _count_as_done(self, chunks: list[Scheduled]) -> None:
        for chunk in chunks:
            chunk.sequence.computed += len(chunk.tokens)
            if chunk.rows:
                chunk.sequence.expect()

    def _schedule_decodes(self, chunks: list[Scheduled]) -> bool:
        """Appends a token of each decoding sequence; True if one had to be preempted for want of blocks."""
        running, preempted, index = self._running, False, 0
        # Only the oldest of all can stand elsewhere than it did.
        eldest = min((s.serial for s in running), default=0)
        running.sort(key=lambda s: (s.serial != eldest, *self.policy.standing(s)))
        while index < len(running):
            sequence = running[index]
            # With its limit of tokens, if one is not known yet, it only waits for that to end.
            if sequence.remaining == 1 and len(sequence.tokens) < sequence.limit:
                # Whoever gives way is last, so nobody who was appended already.
                while running[-1] is not sequence and not self._has_room(sequence):
                    self._preempt(running.pop())
                    preempted = True
                if not self._has_room(sequence):
                    self._preempt(running.pop())
                    return True
                chunks.append(Scheduled.of(sequence, 1))
                self.policy.charge(sequence, 1)
            index += 1
        return preempted

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is a block for every token, once one more was allocated if need be."""
        if len(sequence.blocks) * self.pool.block_size < len(sequence.tokens):
            if not self.pool.num_available:
                return False
            sequence.blocks.append(self.pool.allocate())
        return True

    def _share_out(self, budget: int, *, admit: bool) -> dict[Sequence, int]:
        """Divides tokens among prompts, admitting those who wait where they come first and fit."""
        grants: dict[Sequence, int] = {}
        grain = max(self.pool.block_size, budget // _GRANTS)
        prompts = [sequence for sequence in self._running if sequence.remaining > 1]
        if admit and self._waiting.next is not None and budget:
            self._join(prompts, self._waiting.next)
        while budget:
            chosen = self._choose(prompts, admit)
            if chosen is None:
                break
            if not chosen.blocks:
                admit = self._join(prompts, chosen)
            if not chosen.blocks:
                continue
            if chosen not in grants:
                self._sharing.catch_up(chosen)
            left = chosen.remaining - grants.get(chosen, 0)
            tokens = min(grain, budget, left)
            grants[chosen] = grants.get(chosen, 0) + tokens
            budget -= tokens
            self.policy.charge(chosen, tokens)
            if tokens == left:
                prompts.remove(chosen)
            self._sharing.promise(chosen, chosen.computed + grants[chosen])
        return grants

    def _choose(self, prompts: list[Sequence], admit: bool) -> Sequence | None:
        candidates = [*prompts]
        if admit and len(self._running) < self._seats:
            long = Counter(sequence.priority for sequence in self._running if self._is_long(sequence))
            for name in self.policy.weights:
                full = long[name] >= self._max_long
                found = self._waiting.candidates(name)
                candidates += [waiter for waiter in found if not (full and self._is_long(waiter))]
        return self.policy.choose(candidates) if candidates else None

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.remaining > LONG_STEPS * self.max_num_batched_tokens

    # Admission

    def _join(self, prompts: list[Sequence], sequence: Sequence) -> bool:
        """Moves a waiting sequence to the prompts at work, or aside if the disk has to be waited for. False, and it is
        next unless somebody else is, where it does not fit.
        """
        prefix = self._place_for(sequence)
        if prefix is None:
            self._waiting.refuse(sequence)
            return False
        if self._sharing.ask(sequence, prefix):
            self._waiting.set_aside(sequence)
            return True
        self._waiting.admit(sequence, sequence.remaining)
        self._admit(sequence, prefix)
        self._running.append(sequence)
        prompts.append(sequence)
        return True

    def _place_for(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks that it can start from, if there is a seat and all its tokens fit beside those at work."""
        if len(self._running) >= self._seats:
            return None
        prefix = self._sharing.match(sequence)
        available = self.pool.available_besides(prefix)
        if self.pool.blocks_for(len(sequence.tokens)) - len(prefix) > available:
            return None
        fits = not self._running or self._forecast.fits(self._running, sequence, len(prefix), available)
        return prefix if fits else None

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Gives the sequence blocks for all its tokens, and what is known of them."""
        pool, n = self.pool, len(sequence.tokens)
        if sequence.admitted is None:
            sequence.admitted = self._clock()
            self.prompt_tokens += n
        sequence.asked = False
        pool.hold(prefix)
        picked = self._sharing.pick(sequence, prefix)  # before blocks that are evicted now take their places
        sequence.state_slot = self._slots.take()
        sequence.blocks = array("i", prefix)
        sequence.blocks.extend([pool.allocate() for _ in range(pool.blocks_for(n) - len(prefix))])
        self._sharing.began(sequence, len(prefix))
        self._sharing.restore(sequence, picked)
        if (parked := sequence.parked) is not None:
            self.parking.restore(parked, sequence.blocks, len(prefix), sequence.state_slot)
            sequence.computed = max(sequence.computed, parked.tokens)
            sequence.parked = None

    def _preempt(self, sequence: Sequence) -> None:
        sequence.parked = self.parking.park(sequence.computed, sequence.blocks, sequence.state_slot)
        sequence.set_back += 1
        self._release(sequence)
        self._waiting.add(sequence)
        self.preemptions += 1

    # After a step

    def update(
        self, batch: StepBatch[Scheduled], tokens: Seq[int], following: StepBatch[Scheduled] | None = None
    ) -> list[Sequence | None]:
        """Takes what the step produced: a token per row, -1 where none could be chosen, which ends that sequence.

        Returns the sequences of the rows, in order, None for one that had ended before. One that has ended now has its
        `finish_reason`; one that goes on has gained its token. The step `following`, if it is composed already, learns
        the tokens that it starts from, and loses the chunks of those that have ended.
        """
        gained: list[Sequence | None] = []
        ahead = {chunk.sequence: chunk for chunk in following.chunks} if following is not None else {}
        for chunk, token in zip((chunk for chunk in batch.chunks if chunk.rows), tokens, strict=True):
            sequence = chunk.sequence
            if token == -1:
                self._sharing.retract(chunk, self._running)
            if sequence.finish_reason is not None:
                gained.append(None)
                continue
            gained.append(sequence)
            self._take(sequence, token)
            if sequence in ahead and sequence.finish_reason is None:
                ahead[sequence].tokens[-1] = token
        if following is not None:
            following.chunks = [chunk for chunk in following.chunks if chunk.sequence.finish_reason is None]
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
        sequence.learn(token)
        if sequence.known >= sequence.limit:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._by_id[sequence.request_id]
        if sequence.blocks:
            self._running.remove(sequence)
            if reason != "error":
                self._sharing.commit(sequence)
            self._release(sequence)
            self._patience.ended(self._clock())
        else:
            self._waiting.remove(sequence)
            if sequence.parked is not None:
                self.parking.drop(sequence.parked)
                sequence.parked = None
        sequence.expect_nothing()
        if reason in _ENDED_WELL:
            self._forecast.answers.ended(sequence.generated)
        sequence.finish_reason = reason

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._slots.give_back(sequence.state_slot)
        sequence.state_slot = -1
        sequence.blocks = array("i")
        sequence.computed = sequence.committed = sequence.borrowed = 0
