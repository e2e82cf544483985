"""The engine core: takes requests from a channel, runs steps until all have ended, and says what each has gained.

Comes in: a plan, a channel to the front end, `CoreOptions`. Goes out: `Output`, `Stats`, `Ready`, `Fatal` messages.
Must not know: text, HTTP, how a step is computed.

One loop: messages in, schedule, compute, sample, messages out. It waits only where it has nothing to do, on channel,
ranks and disk at once; the disk has a thread of its own. With `overlap`, a step is composed while the ranks compute the
one before it, and what that one gave is sent while they compute the next: between two steps there is only the sampling.
"""

from __future__ import annotations

import gc
import secrets
import select
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Self

import numpy as np

from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan
from llmc.runtime.admission import Patience
from llmc.runtime.blocks import BlockPool
from llmc.runtime.channel import Channel, ChannelClosed
from llmc.runtime.core_sequence import Scheduled, Sequence
from llmc.runtime.disk_shelf import DiskShelf
from llmc.runtime.executor import Executor, ParentGone, RankLost
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.kv_size import choose_disk_records, staging_bytes
from llmc.runtime.messages import (
    STEP_TOKENS,
    Abort,
    Alive,
    Fatal,
    FromCore,
    Output,
    Ready,
    Shutdown,
    Stats,
    Submit,
    ToCore,
)
from llmc.runtime.native_sampler import Sampled
from llmc.runtime.options import CoreOptions
from llmc.runtime.pacing import Pace
from llmc.runtime.params import Limits, check, fit
from llmc.runtime.records import RecordFile
from llmc.runtime.sampling import RowSampler, logprobs_of, sampler_params_of
from llmc.runtime.scheduler import LEAST_CHUNK, Scheduler
from llmc.runtime.shelf import Shelf
from llmc.runtime.step import Chunk, StepBatch

_STATS_SECONDS = 0.1
#: While it rests, so often the core looks after its ranks and shows that it lives, in seconds.
_BEAT_SECONDS = 1.0
_TURNED_AWAY = {
    "queue_full": "the queue is full: {waiting} requests wait already (--max-num-queued-reqs)",
    "queue_timeout": "the request was not begun within {seconds:g} s (--queue-timeout)",
}
_NO_TOKEN = "no token could be chosen: the model's logits are not finite, or every token is banned"


class Core:
    """A loaded plan at work. Leaving its `with` ends the ranks. Raises LlmcError where the plan cannot be loaded."""

    def __init__(self, plan: Plan, channel: Channel[ToCore], options: CoreOptions) -> None:
        profile, model = plan.manifest.profile, plan.manifest.model
        options.check(profile)
        options.check_disk(plan.manifest)
        options.check_mmap(plan.manifest)
        host_bytes = options.kv_host_bytes
        if host_bytes is None and options.kv_disk is not None:
            host_bytes = staging_bytes(plan.manifest)
        self._channel = channel
        self._eos = model.eos_token_ids
        self._executor = Executor(
            plan,
            threads=options.threads,
            kv_bytes=options.kv_bytes,
            num_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            host_bytes=host_bytes,
            step_timeout=options.step_timeout,
            watch=channel.fileno(),
            on_wait=self._beat,
            verify=options.verify,
            mmap=options.mmap,
        )
        self._max_num_seqs = options.max_num_seqs or profile.max_num_seqs
        caching = options.reuses_prefixes(plan.manifest)
        self._pool = BlockPool(self._executor.num_blocks, profile.block_size, caching)
        most = options.max_num_batched_tokens or profile.max_num_batched_tokens
        budget = options.itl_budget_ms
        self._pace = None if budget is None else Pace(budget / 1000, min(LEAST_CHUNK, most), most)
        self._patience = Patience(options.max_num_queued_reqs, options.queue_timeout)
        self._memory = HostMemory(self._executor.host_blocks, self._executor.host_states)
        self._disk = self._open_disk(options)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=most,
            max_seq_len=profile.max_seq_len,
            weights=options.priority_weights,
            max_long_prefills=options.max_long_prefills,
            patience=self._patience,
            pace=self._pace,
            memory=self._memory,
            disk=self._disk,
            needs_state=plan.manifest.state_slot_bytes > 0,
        )
        pool_tokens = self._pool.num_blocks * profile.block_size
        self._limits = Limits(model.vocab_size, profile.max_seq_len, pool_tokens)
        self._sampler = RowSampler(
            self._executor.library,
            model.vocab_size,
            profile.max_num_seqs,
            self._executor.threads * len(plan.manifest.ranks),
        )
        self._sampler_params: np.ndarray | None = None  # of the step that was begun last
        self._draining = self._stopping = False
        self._later: list[ToCore] = []  # messages that have come, and were not taken yet
        self._overlap = options.overlap
        self._steps = 0
        self._step_seconds = self._schedule_seconds = self._gap_seconds = 0.0
        self._begun = 0.0  # when the last step was
        self._computed: float | None = None  # when the last step's logits were there; None after a rest
        self._step_sequences = self._step_tokens_sum = 0
        self._step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._stats_time = 0.0
        self._stats_steps = -1

    def _open_disk(self, options: CoreOptions) -> DiskShelf | None:
        if options.kv_disk is None or options.kv_disk_bytes is None:
            return None
        manifest = self._executor.plan.manifest
        count = choose_disk_records(manifest, options.kv_disk_bytes)
        file = RecordFile(Path(options.kv_disk), manifest.kv_block_bytes)
        return DiskShelf(file, count, self._executor.host_places.content)

    def run(self, load_seconds: float = 0.0) -> int:
        """Serves until told to stop; returns the exit code: 0 after a Shutdown, 1 when a rank was lost.

        Raises ChannelClosed or ParentGone when the front end has gone.
        """
        idle = select.poll()
        disk = () if self._disk is None else (self._disk.fileno(),)
        for descriptor in (self._channel.fileno(), *self._executor.descriptors(), *disk):
            idle.register(descriptor, select.POLLIN)
        try:
            # The first step proves that the engine computes. Block 0 and state slot 0 are nobody's yet.
            self._executor.run(StepBatch([Chunk(array("i", [0]), 0, array("i", [0]), 1, 0)]))
            self._memory.probe(self._executor.copy, self._pool.num_blocks)
            ready = Ready(
                self._pool.num_blocks, self._max_num_seqs, self._scheduler.max_num_batched_tokens, load_seconds
            )
            self._channel.send(ready)
            gc.freeze()  # what was loaded stays: no collection has to look at it again
            self._loop(idle)
        except RankLost as error:
            self._fail_all(str(error))
            self._channel.send(Fatal(str(error)))
            return 1
        except (ChannelClosed, ParentGone):
            raise
        except Exception as error:
            self._fail_all(f"internal error of the engine core: {error!r}")
            raise
        return 0

    def _loop(self, idle: select.poll) -> None:
        flying: StepBatch[Scheduled] | None = None  # the step that the ranks compute
        while not self._stopping:
            self._receive()
            batch = self._compose()
            if flying is batch is None:
                if self._draining and not self._scheduler.num_waiting:
                    return
                self._rest(idle)
                continue
            messages = self._finish(flying, batch) if flying is not None else []
            if flying is not None and batch is not None:
                self._receive_requests()  # who came while the step was computed does not wait for one more
                self._scheduler.extend(batch)
            flying = batch if batch is not None and self._begin(batch) else None
            if flying is not None and not self._overlap:
                messages, flying = self._finish(flying), None
            if messages:
                self._channel.send(*messages)

    def _rest(self, idle: select.poll) -> None:
        self._computed = None
        self._send_stats()
        if not idle.poll(_BEAT_SECONDS * 1000):
            self._beat()
        self._executor.check()

    def _beat(self) -> None:
        self._channel.send(Alive())

    # Messages in

    def _receive_requests(self) -> None:
        """Takes what has come, up to what must wait until the step that is composed has begun."""
        self._later += self._channel.receive(0)
        while self._later and isinstance(message := self._later[0], Submit):
            self._submit(message)
            del self._later[0]

    def _receive(self) -> None:
        messages, self._later = [*self._later, *self._channel.receive(0)], []
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                sequence = self._scheduler.abort(message.request_id, message.finish_reason)
                if sequence is not None:
                    self._channel.send(Output(message.request_id, [], finish_reason=message.finish_reason))
            else:
                self._shut_down(message)

    def _submit(self, message: Submit) -> None:
        try:
            if self._draining:
                raise UsageError("the engine is shutting down and takes no more requests")
            params = fit(message.prompt, check(message.params, self._limits), self._limits)
            seed = secrets.randbits(63) if params.seed is None else params.seed
            sequence = Sequence(message.request_id, message.prompt, params, self._eos, seed, message.handling)
            self._scheduler.add(sequence)
        except UsageError as error:
            self._channel.send(Output(message.request_id, [], finish_reason="error", error=str(error)))

    def _turn_away(self) -> None:
        """Ends those that have waited too long, or for whom the queue is too short."""
        for sequence in self._scheduler.turn_away():
            assert sequence.cause is not None
            waiting, seconds = self._scheduler.num_waiting, self._patience.timeout or 0.0
            after = self._scheduler.retry_after()
            error = f"{_TURNED_AWAY[sequence.cause].format(waiting=waiting, seconds=seconds)}; try again in {after} s"
            self._channel.send(
                Output(
                    sequence.request_id, [], finish_reason="error", error=error, cause=sequence.cause, retry_after=after
                )
            )

    def _shut_down(self, message: Shutdown) -> None:
        self._draining = True
        if not message.drain:
            self._stopping = True
            self._fail_all("the engine was shut down")

    def _fail_all(self, error: str) -> None:
        outputs = []
        for sequence in self._scheduler.sequences():
            self._scheduler.abort(sequence.request_id, "error")
            outputs.append(Output(sequence.request_id, [], finish_reason="error", error=error))
        if outputs:
            self._channel.send(*outputs)

    # A step

    def _compose(self) -> StepBatch[Scheduled] | None:
        began = time.perf_counter()
        batch = self._scheduler.schedule()
        self._turn_away()
        self._schedule_seconds += time.perf_counter() - began
        return batch

    def _begin(self, batch: StepBatch[Scheduled]) -> bool:
        """Has the ranks copy and compute; False where nothing is left to compute, as all of it has ended meanwhile."""
        self._begun = time.perf_counter()
        if batch.copies:
            self._memory.observe_copy(batch.copies.num_blocks, self._executor.copy(batch.copies))
        if not batch.chunks:
            return False
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.rows]
        self._sampler_params = sampler_params_of(sequences) if self._executor.samples else None
        self._executor.begin(batch, self._sampler_params)
        if self._computed is not None:
            self._gap_seconds += time.perf_counter() - self._computed
        return True

    def _finish(self, batch: StepBatch[Scheduled], following: StepBatch[Scheduled] | None = None) -> list[FromCore]:
        """Waits for a step; what there is to say about it. `following` is the next one, if that is composed already."""
        logits = self._executor.finish()
        self._computed = time.perf_counter()
        sequences = [chunk.sequence for chunk in batch.chunks if chunk.rows]
        if self._sampler_params is None:
            sampled = self._sampler.sample(logits, sequences)
        else:
            sampled = self._sampler.complete(logits, sequences, self._sampler_params, self._executor.tokens)
        gained = self._scheduler.update(batch, [found.token for found in sampled], following)
        now = time.perf_counter()
        self._observe(batch, now - self._begun)
        pairs = zip(gained, sampled, strict=True)
        messages: list[FromCore] = [_output(sequence, found) for sequence, found in pairs if sequence is not None]
        if now - self._stats_time >= _STATS_SECONDS:
            messages.append(self._stats(now))
        return messages

    def _observe(self, batch: StepBatch[Scheduled], seconds: float) -> None:
        """Counts a step, and tells who plans by the time that steps take."""
        tokens = batch.num_tokens
        self._steps += 1
        self._step_seconds += seconds
        self._step_sequences += len(batch.chunks)
        self._step_tokens_sum += tokens
        self._step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        if self._pace is not None:
            self._pace.observe(tokens, seconds)
        self._memory.observe_step(tokens - sum(len(chunk.tokens) == 1 for chunk in batch.chunks), tokens, seconds)

    def _send_stats(self) -> None:
        """Once per time of rest."""
        if self._stats_steps != self._steps or self._stats_time == 0.0:
            self._channel.send(self._stats(time.perf_counter()))

    def _stats(self, now: float) -> Stats:
        self._stats_time, scheduler, cache = now, self._scheduler, self._pool.counters
        tiers: dict[str, Shelf | DiskShelf] = {} if scheduler.shelf is None else {"host": scheduler.shelf}
        if self._disk is not None:
            tiers["disk"] = self._disk
        idle = not scheduler.num_running and not scheduler.num_waiting
        self._stats_steps = self._steps if idle else -1
        return Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks_used=self._pool.num_held,
            blocks_total=self._pool.num_blocks,
            steps=self._steps,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
            prefix_queries=cache.queries,
            prefix_hits=cache.hits,
            preemptions=scheduler.preemptions,
            step_seconds=self._step_seconds,
            schedule_seconds=self._schedule_seconds,
            gap_seconds=self._gap_seconds,
            waiting_by_class=scheduler.waiting_by_class(),
            rejections={str(cause): count for cause, count in scheduler.rejections.items()},
            blocks_cached=self._pool.num_cached,
            preemptions_copied=scheduler.parking.parked,
            host_blocks_used=scheduler.parking.num_used,
            host_blocks_total=self._memory.num_blocks,
            shelf_blocks={name: len(tier) for name, tier in tiers.items()},
            shelf_hits={name: tier.hits * self._pool.block_size for name, tier in tiers.items()},
            shelf_evictions={name: tier.evictions for name, tier in tiers.items()},
            shelf_damaged={} if self._disk is None else {"disk": self._disk.damaged},
            shelf_refused={} if self._disk is None else {"disk": self._disk.refused},
            evictions=cache.evictions,
            evicted_lifetime_seconds=cache.lifetime_seconds,
            evicted_idle_seconds=cache.idle_seconds,
            step_sequences=self._step_sequences,
            step_tokens_sum=self._step_tokens_sum,
            step_tokens=self._step_tokens,
        )

    def close(self) -> None:
        """Ends the ranks, once no disk reads into what they share."""
        if self._disk is not None:
            self._disk.close()
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _output(sequence: Sequence, sampled: Sampled) -> Output:
    """What a sequence has gained by a step."""
    shown: Seq[int] = () if sequence.stop_token is not None or sampled.token == -1 else (sampled.token,)
    return Output(
        sequence.request_id,
        list(shown),
        [logprobs_of(sampled)] if shown and sequence.params.logprobs is not None else None,
        sequence.finish_reason,
        sequence.stop_token,
        _NO_TOKEN if sequence.finish_reason == "error" else None,
        sequence.cached_tokens,
        queue_seconds=(sequence.admitted or sequence.arrived) - sequence.arrived,
    )
