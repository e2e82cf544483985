"""Fixtures of more than one folder: where the real checkpoint and its plan are, which `make test` fetches and builds.
And the order of the files.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import llmc.builder  # noqa: F401  before anything imports PyTorch: it says how OpenMP waits

# The same examples in every CI run; elsewhere new ones each time. How long one takes is the machine's business.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

ROOT = Path(__file__).resolve().parents[1]

#: Files that take minutes. They are begun first: of several processes, each with a file at a time, none is then left
#: alone with a long one at the end.
LONG = (
    "tests/e2e/test_coverage.py",
    "tests/e2e/test_smollm2.py",
    "tests/e2e/test_cuda_smollm2.py",
    "tests/unit/builder/test_native.py",
    "tests/unit/cuda/test_whole_program.py",
    "tests/e2e/test_ci_builds.py",
    "tests/e2e/test_quantized.py",
    "tests/e2e/test_families.py",
    "tests/unit/runtime/test_failure.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts them first; the others stay in their order."""
    first = {ROOT / name: place for place, name in enumerate(LONG)}
    if missing := [str(path) for path in first if not path.exists()]:
        raise pytest.UsageError(f"LONG in tests/conftest.py names files that are not there: {', '.join(missing)}")
    items.sort(key=lambda item: first.get(item.path, len(first)))


class _Failures:
    """Names what fails at once, with the process that ran it: a run that is ended from outside prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and hasattr(report, "node"):
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n[{report.node.gateway.id}] FAILED {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run in several processes, their failures are told here."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


def _path(variable: str, default: str) -> Path:
    path = Path(os.environ.get(variable, ROOT / default))
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: `make {default}` makes it")
        pytest.skip(f"{path} is missing: `make {default}` makes it")
    return path


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return _path("LLMC_TEST_MODEL", "build/model/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2_plan() -> Path:
    """The FP8 tp 2 plan of SmolLM2 that `make demo` builds."""
    return _path("LLMC_TEST_PLAN", "build/smollm2.plan")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a libcuda.so.1 that only records."""
    from tests.unit.cuda.recording import compile_driver

    return compile_driver(tmp_path_factory.mktemp("driver"))
