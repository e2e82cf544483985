"""Fixtures: a plan without code, and a server over it; plans whose compiled model is a hash of the tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runtime.fake_engine import write_engine_plan
from tests.unit.runtime.fake_plan import write_plan
from tests.unit.runtime.servers import Server, fake_server


@pytest.fixture(scope="session")
def fake_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "fake.plan")


@pytest.fixture(scope="module")
def server(fake_plan: Path) -> Iterator[Server]:
    with fake_server(fake_plan) as running:
        yield running


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_plan(tmp_path_factory.mktemp("engine") / "fake.plan")


@pytest.fixture(scope="module")
def plan_tp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_plan(tmp_path_factory.mktemp("engine") / "fake2.plan", tp=2)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks whose steps last 20 ms, so that a test can act while one runs."""
    return write_engine_plan(tmp_path_factory.mktemp("engine") / "slow.plan", tp=2, step_us=20000)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of which an answer of full length takes minutes: none ends before a test has done what it will."""
    path = tmp_path_factory.mktemp("engine") / "endless.plan"
    return write_engine_plan(path, tp=2, max_seq_len=8000, step_us=20000)
