"""Kernels become cubins: the right arguments, the same bytes wherever they are made, once where they are equal."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.artifacts.errors import EnvironmentFault, PlanError, UnsupportedError
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.cuda import compile as cuda_compile
from llmc.builder.cuda.compile import CudaCompiler
from llmc.builder.cuda.cubin import Parameter, resources
from llmc.builder.cuda.variant import Variant, variant
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, Pool, Product, Symbol

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def scale_rows(x, y, rows, stride, factor, bias, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    if row < rows:
        value = tl.load(x + row * stride + columns).to(tl.float32) * factor
        if bias is not None:
            value += bias
        tl.store(y + row * stride + columns, value.to(y.dtype.element_ty))
"""
X, Y, STRIDE = Pointer("in", 0), Pointer("out", 0), RowStride("in", 0)
CALL = CudaCall(
    "scale_rows",
    {"x": X, "y": Y, "rows": Symbol("T"), "stride": STRIDE, "factor": 2.0},
    {"bias": None, "WIDTH": 64},
    ((Product(("T",)),),),
    source=SOURCE,
)


def make(call: CudaCall = CALL, sm: int = 90, stride: int = 64, dtype: str = "bf16") -> Variant:
    return variant(call, sm, {X: dtype, Y: "f32"}, {STRIDE: stride})


def test_as_many_kernels_at_once_as_this_process_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile, "usable_cpus", lambda: 3)
    assert CudaCompiler().workers == 3
    assert CudaCompiler(workers=5).workers == 5


def test_a_variant_is_what_the_call_and_its_places_say() -> None:
    made = make()
    assert made.signature == (
        ("x", "*bf16"),
        ("y", "*fp32"),
        ("rows", "i32"),
        ("stride", "i32"),
        ("factor", "fp32"),
        ("bias", "constexpr"),
        ("WIDTH", "constexpr"),
    )
    assert made.constexprs == (("bias", None), ("WIDTH", 64))
    assert made.divisible == ("x", "y", "stride")
    assert make(stride=65).divisible == ("x", "y")
    assert make(replace(CALL, multiples_of_16=frozenset({"rows"}))).divisible == ("x", "y", "rows", "stride")
    assert variant(CALL, 90, {X: "bf16", Y: "f32"}, {STRIDE: 64}, {X}).divisible == ("y", "stride")
    pool = make(replace(CALL, args={**CALL.args, "x": Pool(0, 24, "bf16"), "stride": 32}))
    assert pool.divisible == ("y", "stride")


def test_a_launch_that_does_not_fit_its_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rows takes x, y, rows, stride, factor, bias, WIDTH; the launch names"):
        make(replace(CALL, constexprs={"bias": None}))
    with pytest.raises(ValueError, match="no kernel missing"):
        make(replace(CALL, kernel="missing"))


def test_fp8_needs_an_architecture_that_has_it() -> None:
    with pytest.raises(UnsupportedError, match=r"cuda:sm_80 has no FP8 .*sm_89 or later"):
        make(sm=80, dtype="f8e4m3")
    assert make(sm=89, dtype="f8e4m3").signature[0] == ("x", "*fp8e4nv")


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_a_cubin_says_what_it_takes(sm: int) -> None:
    cubin, again = CudaCompiler().cubins([make(sm=sm)] * 2)
    assert cubin is again
    assert (cubin.entry, cubin.num_warps, cubin.num_ctas, cubin.scratch) == ("scale_rows", 4, 1, 0)
    assert cubin.parameters == ("x", "y", "rows", "stride", "factor", "global_scratch", "profile_scratch")
    found = resources(cubin.code)
    offsets = [(0, 8), (8, 8), (16, 4), (20, 4), (24, 4), (32, 8), (40, 8)]
    assert found.parameters == tuple(Parameter(*place) for place in offsets)
    assert (found.entry, found.threads, found.local) == ("scale_rows", 128, 0)
    assert 0 < found.registers <= 255


def test_spilled_registers_are_seen() -> None:
    crowded = SOURCE.replace("value.to(", "(value * tl.max(value)).to(").replace("row * stride + columns", "columns")
    call = replace(CALL, source=crowded, constexprs={"bias": None, "WIDTH": 16384}, num_warps=1)
    (cubin,) = CudaCompiler().cubins([make(call)])
    assert resources(cubin.code).local > 0


@pytest.mark.parametrize("damage", [lambda code: code[:100], lambda code: b"", lambda code: b"\0" * len(code)])
def test_a_damaged_cubin_is_refused(damage) -> None:
    (cubin,) = CudaCompiler().cubins([make()])
    with pytest.raises(PlanError, match="is damaged"):
        resources(damage(cubin.code))


def test_cubins_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, counts = CudaCompiler(ObjectCache(tmp_path, suffix=".cubin")), []
    first = compiler.cubins([make()], counts.append)
    monkeypatch.setattr(CudaCompiler, "_compile", lambda *args: pytest.fail("compiled again"))
    assert compiler.cubins([make()]) == first
    assert counts == [0, 1]


def test_a_changed_kernel_is_another_variant() -> None:
    text = SOURCE.replace("* factor", "/ factor")
    keys = {v.key("3.6") for v in (make(), make(stride=3), make(sm=89), make(replace(CALL, source=text)))}
    assert len({*keys, make().key("3.7")}) == 5


def test_bytes_depend_on_no_folder_and_no_environment(tmp_path: Path) -> None:
    """Another place of the project, another working directory, another environment, another process."""
    script = "import sys; from tests.unit.builder.test_cuda_compile import write; write(sys.argv[1])"
    project = tmp_path / "elsewhere" / "llmc"
    root = Path(__file__).parents[3]
    for room in ("artifacts", "plugins", "profiles", "builder"):
        shutil.copytree(root / room, project / room, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "__init__.py").write_text("")
    (project.parent / "tests").symlink_to(root / "tests")
    environment = {**os.environ, "PYTHONPATH": str(project.parent), "PYTHONHASHSEED": "7", "TRITON_DEBUG": "1"}
    there = tmp_path / "there.cubin"
    subprocess.run([sys.executable, "-c", script, there], cwd=project.parent, env=environment, check=True)
    write(str(tmp_path / "here.cubin"))
    assert there.read_bytes() == (tmp_path / "here.cubin").read_bytes()


def write(path: str) -> None:
    (cubin,) = CudaCompiler().cubins([make()])
    Path(path).write_bytes(cubin.code)


def test_a_kernel_that_fits_no_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_compile.SHARED_MEMORY, 90, -1)
    with pytest.raises(UnsupportedError, match="scale_rows needs 0 bytes of shared memory, a block on sm_90 has -1"):
        CudaCompiler().cubins([make()])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'llmc\[cuda-build\]'"):
        CudaCompiler()


def test_what_triton_says_is_passed_on() -> None:
    call = replace(CALL, source=SOURCE.replace("* factor", "* undefined_name"))
    with pytest.raises(EnvironmentFault, match=r"Triton fails on scale_rows for sm_90 .*undefined_name"):
        CudaCompiler().cubins([make(call)])


def test_a_process_that_dies_is_an_error() -> None:
    call = replace(CALL, source="import os\nos._exit(9)\n" + SOURCE)
    with pytest.raises(EnvironmentFault, match="the process that compiles has died"):
        CudaCompiler().cubins([make(call)])
