"""`llmc inspect --kernels`: every cubin of a plan, how often it is launched, what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmc.artifacts.cuda_program import VERSION, CudaProgram, Kernel, Launch, Product, Steps
from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.builder.cuda import report as module
from llmc.builder.cuda import sass
from llmc.builder.cuda.cubin import resources
from llmc.builder.cuda.report import kernel_reports
from llmc.builder.cuda.sass import instructions
from llmc.cli import main
from tests.unit.cuda.compiled import compiled
from tests.unit.cuda.test_compiled_products import Case

ONE = (Product((1,)),)


def program(shared: int) -> CudaProgram:
    """Two kinds of steps that launch one kernel, once and twice."""
    kernel = Kernel("code/a.cubin", "gemm", 256, 1, shared, ())
    launch = [Launch(0, (), (ONE, ONE, ONE), f"linear @layers.{i}.up") for i in range(2)]
    steps = (Steps(True, 1, 8, 8, (launch[0],)), Steps(False, 1, 64, 8, tuple(launch)))
    return CudaProgram(VERSION, 0, 1, 90, (kernel,), steps, b"", 0, 0, 0, 0, 0, (0, 8), 8, 16, 8, 64)


def test_a_kernel_is_reported_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(90, "f8e4m3 x", False, True, "QGMMA.*E4M3")
    (cubin,) = compiled([case.made()])
    (found,) = kernel_reports([program(cubin.shared)] * 2, lambda section: cubin.code)
    assert (found.section, found.entry, found.launches, found.operators) == ("code/a.cubin", "gemm", 6, ("linear",))
    assert (found.threads, found.shared, found.stack) == (256, cubin.shared + resources(cubin.code).shared, 0)
    assert 32 < found.registers <= 255
    assert found.tensor_cores is not None
    assert all(name.startswith("QGMMA.64x") for name in found.tensor_cores)
    monkeypatch.setattr(module, "disassembler", lambda: None)
    (blind,) = kernel_reports([program(cubin.shared)], lambda section: cubin.code)
    assert blind.tensor_cores is None


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(PlanError, match="is damaged"):
        kernel_reports([program(0)], lambda section: b"nothing")
    with pytest.raises(EnvironmentFault, match="cannot read the cubin"):
        instructions(b"nothing")


def test_a_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    with pytest.raises(EnvironmentFault, match=r"nvdisasm is not installed: pip install 'llmc\[cuda-build\]'"):
        instructions(b"")


def test_kernels_exclude_other_forms(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "x.plan"), "--kernels", "--graph"])
    assert result.exit_code == 2
    assert "--graph and --kernels exclude one another" in str(result.output) + str(result.exception)
