"""A sequence as the core works on it; what a client sees of it is runtime/sequence.py.

Comes in: a prompt and how it is to be treated. Goes out: `Sequence`, `Scheduled`. Must not know: pools, order, steps.
Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

from llmc.runtime.blocks import ROOT, Root
from llmc.runtime.messages import Cause, FinishReason, Handling, SamplingParams
from llmc.runtime.parking import Parked
from llmc.runtime.step import Chunk

#: Stands where a token is not known yet. No block is ever looked up by it.
UNKNOWN = -1


class Sequence:
    """A request at work. `tokens` is the prompt and what was generated, without the stop token. The last `pending` of
    them are not known yet: steps that will give them are composed or being computed, and UNKNOWN stands in their place.

    The first `computed` tokens are in the KV cache, in `blocks`, once every step composed so far is done; the first
    `committed` of those blocks can be found by others under `root`, unless the request is not `shareable`. The first
    `borrowed` blocks were others' at admission. `cached_tokens` were found instead of computed, before the first token
    was generated. `state_slot` is held as long as blocks are. `serial` says which came first; `arrived` and `admitted`
    are seconds of the scheduler's clock. `set_back` counts how often it gave up its blocks, `parked` says where their
    content lies meanwhile, if anywhere. `asked`: the disk has been asked for its prefix. `slot` belongs to the sampler.
    A `cause` says why a sequence that was never admitted has ended.
    """

    __slots__ = (
        "admitted",
        "arrived",
        "asked",
        "blocks",
        "borrowed",
        "cached_tokens",
        "cause",
        "committed",
        "computed",
        "finish_reason",
        "generated",
        "limit",
        "num_prompt",
        "params",
        "parked",
        "pending",
        "priority",
        "request_id",
        "root",
        "seed",
        "serial",
        "set_back",
        "shareable",
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
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.tokens = array("i", prompt)
        self.num_prompt = len(prompt)
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self.seed = seed
        self.priority = handling.priority
        self.shareable = not handling.skip_reading_prefix_cache
        self.root: Root = (handling.tenant, handling.cache_salt) if handling.tenant or handling.cache_salt else ROOT
        self.limit = 0  # length at which it ends; set on submission
        self.serial = -1  # set on submission
        self.arrived = 0.0
        self.admitted: float | None = None  # first admission
        self.asked = False
        self.generated = 0  # tokens sampled, a stop token included
        self.pending = 0
        self.computed = 0
        self.committed = 0
        self.borrowed = 0
        self.cached_tokens = 0
        self.set_back = 0
        self.parked: Parked | None = None
        self.blocks = array("i")
        self.finish_reason: FinishReason | None = None
        self.cause: Cause | None = None
        self.stop_token: int | None = None
        self.state_slot = -1
        self.slot: object = None

    @property
    def known(self) -> int:
        """How many tokens are known."""
        return len(self.tokens) - self.pending

    def expect(self) -> None:
        """One more token will come of a step."""
        self.tokens.append(UNKNOWN)
        self.pending += 1

    def learn(self, token: int) -> None:
        """The first of the expected tokens is this one."""
        self.tokens[self.known] = token
        self.pending -= 1

    def expect_nothing(self) -> None:
        """No more tokens will come."""
        del self.tokens[self.known :]
        self.pending = 0

    @property
    def remaining(self) -> int:
        """Tokens to be computed before the next one can be sampled: 1 while it decodes, more while it is a prompt."""
        done = self.parked.tokens if self.parked is not None else self.computed
        return len(self.tokens) - done


@dataclass(slots=True)
class Scheduled(Chunk):
    """A chunk and the sequence that it belongs to."""

    sequence: Sequence

    @classmethod
    def of(cls, sequence: Sequence, tokens: int) -> Self:
        """The sequence's next tokens."""
        start, stop = sequence.computed, sequence.computed + tokens
        rows, slot = int(stop == len(sequence.tokens)), sequence.state_slot
        # A copy of the table: the sequence may lose its blocks before the step is done.
        return cls(sequence.tokens[start:stop], start, sequence.blocks[:], rows, slot, sequence)
