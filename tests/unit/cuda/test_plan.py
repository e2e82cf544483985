"""A whole plan for a GPU, built without one: its bytes made again elsewhere by the command that it prints, and all
that `llmc inspect` shows of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import llmc
from llmc.artifacts.cuda_program import decode_program
from llmc.artifacts.plan import Plan
from llmc.builder.cuda import code
from llmc.builder.cuda.cubin import Resources
from llmc.builder.cuda.program import CudaLowered
from llmc.builder.ir import GraphError
from llmc.builder.page.arena import pictures
from llmc.builder.page.render import lower_again
from llmc.cli import main
from tests.models import save_checkpoint

TACTICS = "linear: {skinny: {depth_bytes: 128}}\n"
PROFILE = "token_ranges: [{min: 1, max: 32}]\nmax_num_seqs: 8\nmax_seq_len: 64\n"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "small.yaml").write_text(PROFILE)
    (folder / "mine.yaml").write_text(TACTICS)
    model = save_checkpoint(folder / "tiny", "llama")
    llmc.build(
        model, folder / "x.plan", precision="bf16", target="cuda:sm_90", evaluate=False,
        profile=str(folder / "small.yaml"), tactics=folder / "mine.yaml",
    )  # fmt: skip
    return Plan.open(folder / "x.plan")


def inspect(plan: Plan, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", str(plan.path), *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.timeout(900)
def test_the_command_that_a_plan_prints_makes_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    """In another folder, with another hash seed, from no cache; the files that it needs stand in the comments."""
    *comments, command = inspect(plan, "--command").output.splitlines()
    assert "--target cuda:sm_90" in command
    assert "--tactics mine.yaml" in command
    files = dict(re.findall(r"^# (\w+\.yaml): (.*)$", "\n".join(comments), re.MULTILINE))
    assert files["mine.yaml"] == "{linear: {skinny: {depth_bytes: 128}}}"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    name = command.split("--model ")[1].split()[0]
    (tmp_path / name).symlink_to(plan.path.parent / "tiny")
    words = [sys.executable, "-m", *command.split(), "--no-cache"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.plan").read_bytes() == plan.path.read_bytes()


def test_the_summary_says_what_the_plan_is_for(plan: Plan) -> None:
    shown = inspect(plan)
    assert shown.exit_code == 0, shown.output
    assert "cuda:sm_90" in shown.output
    assert "driver of CUDA 13.0 or later" in shown.output
    assert all(section.name in shown.output for section in plan.manifest.sections)


def test_every_kernel_has_a_line(plan: Plan) -> None:
    shown = inspect(plan, "--kernels")
    assert shown.exit_code == 0, shown.output
    head, *lines = (line for line in shown.output.splitlines() if line.strip())
    assert head.split()[:3] == ["kernel", "launches", "threads"]
    program = decode_program(plan.section("code/rank0.json"), "rank 0")
    assert sorted(line.split()[0] for line in lines) == sorted(kernel.entry for kernel in program.kernels)
    assert sum(int(line.split()[1]) for line in lines) == sum(len(steps.launches) for steps in program.steps)
    assert any("HGMMA" in line for line in lines)


def test_the_page_is_drawn(plan: Plan, tmp_path: Path) -> None:
    shown = inspect(plan, "--html", tmp_path / "x.html")
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "x.html").read_text()
    assert f"All {plan.manifest.ranks[0].launches} launches" in page
    assert "decode steps of 1 to 8 tokens" in page
    assert "steps of any mixture of 1 to 32 tokens" in page
    assert page.count("<rect ") == sum(len(p.blocks) for p in pictures(lower_again(plan).programs[0]))


def test_blocks_are_inside_the_arena_and_none_in_the_way_of_another(plan: Plan) -> None:
    lowered = lower_again(plan)
    assert isinstance(lowered, CudaLowered)
    for picture in pictures(lowered.programs[0]):
        assert max(b.offset + b.nbytes for b in picture.blocks) <= picture.nbytes
        assert max(b.last for b in picture.blocks) == picture.launches - 1
        for i, one in enumerate(picture.blocks):
            for two in picture.blocks[:i]:
                apart = one.offset >= two.offset + two.nbytes or two.offset >= one.offset + one.nbytes
                assert apart or one.first > two.last or two.first > one.last, (one, two)


def test_a_launch_that_does_not_fit_its_cubin_stops_the_build(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    real = code.resources

    def other(data: bytes) -> Resources:
        """The first parameter is a number, not an address."""
        found = real(data)
        first, *rest = found.parameters
        return dataclasses.replace(found, parameters=(dataclasses.replace(first, size=4), *rest))

    monkeypatch.setattr(code, "resources", other)
    with pytest.raises(GraphError, match=r"embedding @.* arguments of \[8, .*parameters of \[4, "):
        llmc.build(
            plan.path.parent / "tiny", plan.path.parent / "y.plan", precision="bf16", target="cuda:sm_90",
            evaluate=False, profile=str(plan.path.parent / "small.yaml"),
        )  # fmt: skip
