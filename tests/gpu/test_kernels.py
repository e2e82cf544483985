"""The kernel tests of tests/unit/cuda again, their launches compiled and made on the GPU instead of interpreted: the
same inputs, held against the same references within the same bounds (E4M3 sums: see the harness).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import FunctionType

import pytest

from llmc.runtime.cuda.gpus import Survey
from tests.unit.cuda.backend import on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
#: Of each operator, and of whole programs.
MODULES = (
    "attention", "grouped_linear", "latent", "linear", "norms", "pointwise", "products", "recurrent", "rope", "rows",
    "sampler", "whole_program",
)  # fmt: skip
#: What only compiles.
_COMPILED = ("test_compiled",)


def _tests() -> dict[str, FunctionType]:
    """Every test of these modules, under a name that says which."""
    return {
        f"test_{module}_{name.removeprefix('test_')}": test
        for module in MODULES
        for name, test in vars(import_module(f"tests.unit.cuda.test_{module}")).items()
        if name.startswith("test_") and callable(test) and name not in _COMPILED
    }


globals().update(_tests())


@pytest.fixture(scope="module", autouse=True)
def _on_the_gpu(machine: Survey) -> Iterator[None]:
    from tests.gpu.hardware import hardware  # imports the driver's bindings, which hang where there is no driver

    gpu = hardware(machine.gpus[0].name)
    with on(gpu):
        yield
    gpu.close()
