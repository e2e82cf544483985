"""How many KV blocks a plan gets on this machine, and the arithmetic to say so when they do not fit.

Comes in: a manifest, the user's wish, available bytes. Goes out: a number of blocks. Must not know: processes.
"""

from __future__ import annotations

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.schema import Manifest
from llmc.runtime.records import record_bytes

#: Share of the memory left beside weights and activations that the pool takes when nobody says how much.
DEFAULT_SHARE = 0.5


def choose_num_blocks(
    manifest: Manifest,
    available: int,
    *,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
) -> int:
    """Blocks of the pool (each rank holds its share of every block). `kv_bytes` counts all ranks together.

    By default half of what is left, but no more than `max_num_seqs` sequences of full length can use; whoever asks for
    more gets it, as the prefix cache has a use for it. A model without attention keeps nothing in its blocks: it gets
    as many as those sequences can use. Raises EnvironmentFault, with the sum and the flag and value that would fit,
    when memory does not suffice, UsageError when `kv_bytes` is less than one block, or given where blocks hold nothing.
    """
    profile = manifest.profile
    block_bytes = manifest.kv_block_bytes
    blocks_per_seq = -(-profile.max_seq_len // profile.block_size)
    most = (max_num_seqs or profile.max_num_seqs) * blocks_per_seq
    left = available - fixed_bytes(manifest, max_num_seqs)
    if not block_bytes:
        if kv_bytes is not None:
            raise UsageError(
                f"--kv-bytes {kv_bytes}: this model has no attention and keeps no keys and values; a sequence's state "
                f"takes {manifest.state_slot_bytes} bytes, and --max-num-seqs says how many there are"
            )
        if left < 0:
            raise EnvironmentFault(_shortage(manifest, available, 0, max_num_seqs))
        return num_blocks or most
    if num_blocks is None and kv_bytes is None:
        found = min(int(max(left, 0) * DEFAULT_SHARE) // block_bytes, most)
        # Short of one full sequence half is too modest: take what there is, if it is enough for that.
        needed = min(blocks_per_seq, most)
        if found < needed:
            if left < needed * block_bytes:
                raise EnvironmentFault(_shortage(manifest, available, needed, max_num_seqs))
            found = needed
        return found
    if num_blocks is None:
        assert kv_bytes is not None
        num_blocks = kv_bytes // block_bytes
        if num_blocks < 1:
            raise UsageError(
                f"--kv-bytes {kv_bytes} holds no block: one of {profile.block_size} tokens takes {block_bytes} bytes "
                f"over {len(manifest.ranks)} rank(s). Give at least {block_bytes * blocks_per_seq} for one sequence of "
                f"{profile.max_seq_len} tokens"
            )
    if num_blocks * block_bytes > left:
        raise EnvironmentFault(_shortage(manifest, available, num_blocks, max_num_seqs))
    return num_blocks


def choose_host_places(manifest: Manifest, host_bytes: int | None, max_num_seqs: int | None = None) -> tuple[int, int]:
    """How many blocks and recurrent states `host_bytes` of host memory hold, over all ranks; none for None.

    States, of which no more than all sequences' are of use, get a quarter at most. Raises UsageError where not even one
    sequence's share fits.
    """
    if host_bytes is None:
        return 0, 0
    state, block = manifest.state_slot_bytes, manifest.kv_block_bytes
    states = min(max_num_seqs or manifest.profile.max_num_seqs, host_bytes // 4 // state) if state else 0
    blocks = (host_bytes - states * state) // block if block else 0
    if blocks < 1 or (state and states < 1):
        raise UsageError(
            f"--kv-host-bytes {host_bytes} holds nothing: a block of {manifest.profile.block_size} tokens takes "
            f"{block} bytes and a sequence's recurrent state {state}, for which a quarter is set aside"
        )
    return blocks, states


def staging_bytes(manifest: Manifest) -> int:
    """Host memory, over all ranks, that what is on its way to a disk and back gets where nobody says how much: the
    blocks of one sequence of full length.
    """
    profile = manifest.profile
    return -(-profile.max_seq_len // profile.block_size) * manifest.kv_block_bytes


def choose_disk_records(manifest: Manifest, disk_bytes: int) -> int:
    """How many blocks, as records over all ranks, `disk_bytes` hold. Raises UsageError for less than one."""
    size = record_bytes(manifest.kv_block_bytes)
    if disk_bytes < size:
        raise UsageError(
            f"--kv-disk-bytes {disk_bytes} holds no block: one of {manifest.profile.block_size} tokens takes {size} "
            "bytes of the disk"
        )
    return disk_bytes // size


def fixed_bytes(manifest: Manifest, max_num_seqs: int | None = None) -> int:
    """Bytes that a running plan needs beside KV: weights, activations of every rank, memory shared by the ranks, and
    the recurrent states of `max_num_seqs` sequences (None: as many as the profile allows).
    """
    ranks = sum(rank.weights_bytes + rank.arena_bytes for rank in manifest.ranks)
    logits = manifest.profile.max_num_seqs * manifest.model.vocab_size * 4
    return ranks + manifest.shared_bytes + manifest.comm_bytes + logits + state_bytes(manifest, max_num_seqs)


def state_bytes(manifest: Manifest, max_num_seqs: int | None = None) -> int:
    """Bytes of the recurrent states, over all ranks."""
    return (max_num_seqs or manifest.profile.max_num_seqs) * manifest.state_slot_bytes


def _shortage(manifest: Manifest, available: int, num_blocks: int, max_num_seqs: int | None) -> str:
    profile, block_bytes = manifest.profile, manifest.kv_block_bytes
    wanted, fixed = num_blocks * block_bytes, fixed_bytes(manifest, max_num_seqs)
    fits = max(available - fixed, 0) // block_bytes if block_bytes else 0
    states = state_bytes(manifest, max_num_seqs)
    fewer = "a lower --max-num-seqs for fewer states, " if states else ""
    remedy = (
        f"--kv-bytes {fits * block_bytes} would fit ({fits * profile.block_size} tokens)"
        if fits
        else f"free some memory, {fewer}or build for less of it (--fp8, a profile with fewer tokens)"
    )
    also = f", activations and recurrent states ({states})" if states else " and activations"
    return (
        f"the KV pool does not fit: {num_blocks} blocks x {block_bytes} bytes = {wanted} bytes, beside {fixed} of "
        f"weights{also}, is {wanted + fixed - available} bytes more than the {available} that are available "
        f"here; {remedy}"
    )
