"""Kernels of plug-ins compiled to PTX: parameters in TensorRT's order, nothing else declared, assembled by ptxas; a
layer that is refused.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder.cuda.cubin import resources
from llmc.builder.cuda.variant import Variant, variant
from llmc.builder.ir import Node
from llmc.builder.trt.emitter import Emitter
from llmc.builder.trt.operators import LAYERS
from llmc.builder.trt.plugin_kernel import PluginKernel, plugin_kernel
from llmc.builder.trt.plugins import AotPlugins
from llmc.builder.trt.ptx import Ptx, compile_ptx, without_scratch
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Pool, Product, StepArray, Symbol, Temporary
from llmc.plugins.paged_attention import Attrs
from llmc.plugins.paged_attention.cuda import launch, layer_bytes
from llmc.profiles import load_target
from tests.unit.trt.numpy_plugins import MOST_SHARED, Plugins
from tests.unit.trt.numpy_tensorrt import DataType

HEADS, KV_HEADS, WIDTH, BLOCK = 8, 2, 64, 16


def assembler(sm: int) -> Path:
    """The one that Triton brings."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if sm >= 100 else "ptxas")


def attention(sm: int, width: int = WIDTH) -> tuple[PluginKernel, Variant]:
    kv_bytes = layer_bytes(KV_HEADS, width, width, BLOCK, "bf16")
    tactics = load_target(f"cuda:sm_{sm}").tactics["paged_attention"]
    env = CudaEnv(sm, (1, 512), decode=False, block_size=BLOCK, kv_block_bytes=kv_bytes, tactics=tactics)
    q, y = TensorType("f32", ("T", HEADS, width)), TensorType("f32", ("T", HEADS * width))
    (call,) = launch(Attrs(3, HEADS, KV_HEADS, width, 0.125), [q], [y], env)
    strides = {RowStride("in", 0): HEADS * width, RowStride("out", 0): HEADS * width}
    kernel = plugin_kernel(call, strides, writes=False)
    return kernel, variant(kernel.call, sm, {Pointer("in", 0): "f32", Pointer("out", 0): "f32"}, strides)


def test_the_generated_kernel_is_the_one_of_the_cuda_targets() -> None:
    kernel, _ = attention(90)
    assert kernel.inputs == ("in0", "pool", "context_len", "block_tables", "query_start")
    assert kernel.numbers == ("table_stride", "num_seqs")
    assert kernel.outputs == ("out0",)
    assert kernel.call.source is not None
    assert "from llmc.plugins.paged_attention.kernels import mixed\n" in kernel.call.source
    assert f"values=pool + {KV_HEADS * BLOCK * WIDTH}," in kernel.call.source
    assert kernel.call.constexprs["scale"] == 0.125


@pytest.mark.parametrize("sm", [89, 90, 120])
def test_ptx_has_the_parameters_of_a_plugin(sm: int, tmp_path: Path) -> None:
    kernel, compiled = attention(sm)
    (ptx,) = compile_ptx([compiled])
    assert ptx.parameters == (*kernel.inputs, *kernel.numbers, *kernel.outputs)
    text, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    text.write_text(ptx.text)
    name = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
    subprocess.run([assembler(sm), f"-arch={name}", text, "-o", cubin], check=True)
    about = resources(cubin.read_bytes())
    pointers, numbers = len(kernel.inputs), len(kernel.numbers)
    assert [p.size for p in about.parameters] == [8] * pointers + [4] * numbers + [8]
    assert (about.entry, about.threads) == (ptx.entry, ptx.threads)


@pytest.mark.parametrize(("sm", "width", "stages"), [(90, 64, 2), (90, 128, 1), (120, 256, 1)])
def test_heads_of_any_width_fit_the_shared_memory_of_a_plugin(sm: int, width: int, stages: int) -> None:
    """Which no launch parameter of TensorRT's makes larger; with two stages wide heads need more."""
    kernel, compiled = attention(sm, width)
    given: list[tuple[int, Ptx]] = []

    def compile_noting(variants: Sequence[Variant]) -> list[Ptx]:
        made = compile_ptx(variants)
        given.extend((variant.num_stages, ptx) for variant, ptx in zip(variants, made, strict=True))
        return made

    AotPlugins(Plugins(), DataType.FLOAT, compile_noting).register("paged_attention", kernel, compiled, [("T", 8)])
    needed = {stages: ptx.shared + ptx.static_shared for stages, ptx in given}
    assert [number for number, size in needed.items() if size <= MOST_SHARED] == [stages]
    assert compiled.num_stages == max(needed) == 2


def test_what_needs_more_shared_memory_than_a_plugin_has_is_refused() -> None:
    kernel, compiled = attention(90)
    assert compiled.num_stages == 2
    for stage_bytes, stages in ((24064, 2), (24065, 1), (48128, 1)):
        plugins = Plugins(stage_bytes=stage_bytes)
        AotPlugins(plugins, DataType.FLOAT, plugins.compile).register("attention", kernel, compiled, [("T", 8)])
        assert list(plugins.compiled.values())[-1].num_stages == stages
    plugins = Plugins(stage_bytes=48129)
    with pytest.raises(
        UnsupportedError, match=r"mixed needs 49153 bytes of shared memory.* 49152 at most; --target cuda:sm_90"
    ):
        AotPlugins(plugins, DataType.FLOAT, plugins.compile).register("attention", kernel, compiled, [("T", 8)])
    assert not hasattr(plugins.op, "llmc")


def test_what_needs_memory_is_refused() -> None:
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 f_param_1,\n\t.param .u64 f_param_2\n)\n{ ret; }"
    assert "f_param_0\n)" in without_scratch(ptx, "f", 0)
    for text, scratch in ((ptx, 256), (ptx.replace("ret;", "ld.param.u64 %rd1, [f_param_1]; ret;"), 0)):
        with pytest.raises(UnsupportedError, match="scratch memory"):
            without_scratch(text, "f", scratch)
    call = CudaCall(
        "rope_cache.kernels:head_means",
        {"q": Pointer("in", 0), "means": Temporary("means", "f32", (Product(("T", 2)),))},
        {},
        ((Product(("T",)),),),
    )
    with pytest.raises(ValueError, match="memory of its own"):
        plugin_kernel(call, {}, writes=False)


def test_a_kernel_that_writes_gives_the_pool_on() -> None:
    args = {"k": Pointer("in", 0), "keys": Pool(1, 64, "bf16"), "tables": StepArray("block_tables"), "n": Symbol("T")}
    kernel = plugin_kernel(CudaCall("rope_cache.kernels:f", args, {"WIDTH": 4}, ()), {}, writes=True)
    assert list(kernel.call.args) == ["in0", "pool", "block_tables", "T", "pool_written"]
    assert "f(k=in0, keys=pool + 32, tables=block_tables, n=T, WIDTH=WIDTH)" in str(kernel.call.source)


@pytest.mark.parametrize(("axis", "step"), [(0, 1), (1, 2)])
def test_a_slice_that_is_no_run_of_columns_is_refused(axis: int, step: int) -> None:
    kind, cut = TensorType("f32", (4, 4)), SimpleNamespace(axis=axis, start=0, stop=2, step=step)
    emitter = Emitter(None, None, {"x": kind})
    emitter.values["x"] = SimpleNamespace(shape=(4, 4))
    with pytest.raises(ValueError, match=f"a slice of axis {axis} in steps of {step} has no TensorRT form"):
        LAYERS["slice"](emitter, Node("slice", ("x",), cut, ("y",), (kind,)))
