"""The memory arithmetic of an engine: what `--dry-run` prints and the plan records. Reads no weights, compiles nothing.

Comes in: `Lowered`. Goes out: `MemoryPlan`. Must not know: the machine that will serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.builder.lowered import Lowered

_EXAMPLES = (1 << 30, 4 << 30, 16 << 30)


@dataclass(frozen=True)
class RankMemory:
    """One rank, in bytes. `scratch_bytes_per_thread` is on top of `scratch_bytes`; `kv_bytes_per_token`: its share."""

    rank: int
    weights_bytes: int
    arena_bytes: int
    scratch_bytes: int
    scratch_bytes_per_thread: int
    kv_bytes_per_token: int
    state_slot_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """All ranks together, in bytes. `shared_bytes`: weights that all ranks map once. `logits_bytes`: of the largest
    step. `kv_block_bytes`: one block of `block_size` tokens, over all ranks; 0 without attention. `state_bytes`:
    recurrent states of as many sequences as the profile allows, over all ranks.
    """

    model: str
    precision: str
    kv_dtype: str
    tp: int
    profile: str
    target: str
    ranks: tuple[RankMemory, ...]
    shared_bytes: int
    comm_bytes: int
    logits_bytes: int
    state_bytes: int
    block_size: int
    kv_block_bytes: int
    max_seq_len: int

    @property
    def weights_bytes(self) -> int:
        """Weights of all ranks, what is shared counted once."""
        return self.shared_bytes + sum(rank.weights_bytes for rank in self.ranks)

    def fixed_bytes(self, threads: int = 1) -> int:
        """Everything but the KV pool, with that many threads a rank."""
        ranks = sum(r.arena_bytes + r.scratch_bytes + threads * r.scratch_bytes_per_thread for r in self.ranks)
        return self.weights_bytes + ranks + self.comm_bytes + self.logits_bytes + self.state_bytes

    def blocks_in(self, kv_bytes: int) -> int:
        """How many blocks a pool of that many bytes holds, all ranks together. Only for a model that has attention."""
        return kv_bytes // self.kv_block_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of full length."""
        return -(-self.max_seq_len // self.block_size)

    def lines(self) -> list[str]:
        """For people: one line a fact."""
        several = self.tp > 1
        rows: list[tuple[str, str]] = []
        for r in self.ranks:
            rows.append((f"weights, rank {r.rank}", _mb(r.weights_bytes)))
            rows.append((f"activations, rank {r.rank}", _mb(r.arena_bytes)))
            rows.append(
                (f"scratch, rank {r.rank}", f"{_mb(r.scratch_bytes)}, and {_mb(r.scratch_bytes_per_thread)} a thread")
            )
        if several:
            rows.append(("weights, all ranks", f"{_mb(self.shared_bytes)}, mapped once"))
            rows.append(("between ranks", _mb(self.comm_bytes)))
        rows.append(("logits", _mb(self.logits_bytes)))
        if self.state_bytes:
            slot = sum(r.state_slot_bytes for r in self.ranks)
            rows.append(("state of a sequence", f"{slot:,} B, whatever its length"))
            rows.append(("states", f"{_mb(self.state_bytes)}, {self.state_bytes // slot} sequences"))
        rows.append(("all but KV, 1 thread", _mb(self.fixed_bytes())))
        rows += self._kv_lines() if self.kv_block_bytes else [("KV of a token", "0 B: no layer has attention")]
        head = f"{self.model}: {self.precision}, KV cache {self.kv_dtype}, tp {self.tp}, {self.target}, {self.profile}"
        return [head, *(f"{name:<24}{value}" for name, value in rows)]

    def _kv_lines(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        several = self.tp > 1
        per_token = self.kv_block_bytes // self.block_size
        shares = ", ".join(f"{r.kv_bytes_per_token:,}" for r in self.ranks)
        rows.append(("KV of a token", f"{per_token:,} B" + (f" (by rank: {shares})" if several else "")))
        rows.append(("KV of a block", f"{self.kv_block_bytes:,} B, {self.block_size} tokens"))
        full = self.blocks_per_sequence * self.kv_block_bytes
        rows.append(("KV of a sequence", f"{_mb(full)}, {self.max_seq_len} tokens, {self.blocks_per_sequence} blocks"))
        for size in _EXAMPLES:
            blocks = self.blocks_in(size)
            rows.append((f"KV in {size >> 30} GiB", f"{blocks:,} blocks, {blocks * self.block_size:,} tokens"))
        return rows


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def memory_plan(lowered: Lowered, model: str, precision: str) -> MemoryPlan:
    """The arithmetic of a lowered model."""
    profile = lowered.profile
    ranks = tuple(
        RankMemory(
            rank=program.rank,
            weights_bytes=program.weights_bytes,
            arena_bytes=program.arena_bytes,
            scratch_bytes=program.scratch.shared,
            scratch_bytes_per_thread=program.scratch.per_thread,
            kv_bytes_per_token=program.kv_block_bytes // profile.block_size,
            state_slot_bytes=program.state_slot_bytes,
        )
        for program in lowered.programs
    )
    return MemoryPlan(
        model=model,
        precision=precision,
        kv_dtype=lowered.kv_dtype,
        tp=len(ranks),
        profile=profile.name,
        target=str(lowered.target),
        ranks=ranks,
        shared_bytes=lowered.shared.nbytes,
        comm_bytes=lowered.comm_bytes,
        logits_bytes=profile.max_num_seqs * lowered.vocab_size * 4,
        state_bytes=profile.max_num_seqs * sum(program.state_slot_bytes for program in lowered.programs),
        block_size=profile.block_size,
        kv_block_bytes=sum(program.kv_block_bytes for program in lowered.programs),
        max_seq_len=profile.max_seq_len,
    )
