"""What a core may be told besides its plan: one struct, filled by whoever starts the core, read by the core.

Comes in: numbers. Goes out: `CoreOptions`. Must not know: where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.schema import Manifest, ShapeProfile
from llmc.runtime.messages import INTERACTIVE

#: By default interactive requests get three times the tokens of batch requests, where both have work.
PRIORITY_WEIGHTS = {INTERACTIVE: 3.0, "batch": 1.0}
#: As many as the compiled code has places for.
MAX_THREADS = 1024
_POSITIVE = (
    *("kv_bytes", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "threads", "step_timeout"),
    *("max_num_queued_reqs", "queue_timeout", "itl_budget_ms", "max_long_prefills", "kv_host_bytes", "kv_disk_bytes"),
)


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """None: what the profile (or for `kv_bytes` and `threads` the machine) allows.

    `prefix_cache` does nothing for a model that carries a recurrent state: nothing of a prefix could be taken over.
    `kv_bytes` counts all ranks, `num_blocks` says the same in blocks and wins; `threads` are per rank. `step_timeout`
    is how many seconds a step may take before its ranks count as hung. `digest` is that of the plan which whoever
    starts the core has opened; with `verify` the core compares the plan's sections with their hashes, which somebody
    has done otherwise. `front_stop_timeout` is how many seconds the process that started the core may be stopped
    (SIGSTOP) before the core kills it (None: never).

    With `overlap` a step is composed while the one before it is computed. `max_num_queued_reqs` bounds the sequences
    that wait for their first admission, `queue_timeout` the seconds for which they do; None: no bound. `itl_budget_ms`
    is how long a step may last in which anybody decodes: prompts are then cut to what the measured speed allows.
    `max_long_prefills` bounds the prompts of many steps that a class has at work at once. `kv_host_bytes`, over all
    ranks, is memory beside the pool in which preempted sequences may keep their blocks, and the prefix cache those that
    it evicts; what has to leave it goes to a file of `kv_disk_bytes` in the folder `kv_disk`, if there is one. Without
    `kv_host_bytes` that goes through memory for one sequence of full length. With `mmap` weights stay in the plan's
    file: whoever serves the same plan shares them, and the kernel may drop them; without, each rank reads its own into
    memory of huge pages. `priority_weights` are the classes that a request may name, with their shares of the engine's
    tokens.
    """

    kv_bytes: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    threads: int | None = None
    prefix_cache: bool = True
    overlap: bool = True
    step_timeout: float = 60.0
    digest: str | None = None
    verify: bool = True
    front_stop_timeout: float | None = None
    max_num_queued_reqs: int | None = None
    queue_timeout: float | None = None
    itl_budget_ms: float | None = None
    kv_host_bytes: int | None = None
    kv_disk: str | None = None
    kv_disk_bytes: int | None = None
    max_long_prefills: int = 2
    mmap: bool = True
    priority_weights: dict[str, float] = msgspec.field(default_factory=PRIORITY_WEIGHTS.copy)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Options by name; raises UsageError for a name that is none of them, or a value of another type."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"options of the engine: {error}; there are {', '.join(cls.__struct_fields__)}") from error

    def reuses_prefixes(self, manifest: Manifest) -> bool:
        """Whether the prefix cache is on: never where sequences carry a recurrent state, which blocks do not hold."""
        return self.prefix_cache and not manifest.state_slot_bytes

    def check_disk(self, manifest: Manifest) -> None:
        """Raises UsageError where `kv_disk` is given by half or could do nothing, UnsupportedError where a target has
        no such tier.
        """
        if (self.kv_disk is None) != (self.kv_disk_bytes is None):
            raise UsageError("--kv-disk DIR and --kv-disk-bytes N go together: where, and how much of it may be taken")
        if self.kv_disk is None:
            return
        if manifest.target.kind != "cpu":
            raise UnsupportedError(
                f"--kv-disk: a plan for {manifest.target.kind}:{manifest.target.isa} keeps no blocks on disk; leave it "
                "out, --kv-host-bytes keeps them in host memory"
            )
        if not self.reuses_prefixes(manifest):
            raise UsageError(
                "--kv-disk keeps blocks of the prefix cache, which is off here: by --no-prefix-cache, or because the "
                "model carries a recurrent state"
            )

    def check_mmap(self, manifest: Manifest) -> None:
        """Raises UsageError where weights are copied anyway."""
        if not self.mmap and manifest.target.on_gpu:
            raise UsageError(
                f"--no-mmap: a plan for {manifest.target.kind}:{manifest.target.isa} has its weights in the GPU's "
                "memory; leave it out"
            )

    def check(self, profile: ShapeProfile) -> None:
        """Raises UsageError unless every number is positive and no larger than what the plan was built for."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
        if INTERACTIVE not in self.priority_weights or not all(
            weight > 0 and math.isfinite(weight) for weight in self.priority_weights.values()
        ):
            raise UsageError(
                f"--priority-weights is {self.priority_weights}; it must give {INTERACTIVE!r}, the class of requests "
                "that name none, and every other class a weight above 0"
            )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(f"--threads is {self.threads}; a rank takes at most {MAX_THREADS}")
        for name, most in (
            ("max_num_seqs", profile.max_num_seqs),
            ("max_num_batched_tokens", profile.max_num_batched_tokens),
        ):
            value = getattr(self, name)
            if value is not None and value > most:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}; the plan was built with profile {profile.name!r} for at "
                    f"most {most}. Lower it, or build with a profile that allows more"
                )
