"""Real kernels under traffic: whatever is shared, cut, set back, copied or cancelled, answers are those given alone.

Over two ranks with an FP8 cache, and over a model of which every sequence carries a recurrent state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmc
from llmc.artifacts.plan import Plan
from llmc.runtime.messages import Handling
from tests.builds import SMALL
from tests.models import save_checkpoint
from tests.unit.runtime.fake_engine import Client

pytestmark = pytest.mark.timeout(600)

#: By model: how it is built.
BUILDS: dict[str, dict[str, Any]] = {
    "llama": {"precision": "bf16", "tp": 2, "kv_dtype": "fp8"},
    "lfm2": {"precision": "fp32"},
}
STEM = [5 + i * 13 % 250 for i in range(80)]
#: Cores that differ in everything that must not matter: 16 blocks hold 256 tokens, one sequence of full length.
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "tight": {"num_blocks": 16, "max_num_batched_tokens": 40},
    "plain": {"num_blocks": 16, "max_num_batched_tokens": 40, "overlap": False},
    "copying": {"num_blocks": 16, "max_num_batched_tokens": 40, "kv_host_bytes": 2**22},
    "disk": {
        "num_blocks": 16,
        "max_num_batched_tokens": 40,
        "kv_disk": tempfile.gettempdir(),
        "kv_disk_bytes": 2**22,
    },
    "uncached": {"num_blocks": 16, "prefix_cache": False, "itl_budget_ms": 0.5},
}
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 80),  # tokens of the stem
        st.lists(st.integers(5, 12), min_size=1, max_size=20),  # and its own
        st.integers(1, 40),  # tokens to generate
        st.sampled_from([Handling(), Handling(priority="batch"), Handling(cache_salt="x")]),
        st.booleans(),  # cancelled under way
    ),
    min_size=2,
    max_size=10,
)


@pytest.fixture(scope="module", params=BUILDS)
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = save_checkpoint(folder / "checkpoint", request.param)
    llmc.build(checkpoint, folder / "engine.plan", evaluate=False, profile=SMALL, **BUILDS[request.param])
    return folder / "engine.plan"


@pytest.fixture(scope="module")
def alone(plan: Path) -> Iterator[Client]:
    """One request at a time, nothing reused, no step composed before the one before it is done."""
    with Client(plan, max_num_seqs=1, num_blocks=16, prefix_cache=False, overlap=False) as client:
        yield client


@pytest.fixture(scope="module", params=OPTIONS)
def busy(plan: Path, alone: Client, request: pytest.FixtureRequest) -> Iterator[Client]:
    if request.param == "disk" and Plan.open(plan).manifest.state_slot_bytes:
        pytest.skip("no prefix is reused where sequences carry a state, so there is nothing to keep on a disk")
    with Client(plan, **OPTIONS[request.param]) as client:
        # Together they outgrow the small pools, of which the core has no notion yet.
        prompts = [STEM[i : i + 20] for i in range(6)]
        with client.held():  # all are there before one ends
            names = [(ask(client, prompt, 50), ask(alone, prompt, 50)) for prompt in prompts]
        client.wait_all()
        alone.wait_all()
        for busy_name, alone_name in names:
            assert client.tokens[busy_name] == alone.tokens[alone_name]
        yield client
        client.wait(client.idle)
        last = client.stats[-1]
        assert (last.waiting, last.blocks_used, last.host_blocks_used) == (0, 0, 0)
        assert (last.preemptions > 0) == (last.blocks_total < 100)


def ask(client: Client, prompt: list[int], tokens: int, handling: Handling = Handling()) -> str:  # noqa: B008
    name = str(len(client.tokens))
    client.submit(name, prompt, handling, max_tokens=tokens, ignore_eos=True)
    return name


@given(REQUESTS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_those_given_alone(alone: Client, busy: Client, requests: list[tuple]) -> None:
    names, cancelled = [], set()
    for stem, own, tokens, handling, cancel in requests:
        names.append(ask(busy, STEM[:stem] + own, tokens, handling))
        if cancel and names[0] != names[-1]:
            busy.abort(names[-2])
            cancelled.add(names[-2])
    busy.wait_all()
    for name, (stem, own, tokens, _, _) in zip(names, requests, strict=True):
        reference = ask(alone, STEM[:stem] + own, tokens)
        alone.wait_all()
        wanted, found = alone.tokens[reference], busy.tokens[name]
        if name in cancelled:
            assert found == wanted[: len(found)]
        else:
            assert found == wanted
