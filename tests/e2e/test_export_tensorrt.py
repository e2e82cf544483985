"""TensorRT engines: built for real by TensorRT-RTX, which needs no GPU for that; what is refused, with and without it.

An engine is only built here, never run: that needs the GPU that it is for.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from llmc.artifacts.errors import EnvironmentFault, UnsupportedError
from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.builder import pipeline
from llmc.builder.ir import Graph
from llmc.builder.pipeline import CompileOptions
from llmc.builder.trace import trace_model
from llmc.builder.trt import library
from llmc.builder.trt.engine import TrtEngine, build_engine
from llmc.builder.trt.linear_cache import LinearCache
from llmc.cli import main
from llmc.runtime.cuda import gpus
from llmc.runtime.cuda.gpus import Gpu, Survey
from tests.builds import SMALL
from tests.models import save_checkpoint, tiny_config, tiny_model
from tests.unit.builder.weights_of import model_tensors, params_of

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs TensorRT-RTX: pip install -e '.[tensorrt-rtx]'"
)
PROFILE = ShapeProfile("test", (TokenRange(1, 1, 8), TokenRange(9, 64, 64)), 8, 256, 16)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def llmc(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def built(
    options: CompileOptions, sm: int, family: str = "llama", scale: float | None = None
) -> tuple[Graph, TrtEngine]:
    """`scale`: of all inputs that the graph would scale by token."""
    import tensorrt_rtx

    sizes = SIZES if family == "llama" else {}
    traced = trace_model(tiny_config(family, **sizes))
    graph = pipeline.run(traced.graph, options).graphs[0]
    if scale is not None:
        nodes = (
            replace(n, attrs=replace(n.attrs, x_per_token=False, x_scale=scale)) if "x_per_token=True" in str(n) else n
            for n in graph
        )
        graph = graph.with_nodes(nodes)
    weights = params_of(model_tensors(tiny_model(family, **sizes), traced.buffers))
    return graph, build_engine(tensorrt_rtx, graph, weights, LinearCache(graph, 256), PROFILE, sm)


@needs_rtx
@pytest.mark.parametrize("sm", [89, 120])
def test_fp8_layers_become_q_dq_and_attention_is_native(sm: int) -> None:
    graph, made = built(CompileOptions("fp8"), sm, scale=0.01)
    kinds = Counter(made.layers.values())
    linears = [n for n in graph if n.op == "linear"]
    rounded = sum(n.attrs.x_scale is not None for n in linears)
    assert kinds["QUANTIZE"] == rounded > 0
    assert kinds["DEQUANTIZE"] == 2 * rounded
    assert kinds["MATRIX_MULTIPLY"] == len(linears)
    assert kinds["ATTENTION_INPUT"] == sum(n.op == "paged_attention" for n in graph)
    assert kinds["KV_CACHE_UPDATE"] == 2 * kinds["ATTENTION_INPUT"]
    assert any(name.startswith("linear model.layers.1.mlp.down_proj") for name in made.layers)
    # What the engine says of its FP8 tensors: the weights, once a profile, and what the layers round their inputs to.
    tensors = re.findall(rb"tensor=\{[^\n]*type=fp8_e4m3", made.engine)
    assert sum(b"const_payload_size=" in line for line in tensors) in (rounded, 2 * rounded)
    named = {found[1].decode() for line in tensors if (found := re.search(rb'name="__mye\d+linear (\S+) ', line))}
    assert named == {n.path for n in linears if n.attrs.x_scale is not None}


@needs_rtx
def test_two_builds_differ_in_the_numbers_of_sizes_alone() -> None:
    """TensorRT numbers its expressions of sizes in an order of the moment: more or fewer of their bytes differ, here
    and there. Of weights or code far more would, side by side.
    """
    (_, first), (_, second) = (built(CompileOptions("bf16"), 89) for _ in range(2))
    assert len(first.engine) == len(second.engine)
    one, other = (np.frombuffer(made.engine, np.uint8) for made in (first, second))
    places = np.flatnonzero(one != other)
    beside = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    assert len(places) < len(one) // 1000
    assert max(map(len, beside)) <= 8


@needs_rtx
def test_what_has_no_layers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"causal_conv \(in .*ssd_scan \(in "):
        built(CompileOptions("bf16"), 89, "mamba2")
    with pytest.raises(UnsupportedError, match=r"linear @model.layers.0.*--fp8-activations static"):
        built(CompileOptions("fp8"), 89)
    with pytest.raises(EnvironmentFault, match=r"sm_90: TensorRT-RTX .* does not build for it"):
        built(CompileOptions("bf16"), 90)


@needs_rtx
def test_a_plan_becomes_an_engine_a_rank(tmp_path: Path) -> None:
    folder, plan = save_checkpoint(tmp_path / "model", "llama", **SIZES), tmp_path / "engine.plan"
    assert llmc("build", "--model", folder, "--tp", 2, "--no-evaluate", "--profile", SMALL, "-o", plan).exit_code == 0
    result = llmc("export", "--tensorrt", plan, "--sm", 120, "-o", tmp_path / "model.engine")
    assert result.exit_code == 0, result.output
    for name in ("model.rank0.engine", "model.rank1.engine"):
        assert f"{name}: " in result.output
        assert (tmp_path / name).stat().st_size > 100_000


def test_without_tensorrt_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "tensorrt" in name else find(name))
    for result in (
        llmc("build", "--model", tmp_path, "--target", "tensorrt:sm_90"),
        llmc("export", "--tensorrt", tmp_path, "--sm", "90"),
    ):
        assert result.exit_code == 6
        for word in ("pip install tensorrt", "--target cuda:sm_90", "llmc export --onnx"):
            assert word in result.output


def test_tensorrt_itself_needs_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "tensorrt_module", lambda: SimpleNamespace(plugin=None))
    for machine, words in (
        (EnvironmentFault("no driver here"), "no driver here"),
        (Survey(13000, ()), "is none"),
        (Survey(13000, (Gpu("a GPU", 89, 1, 1),)), "is sm_89 (a GPU)"),
    ):

        def survey(machine: Survey | EnvironmentFault = machine) -> Survey:
            if isinstance(machine, EnvironmentFault):
                raise machine
            return machine

        monkeypatch.setattr(gpus, "survey", survey)
        result = llmc("export", "--tensorrt", tmp_path, "--sm", "90")
        assert result.exit_code == 6
        for word in (words, "pip install tensorrt-rtx", "--target cuda:sm_90"):
            assert word in result.output


@pytest.mark.parametrize(
    ("options", "word"),
    [((), "--onnx or --tensorrt"), (("--onnx", "--sm", "89"), "--sm 89"), (("--tensorrt",), "needs --sm"),
     (("--tensorrt", "--sm", "89", "--dtype", "bf16"), "--dtype bf16")],
)  # fmt: skip
def test_options_that_do_nothing_are_refused(options: tuple[str, ...], word: str, tmp_path: Path) -> None:
    result = llmc("export", tmp_path, *options)
    assert result.exit_code == 2
    assert word in result.output
