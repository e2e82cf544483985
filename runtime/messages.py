"""What processes say to each other: the only types that cross a channel. msgspec structs, encoded as MessagePack.

    front end (HTTP or Engine) --Submit, Abort, Shutdown--> core --Ready, Output, Stats, Alive, Fatal--> front end

Every accepted Submit ends in exactly one Output whose `finish_reason` is set. Must not know: any other module.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
#: Why a request was turned away before it began, where that is not the request's fault.
Cause = Literal["queue_full", "queue_timeout"]
#: The class of requests that name none.
INTERACTIVE = "interactive"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence is sampled; the defaults sample from the model's own distribution.

    `stop` (text) is matched by the front end, `stop_token_ids` and the model's end tokens by the core.
    `max_tokens` None means up to max_seq_len. `logprobs` None: none; n: the chosen token's and n alternatives.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True


class Handling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is treated; its answer does not depend on it.

    `priority` names a class of the scheduler. Blocks of the prefix cache are shared among equal (`tenant`,
    `cache_salt`) only: `tenant` is whom the server knows the client as, `cache_salt` what the client adds. A request
    that skips reading the prefix cache takes nothing from it and leaves nothing in it.
    """

    priority: str = INTERACTIVE
    tenant: str = ""
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request of one sequence. `prompt` are token ids, checked against max_seq_len by the front end and the core."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    handling: Handling = Handling()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop working on a request: the client left, or a stop string was found. Unknown ids are ignored."""

    request_id: str
    finish_reason: FinishReason = "abort"


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """`drain`: finish what is running and waiting first; new Submits are refused."""

    drain: bool = True


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token and its log-probability."""

    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's log-probability and rank in the raw distribution, and the best alternatives, best first."""

    logprob: float
    rank: int
    top: list[Logprob]


class Output(msgspec.Struct, frozen=True, tag=True):
    """Tokens that a request has gained. The last Output of a request carries `finish_reason`, and `error` with "error".

    A stop token (eos or stop_token_ids) is counted in the usage but not among `tokens`; `stop_token` names it. With a
    `cause` the request was turned away, and may come again after `retry_after` seconds. `queue_seconds` is how long it
    waited for its first admission.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    cause: Cause | None = None
    retry_after: int = 0
    queue_seconds: float = 0.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core has loaded the plan, started its ranks and run one step."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_seconds: float


#: Bounds by which steps are counted, in tokens; vLLM's.
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Sent at most every 0.1 s while working and once when idle. Counters count from the start of the core.

    `schedule_seconds` is what composing the steps took, `gap_seconds` how long the ranks had nothing to compute between
    two steps. `rejections` are counted by `Cause`.
    `preemptions_copied` of the preempted have their blocks copied to host memory, where `host_blocks_used` are taken.
    `blocks_cached` can be found in the prefix cache now; of the blocks that it has evicted, `evicted_lifetime_seconds`
    sums how long each could be found, `evicted_idle_seconds` how long nobody had used it. Evicted blocks may be kept in
    a lower tier ("host", then "disk"): `shelf_blocks` are there now, `shelf_hits` counts prompt tokens that came back,
    `shelf_evictions` blocks that had to leave, `shelf_damaged` blocks that could not be read back, `shelf_refused`
    blocks that came faster than they could be written. `step_sequences` sums the sequences of all steps, `step_tokens`
    counts steps by their tokens: up to each of STEP_TOKENS, and more.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    step_seconds: float
    schedule_seconds: float = 0.0
    gap_seconds: float = 0.0
    waiting_by_class: dict[str, int] = {}
    rejections: dict[str, int] = {}
    blocks_cached: int = 0
    preemptions_copied: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    shelf_blocks: dict[str, int] = {}
    shelf_hits: dict[str, int] = {}
    shelf_evictions: dict[str, int] = {}
    shelf_damaged: dict[str, int] = {}
    shelf_refused: dict[str, int] = {}
    evictions: int = 0
    evicted_lifetime_seconds: float = 0.0
    evicted_idle_seconds: float = 0.0
    step_sequences: int = 0
    step_tokens_sum: int = 0
    step_tokens: list[int] = []


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The core's loop turns: sent while it rests and while a step lasts, at least once a second."""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The core cannot go on (a rank died or hung). It fails every request, sends this and exits with code 1."""

    error: str


ToCore = Submit | Abort | Shutdown
FromCore = Ready | Output | Stats | Alive | Fatal
