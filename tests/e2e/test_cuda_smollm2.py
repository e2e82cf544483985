"""SmolLM2 in FP8 for a GPU, built on a machine without one: what the plan holds. Not run on a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import llmc
from llmc.artifacts.calibration import CalibrationTable
from llmc.artifacts.cuda_program import AllReduce, Launch, decode_program
from llmc.artifacts.plan import Plan
from llmc.builder.cuda.cubin import resources
from llmc.runtime.machine import has_gpu_driver
from tests.unit.calibration.tables import ranges_alone

LAYERS = 30
#: The operator that works out sines and cosines of positions, the only one that may have a stack.
ROTARY = "pointwise @model.rotary_emb"
#: Bytes of a thread's stack where sines and cosines of large angles are worked out: seven words of the angle times 2/pi
#: (the reduction of Payne and Hanek). A register that is spilled makes it larger.
REDUCTION = 32


@pytest.mark.real_model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_smollm2_is_built_for_hopper(real_gguf: Path, smollm2_plan: Path, tmp_path: Path, tp: int) -> None:
    table = tmp_path / "table.json"
    ready = CalibrationTable.from_json(bytes(Plan.open(smollm2_plan).section("calibration.json")))
    table.write_bytes(ranges_alone(ready).to_json())
    report = llmc.build(
        real_gguf, tmp_path / "x.plan", precision="fp8", tp=tp, target="cuda:sm_90", calib=table, evaluate=False
    )
    if not has_gpu_driver():
        assert report.quality["run"] == "not run: no GPU"
    plan = Plan.open(tmp_path / "x.plan")
    assert (plan.manifest.target.isa, plan.manifest.target.driver) == ("sm_90", 13000)
    assert plan.manifest.build.config["fp8_activations"] == "token"
    columns = []
    for rank in plan.manifest.ranks:
        program = decode_program(plan.section(rank.code), rank.code)
        columns.append(program.columns)
        for steps in program.steps:
            launches = Counter("all_reduce" if isinstance(x, AllReduce) else x.node.split()[0] for x in steps.launches)
            # Attention's output and the MLP's are summed over ranks.
            assert launches["all_reduce"] == (2 * LAYERS if tp > 1 else 0)
            assert launches["rope_cache"] == LAYERS
            # Inputs of FP8 layers are rounded by the norm before them, or by an operator of their own.
            assert launches["quantize"] + launches["rms_norm"] >= 4 * LAYERS
        angles = {x.kernel for s in program.steps for x in s.launches if isinstance(x, Launch) and x.node == ROTARY}
        for number, kernel in enumerate(program.kernels):
            local = resources(bytes(plan.section(kernel.section))).local
            assert local in ((0, REDUCTION) if number in angles else (0,)), f"{kernel.entry} spills"
    assert sum(count for _, count in columns) == plan.manifest.model.vocab_size
