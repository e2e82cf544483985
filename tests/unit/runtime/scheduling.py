"""A scheduler over an engine that tells when it was given the wrong blocks, and answers given alone."""

from __future__ import annotations

import errno
import os
import select
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.runtime.blocks import BlockPool
from llmc.runtime.core_sequence import Scheduled, Sequence
from llmc.runtime.disk_io import DiskIo
from llmc.runtime.disk_shelf import DiskShelf
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.records import RecordFile, record_bytes
from llmc.runtime.scheduler import Scheduler
from llmc.runtime.step import Copies, StepBatch

VOCAB, EOS = 11, 10


def next_token(tokens: list[int]) -> int:
    """The model: a function of every token so far."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    return state % VOCAB


def alone(prompt: list[int], params: SamplingParams, max_seq_len: int) -> tuple[list[int], str]:
    """What a request must give, whatever happens around it."""
    tokens = list(prompt)
    limit = min(max_seq_len, len(prompt) + (params.max_tokens or max_seq_len))
    generated = 0
    while True:
        token = next_token(tokens)
        generated += 1
        stops = {EOS} if not params.ignore_eos else set()
        if token in stops | set(params.stop_token_ids) and generated > params.min_tokens:
            return tokens[len(prompt) :], "stop"
        tokens.append(token)
        if len(tokens) == limit:
            return tokens[len(prompt) :], "length"


@dataclass
class FakeEngine:
    """Keeps every block's content and computes a token only from what it reads back through the block table."""

    block_size: int
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (block, slot) -> (position, token)
    states: dict[int, list[int]] = field(default_factory=dict)  # state slot -> what the sequence in it has read
    host: dict[int, bytearray] = field(default_factory=dict)  # place -> i32 position and token of each slot, -1: none
    host_states: dict[int, list[int]] = field(default_factory=dict)

    def content(self, place: int) -> list[memoryview]:
        """What lies in a place of host memory."""
        return [memoryview(self.host.setdefault(place, bytearray(8 * self.block_size)))]

    def copy(self, copies: Copies) -> None:
        for block, place in copies.blocks_out:
            pairs = [self.memory.get((block, slot), (-1, -1)) for slot in range(self.block_size)]
            self.content(place)[0][:] = array("i", [number for pair in pairs for number in pair]).tobytes()
        for slot, place in copies.states_out:
            self.host_states[place] = self.states[slot]
        for block, place in copies.blocks_in:
            numbers = array("i", bytes(self.host[place]))
            for slot, content in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
                self.memory[block, slot] = content
        for slot, place in copies.states_in:
            self.states[slot] = self.host_states[place]

    def advance(self, chunk: Scheduled) -> list[int]:
        """The other memory: a state that starts anew at position 0 and otherwise goes on from what its slot holds."""
        known = self.states[chunk.state_slot] if chunk.start else []
        assert len(known) == chunk.start, f"the state in slot {chunk.state_slot} is not that of position {chunk.start}"
        self.states[chunk.state_slot] = [*known, *chunk.tokens]
        return self.states[chunk.state_slot]

    def run(self, batch: StepBatch[Scheduled]) -> list[int]:
        self.copy(batch.copies)
        written = Counter()
        for chunk in batch.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                place = chunk.blocks[position // self.block_size], position % self.block_size
                written[place] += 1
                self.memory[place] = position, token
        assert not written or max(written.values()) == 1, "two tokens of a step went to one place"
        tokens = []
        for chunk in batch.chunks:
            if chunk.rows:
                tokens.append(next_token(self.read(chunk)))
        return tokens

    def read(self, chunk: Scheduled) -> list[int]:
        found = []
        for position in range(chunk.start + len(chunk.tokens)):
            place = chunk.blocks[position // self.block_size], position % self.block_size
            kept, token = self.memory[place]
            assert kept == position, f"position {position} holds what belongs to {kept}"
            found.append(token)
        return found


class CarelessFile(RecordFile):
    """Damages every third record that it writes."""

    writes = 0

    def write(self, number: int, tag: int, parts: Seq[memoryview]) -> None:
        super().write(number, tag, parts)
        self.writes += 1
        if self.writes % 3 == 0:
            os.pwrite(self.descriptor, b"?" * 8, number * record_bytes(sum(map(len, parts))))


class FullFile(RecordFile):
    """Has room for a few records only."""

    writes = 0

    def write(self, number: int, tag: int, parts: Seq[memoryview]) -> None:
        self.writes += 1
        if self.writes > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(number, tag, parts)


class LateIo(DiskIo):
    """A disk that does something only when it is told to."""

    def __init__(self, file: RecordFile) -> None:
        super().__init__(file, start=False)

    def catch_up(self, jobs: int = 10**9) -> None:
        for _ in range(min(jobs, self._jobs.qsize())):
            self.work()


def on_disk(
    folder: Path,
    count: int = 100,
    kind: type[RecordFile] = RecordFile,
    io: Callable[[RecordFile], DiskIo] = LateIo,
) -> Callable[[FakeEngine], DiskShelf]:
    """A disk tier for the engine that `make` makes."""
    return lambda engine: DiskShelf(kind(folder, 8 * engine.block_size), count, engine.content, io)


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError unless every block and every sequence is accounted for."""
    scheduler.pool.check(sequence.blocks for sequence in scheduler._running)
    scheduler._slots.check(sequence.state_slot for sequence in scheduler._running)
    shelved = () if scheduler.shelf is None else scheduler.shelf.places()
    scheduler.parking.check((s.parked for s in scheduler._waiting if s.parked is not None), shelved)
    assert not any(sequence.blocks or sequence.state_slot != -1 for sequence in scheduler._waiting)
    assert {*scheduler._running, *scheduler._waiting} == set(scheduler._by_id.values())
    assert len(scheduler._running) + len(scheduler._waiting) == len(scheduler._by_id), "a sequence is in two places"
    assert scheduler._waiting.next is None or scheduler._waiting.next in [*scheduler._waiting]
    assert len(scheduler._running) <= scheduler._seats
    for sequence in scheduler._running:
        assert len(sequence.blocks) * scheduler.pool.block_size >= sequence.computed
        assert sequence.borrowed <= sequence.committed <= len(sequence.blocks)


@dataclass
class Run:
    """A scheduler, the fake engine, and what came of it."""

    scheduler: Scheduler
    engine: FakeEngine
    most_tokens: int
    most_seqs: int
    ended: dict[str, Sequence] = field(default_factory=dict)
    steps: int = 0
    overlap: bool = False
    flying: tuple[StepBatch[Scheduled], list[int]] | None = None
    disk: DiskShelf | None = None
    jobs_a_step: int = 10**9  # that a LateIo does
    idle: int = 0  # turns with nothing to compute

    def step(self, late: Iterable[Sequence] = ()) -> bool:
        """Composes a step and computes it; with `overlap`, its tokens come only when the next one is composed. Who is
        `late` comes after that.
        """
        if self.disk is not None and isinstance(self.disk._io, LateIo):
            self.disk._io.catch_up(self.jobs_a_step)
        elif self.disk is not None and self.scheduler._waiting.num_aside:
            select.select([self.disk.fileno()], [], [], 0.01)
        batch = self.scheduler.schedule()
        check(self.scheduler)
        before, self.flying = self.flying, None
        if before is not None:
            self.update(*before, batch)
        for sequence in late:
            self.scheduler.add(sequence)
        if before is not None and batch is not None:
            self.scheduler.extend(batch)
            check(self.scheduler)
        if batch is not None:
            self.flying = batch, self.compute(batch)
            if not self.overlap:
                self.update(*self.flying)
                self.flying = None
            self.steps += 1
        self.idle += batch is before is None
        assert self.idle < 10_000, "waits for ever"
        return batch is not None or before is not None or self.scheduler.num_waiting > 0

    def compute(self, batch: StepBatch[Scheduled]) -> list[int]:
        if not batch.chunks:
            self.engine.copy(batch.copies)
            return []
        assert 1 <= batch.num_tokens <= self.most_tokens
        assert len(batch.chunks) <= self.most_seqs
        assert all(token >= 0 for c in batch.chunks for token in c.tokens), "a token is not known"
        assert len({id(c.sequence) for c in batch.chunks}) == len(batch.chunks)
        assert len({c.state_slot for c in batch.chunks}) == len(batch.chunks), "two sequences share a state slot"
        assert all(0 <= c.state_slot < self.most_seqs for c in batch.chunks)
        assert all(len(c.tokens) >= 1 for c in batch.chunks)
        tokens = self.engine.run(batch)
        if not self.scheduler.pool.caching:
            states = [self.engine.advance(chunk) for chunk in batch.chunks]
            assert tokens == [next_token(s) for s, c in zip(states, batch.chunks, strict=True) if c.rows]
        for one in batch.chunks:
            for other in batch.chunks:
                if one.sequence.root != other.sequence.root or not one.sequence.shareable:
                    assert one is other or not {*one.blocks} & {*other.blocks}, "a block went to another tenant"
        return tokens

    def update(
        self, batch: StepBatch[Scheduled], tokens: list[int], following: StepBatch[Scheduled] | None = None
    ) -> None:
        gained = self.scheduler.update(batch, tokens, following)
        check(self.scheduler)
        for sequence in gained:
            if sequence is not None and sequence.finish_reason:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.ended, "ended twice"
        self.ended[sequence.request_id] = sequence

    def finish(self, bound: int = 20000) -> None:
        while self.step():
            assert self.steps < bound, "does not come to an end"


def make(
    *,
    blocks: int = 16,
    size: int = 4,
    seqs: int = 4,
    tokens: int = 16,
    length: int = 64,
    caching: bool = True,
    overlap: bool = False,
    disk: Callable[[FakeEngine], DiskShelf] | None = None,
    **options: Any,
) -> Run:
    pool = BlockPool(blocks, size, caching)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_seq_len": length}
    engine = FakeEngine(size)
    kept = None if disk is None else disk(engine)
    scheduler = Scheduler(pool, **limits, weights={"interactive": 3.0, "batch": 1.0}, disk=kept, **options)
    return Run(scheduler, engine, tokens, seqs, overlap=overlap, disk=kept)


def sequence(name: str, prompt: list[int], handling: Handling = Handling(), **params: object) -> Sequence:  # noqa: B008
    return Sequence(name, prompt, SamplingParams(**params), (EOS,), 0, handling)  # type: ignore[arg-type]


def answer(found: Sequence) -> list[int]:
    return found.tokens[found.num_prompt :].tolist()
