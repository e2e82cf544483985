"""`llmc export --onnx` on the command line: token for token what the engine of the plan answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llmc.artifacts.plan import Plan
from llmc.builder.interchange import operators
from llmc.builder.interchange.emitter import Emitter
from llmc.builder.interpreter import Batch, Exchange
from llmc.builder.ir import Node
from llmc.builder.page.render import lower_plan
from llmc.cli import main
from llmc.runtime.engine import Engine
from llmc.runtime.messages import SamplingParams
from tests.builds import SMALL
from tests.models import save_checkpoint
from tests.unit.builder.onnx_steps import OnnxSteps

pytestmark = pytest.mark.timeout(600)
PROMPTS = ([5, 6, 7, 8, 9], [11, 12], [20, 21, 22, 23, 24, 25, 26, 27])
NEW_TOKENS = 12


def llmc(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def greedy(models: list[Path], plan: Path, prompts: tuple[list[int], ...], count: int) -> list[list[int]]:
    """The tokens that the evaluator answers with, all prompts in one batch, the ranks side by side."""
    opened = lower_plan(Plan.open(plan))
    capacities = [len(prompt) + count for prompt in prompts]
    exchange = Exchange(len(models), 60)
    ranks = [OnnxSteps(model, partial(exchange.all_reduce, rank)) for rank, model in enumerate(models)]
    graphs, size = [program.graph for program in opened.programs], opened.profile.block_size
    batches = [Batch(graph, capacities, size, kv_dtype=opened.kv_dtype) for graph in graphs]
    answers = [list[int]() for _ in prompts]
    fed: list[list[int]] = [list(prompt) for prompt in prompts]
    for _ in range(count):
        steps = [batch.step(fed) for batch in batches]
        with ThreadPoolExecutor(len(ranks)) as pool:
            columns = list(pool.map(lambda rank, step: rank.run(*step), ranks, steps))
        fed = [[int(row.argmax())] for row in np.concatenate(columns, axis=1)]
        for answer, (token,) in zip(answers, fed, strict=True):
            answer.append(token)
    return answers


def answered(plan: Path, prompts: tuple[list[int], ...], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with Engine(plan) as engine:
        return [list(a.token_ids) for a in engine.generate([list(p) for p in prompts], params)]


@pytest.mark.parametrize(
    "options", [("--dtype", "fp32"), ("--fp8",), ("--dtype", "fp32", "--tp", "2")], ids=["fp32", "fp8", "tp 2"]
)
def test_a_plan_exports_the_weights_that_it_serves(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    plan, model = tmp_path / "engine.plan", tmp_path / "model.onnx"
    llmc("build", "--model", folder, *options, "--no-evaluate", "--profile", SMALL, "-o", plan)
    assert "nodes" in llmc("export", "--onnx", plan, "-o", model)
    names = ["model.rank0.onnx", "model.rank1.onnx"] if "--tp" in options else ["model.onnx"]
    assert greedy([tmp_path / name for name in names], plan, PROMPTS, NEW_TOKENS) == answered(plan, PROMPTS, NEW_TOKENS)
    if "fp32" in options:  # whose weights are the checkpoint's own
        (tmp_path / "own").mkdir()
        llmc("export", "--onnx", folder, *options, "-o", tmp_path / "own" / "model.onnx")
        for name in names:
            assert (tmp_path / "own" / f"{name}.data").read_bytes() == (tmp_path / f"{name}.data").read_bytes()


def test_mistakes_are_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", "--onnx", str(tmp_path / "nowhere")])
    assert result.exit_code == 3
    assert "nowhere: no such file" in result.output
    folder = save_checkpoint(tmp_path / "mamba", "mamba2")
    result = CliRunner().invoke(main, ["export", "--onnx", str(folder), "-o", str(tmp_path / "model.onnx")])
    assert result.exit_code == 4
    assert "no ONNX form of these operators: causal_conv (in " in result.output
    assert not list(tmp_path.glob("*model.onnx*"))


def no_such_operator(e: Emitter, node: Node) -> list[str]:
    return [e.op("NoSuchOperator", node.inputs[0])]


def no_such_operand(e: Emitter, node: Node) -> list[str]:
    return [e.op("Add", node.inputs[0], "nowhere")]


@pytest.mark.parametrize(
    ("translation", "words"),
    [
        (no_such_operator, "No Op registered for NoSuchOperator"),
        (no_such_operand, "input 'nowhere' of node: name: OpType: Add is not output of any previous nodes"),
    ],
)
def test_a_model_that_onnx_refuses_is_not_written(
    translation: Callable[[Emitter, Node], list[str]], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    monkeypatch.setitem(operators.TRANSLATIONS, "select_rows", translation)
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (out / name).write_text(f"an older {name}")
    model = out / "model.onnx"
    result = CliRunner().invoke(main, ["export", "--onnx", str(folder), "--dtype", "fp32", "-o", str(model)])
    assert result.exit_code == 1  # a defect of llmc itself
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: internal error: RuntimeError: {model}: onnx refuses the model")
    assert words in line
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        name: f"an older {name}" for name in ("model.onnx", "model.onnx.data")
    }
