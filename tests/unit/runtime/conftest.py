"""Fixtures of the front end's tests: a plan without code, and a server over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runtime.fake_plan import write_plan
from tests.unit.runtime.servers import Server, fake_server


@pytest.fixture(scope="session")
def fake_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "fake.plan")


@pytest.fixture(scope="module")
def server(fake_plan: Path) -> Iterator[Server]:
    with fake_server(fake_plan) as running:
        yield running
