"""The KV pool that follows from the memory that there is."""

from __future__ import annotations

import dataclasses

import pytest

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import Manifest
from llmc.runtime.kv_size import choose_num_blocks, fixed_bytes
from tests.unit.runtime.fake_engine import write_engine_plan


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Blocks of 2 x 32 bytes, 24 for a sequence of 96 tokens, at most 8 sequences."""
    return Plan.open(write_engine_plan(tmp_path_factory.mktemp("engine") / "fake.plan", tp=2)).manifest


def test_the_pool_is_no_larger_than_sequences_can_use(manifest: Manifest) -> None:
    assert choose_num_blocks(manifest, 1 << 40) == 8 * 24
    assert choose_num_blocks(manifest, 1 << 40, max_num_seqs=2) == 2 * 24
    assert choose_num_blocks(manifest, 1 << 40, kv_bytes=1000 * 64) == 1000  # asked for: the rest caches prefixes


def test_the_pool_takes_half_of_what_is_left(manifest: Manifest) -> None:
    fixed = fixed_bytes(manifest)
    assert choose_num_blocks(manifest, fixed + 100 * 64) == 50
    # Half would not hold one sequence: then as much as that needs.
    assert choose_num_blocks(manifest, fixed + 30 * 64) == 24


def test_bytes_are_counted_over_all_ranks(manifest: Manifest) -> None:
    assert choose_num_blocks(manifest, 1 << 40, kv_bytes=30 * 64 + 63) == 30
    assert choose_num_blocks(manifest, 1 << 40, num_blocks=1000) == 1000


def test_what_does_not_fit_is_refused_with_the_sum_and_a_remedy(manifest: Manifest) -> None:
    fixed = fixed_bytes(manifest)
    with pytest.raises(EnvironmentFault) as failure:
        choose_num_blocks(manifest, fixed + 10 * 64, kv_bytes=30 * 64)
    assert "30 blocks x 64 bytes = 1920 bytes" in str(failure.value)
    assert f"beside {fixed} of weights and activations" in str(failure.value)
    assert "1280 bytes more" in str(failure.value)
    assert "--kv-bytes 640 would fit (40 tokens)" in str(failure.value)
    with pytest.raises(EnvironmentFault, match=r"24 blocks .* free some memory"):
        choose_num_blocks(manifest, fixed - 1)
    with pytest.raises(UsageError, match="--kv-bytes 63 holds no block: one of 4 tokens takes 64 bytes"):
        choose_num_blocks(manifest, 1 << 40, kv_bytes=63)


def test_weights_and_activations_of_every_rank_count(manifest: Manifest) -> None:
    larger = dataclasses.replace(
        manifest, ranks=(dataclasses.replace(manifest.ranks[0], arena_bytes=1000), manifest.ranks[1])
    )
    assert fixed_bytes(larger) - fixed_bytes(manifest) == 1000 - manifest.ranks[0].arena_bytes
