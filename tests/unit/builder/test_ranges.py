"""FP8 scales are modelopt's: those that a plan stores, bit for bit; and a table that says otherwise is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.calibration import CalibrationTable, Ranges
from llmc.artifacts.errors import CheckpointError
from llmc.builder import pipeline
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.cpu.program import CpuLowered, CpuRank
from llmc.builder.pipeline import CompileOptions
from llmc.builder.ranges import check_ranges
from llmc.builder.reference import load_reference
from llmc.builder.trace import Traced, trace
from llmc.builder.weights.recipe import Concat, Fp8Scale, Load, Recipe, Slice, Transpose, parse
from llmc.builder.weights.stream import write_weights
from llmc.calibration import CalibrationOptions, calibrate
from tests.models import save_checkpoint, tiny_model
from tests.unit.builder.native_engine import lower_for_test
from tests.unit.builder.weights_of import Tensors, model_tensors
from tests.unit.calibration.tables import ranges_alone

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranges")


@cache
def opened(folder: Path, family: str) -> tuple[Checkpoint, Traced, CalibrationTable, Tensors]:
    checkpoint = open_checkpoint(save_checkpoint(folder / family, family))
    traced = trace(checkpoint)
    table = ranges_alone(calibrate(checkpoint, CalibrationOptions(samples=2, tokens=16), folder / f"{family}.json"))
    return checkpoint, traced, table, model_tensors(tiny_model(family), traced.buffers)


def modelopt_scales(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Module path -> f32[output channels], as modelopt exports them for weights scaled by output channel."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import get_weight_scaling_factor

    model, config = load_reference(checkpoint), copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer":
            entry["cfg"]["axis"] = 0
    mtq.quantize(model, config, lambda quantized: quantized(torch.arange(16)[None]))
    scales = {}
    for path, module in model.named_modules():
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled:
            scales[path] = get_weight_scaling_factor(module).numpy().ravel()
    return scales


def by_channel(recipe: Recipe, scales: dict[str, np.ndarray]) -> np.ndarray:
    """What a recipe of scales stands for, cut and joined as it says."""
    match recipe:
        case Concat(0, sources):
            return np.concatenate([by_channel(source, scales) for source in sources])
        case Slice(source, 0, start, stop):
            return by_channel(source, scales)[start:stop]
        case Transpose(Slice(source, 1, start, stop)):
            return by_channel(source, scales)[start:stop]
        case Fp8Scale(source) | Transpose(source):
            return by_channel(source, scales)
        case Load(name):
            return scales[name.removesuffix(".weight")]
    raise AssertionError(recipe)


def written(lowered: CpuLowered, program: CpuRank, tensors: Tensors) -> dict[str, bytes]:
    sinks = {"weights": io.BytesIO(), "shared": io.BytesIO()}
    write_weights(program.weights, tensors, sinks["weights"])
    write_weights(lowered.shared, tensors, sinks["shared"])
    return {space: sink.getvalue() for space, sink in sinks.items()}


@pytest.mark.parametrize(("family", "linears"), [("llama", 8), ("gpt2", 8), ("phi3", 8)])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_stores_the_scales_of_modelopt(folder: Path, family: str, linears: int, tp: int) -> None:
    checkpoint, traced, table, tensors = opened(folder, family)
    scales = modelopt_scales(checkpoint)
    options = CompileOptions(precision="fp8", tp=tp, table=table, fp8_activations="static")
    lowered = lower_for_test(pipeline.run(traced.graph, options))
    for program in lowered.programs:
        producers, data, seen = program.graph.producers(), written(lowered, program, tensors), 0
        for launch in program.ranges[0].launches:
            if launch.node.op != "linear" or program.types[launch.node.inputs[1]].dtype != "f8e4m3":
                continue
            param, place = producers[launch.node.inputs[2]], launch.inputs[2]
            stored = np.frombuffer(data[place.space], np.float32, param.type.size(), place.offset)
            np.testing.assert_array_equal(stored, by_channel(parse(param.attrs.recipe), scales))
            assert launch.node.attrs.x_scale in {ranges.input_amax / 448 for ranges in table.tensors.values()}
            seen += 1
        assert seen == linears


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_a_table_of_these_weights_passes(folder: Path, family: str) -> None:
    _, traced, table, tensors = opened(folder, family)
    assert table.tensors.keys() == {n.path for n in traced.graph if n.op == "linear"} - {"lm_head"}
    check_ranges(traced.graph, table, tensors)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_range_that_is_not_the_weights_is_named(folder: Path, family: str) -> None:
    _, traced, table, tensors = opened(folder, family)
    path, ranges = sorted(table.tensors.items())[-1]
    amax = list(ranges.weight_amax)
    amax[5] = float(np.nextafter(np.float32(amax[5]), np.float32(9)))

    def changed(weight_amax: list[float]) -> CalibrationTable:
        tensors = {**table.tensors, path: Ranges(ranges.input_amax, tuple(weight_amax))}
        return dataclasses.replace(table, tensors=tensors)

    with pytest.raises(CheckpointError, match=rf"{path}: weight_amax of output channel 5 .*1 of {len(amax)} channels"):
        check_ranges(traced.graph, changed(amax), tensors)
    with pytest.raises(CheckpointError, match=rf"{path}: the calibration table has 1 weight ranges"):
        check_ranges(traced.graph, changed(amax[:1]), tensors)
