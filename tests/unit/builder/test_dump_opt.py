"""`llmc build --dump` and `llmc opt`: the stages as files, passes run alone on them, and the two agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from llmc.artifacts.errors import UsageError
from llmc.builder.ir import parse_graphs
from llmc.builder.operators import attrs_of
from llmc.builder.opt import read_graphs, run_alone
from llmc.builder.pipeline import CompileOptions, all_passes, by_name, pass_doc, pass_name, run, stages
from llmc.builder.trace import trace_model
from llmc.cli import main
from tests.golden.goldens import FOLDER
from tests.models import save_checkpoint, tiny_config

torch.set_num_threads(1)


def llmc(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], input=text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def dump(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    result = llmc("build", "--model", checkpoint, "--tp", 2, "--dump", folder, "--stop-after", "check_lowerable")
    assert result.exit_code == 0, result.output
    return folder


def test_a_dump_holds_every_stage_numbered_and_readable(dump: Path) -> None:
    names = [pass_name(step) for step in all_passes(CompileOptions(tp=2))]
    shard = names.index("shard") + 1
    wanted = ["00-trace.ir"]
    for number, name in enumerate(names, 1):
        wanted += [f"{number:02d}-{name}{end}.ir" for end in ([".rank0", ".rank1"] if number >= shard else [""])]
    assert sorted(path.name for path in dump.iterdir()) == sorted(wanted)
    for path in dump.iterdir():
        (graph,) = parse_graphs(path.read_text(), attrs_of)
        body = path.read_text().partition("\ngraph ")[2]
        assert f"graph {body}" == str(graph)
    label = f"{names.index('fuse_rms_norm') + 1:02d}-fuse_rms_norm"
    assert (dump / f"{label}.ir").read_text().startswith(f"# {label}: matched 5 of 5; ")


def test_passes_run_alone_make_what_the_build_made(dump: Path, tmp_path: Path) -> None:
    files = {path.name: path for path in dump.iterdir()}
    for number, step in enumerate(all_passes(CompileOptions(tp=2)), 1):
        before, after = ([files[n] for n in sorted(files) if n.startswith(f"{i:02d}-")] for i in (number - 1, number))
        out = tmp_path / "out.ir"
        result = llmc("opt", "--passes", pass_name(step), "--tp", 2, "-o", out, *before)
        assert result.exit_code == 0, result.output
        made = parse_graphs(out.read_text(), attrs_of)
        assert made == tuple(g for path in after for g in parse_graphs(path.read_text(), attrs_of))


def test_the_list_of_passes_from_the_trace_is_the_pipeline() -> None:
    graph = trace_model(tiny_config("llama")).graph
    options = CompileOptions(tp=2)
    names = [pass_name(step) for step in all_passes(options)]
    assert run_alone((graph,), names, options).graphs == run(graph, options).graphs


def test_opt_reads_standard_input_and_verifies_on_random_weights() -> None:
    text = (FOLDER / "shard.before.ir").read_text()
    sharded = llmc("opt", "--passes", "shard", "--tp", 3, "--verify", text=text)
    assert [graph.rank for graph in parse_graphs(sharded.stdout, attrs_of)] == [0, 1, 2]
    merged = llmc("opt", "--passes", "merge_gate_up,fuse_activation", "--verify", text=sharded.stdout)
    assert merged.stdout.count("silu_gate") == 3


def test_opt_verifies_on_a_checkpoint(dump: Path, checkpoint: Path) -> None:
    result = llmc("opt", "--passes", "canonicalize", "--verify", "--model", checkpoint, dump / "00-trace.ir")
    assert result.exit_code == 0, result.output


def test_stop_after_a_name_means_the_first_and_a_label_that_one(dump: Path) -> None:
    (graph,) = parse_graphs((dump / "00-trace.ir").read_text(), attrs_of)
    options = CompileOptions()
    names = [stage.name for stage in stages(graph, options, "simplify_views")]
    assert names.index("simplify_views") == len(names) - 1
    label = [stage.label for stage in stages(graph, options) if stage.name == "simplify_views"][-1]
    assert [stage.label for stage in stages(graph, options, label)][-1] == label


def test_a_new_dump_replaces_an_old_one_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "99-old.ir").write_text("")
    command = ("build", "--model", checkpoint, "--dump", tmp_path, "--stop-after", "canonicalize")
    assert llmc(*command).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00-trace.ir", "01-canonicalize.ir"]
    (tmp_path / "thesis.tex").write_text("")
    refused = llmc(*command)
    assert (refused.exit_code, "thesis.tex" in refused.output) == (2, True)
    assert (tmp_path / "thesis.tex").exists()


def test_every_pass_is_listed_with_what_it_does() -> None:
    shown = " ".join(llmc("opt", "--list").output.split())
    for name, step in by_name(CompileOptions()).items():
        assert name in shown
        assert len(pass_doc(step)) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("opt",), "--passes names no pass"),
        (("opt", "--passes", "fuse_all", "-"), "'fuse_all' is no pass; they are canonicalize, "),
        (("opt", "--passes", "shard", "--model", "x", "-"), "add --verify"),
        (("opt", "--passes", "shard", "--precision", "int3", "-"), "precision 'int3' is not one of"),
        (("build", "--model", "MODEL", "--stop-after", "shard"), "needs --dump DIR"),
        (("build", "--model", "MODEL", "--dump", "DIR", "--stop-after", "shrad"), "'shrad' is no pass; they are "),
        (("build", "--model", "MODEL", "--dump", "DIR", "--stop-after", "shard", "--json"), "what --json is for"),
        (("build", "--model", "MODEL", "--dump", "DIR", "--stop-after", "canonicalize", "--fp8", "--calib", "c.txt"),
         "quantize, which needs it"),
        (("build", "--model", "MODEL", "--dump", "DIR", "--stop-after", "canonicalize", "--fp8", "--fp8-budget", "1.1"),
         "--fp8-budget 1.1: quantize, which needs it"),
        (("build", "--model", "MODEL", "--dump", "DIR", "--stop-after", "shard", "--profile", "chatt"),
         "profile 'chatt' is neither"),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: tuple[str, ...], message: str, checkpoint: Path, tmp_path: Path) -> None:
    names = {"MODEL": str(checkpoint), "DIR": str(tmp_path / "dump")}
    text = (FOLDER / "shard.before.ir").read_text()
    result = llmc(*(names.get(a, a) for a in arguments), text=text)
    assert result.exit_code == 2
    assert message in result.output


def test_text_that_is_no_graph_is_named_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"a\.ir: line 2: cannot read 'hello'"):
        read_graphs("graph g rank=0 tp=1 {\nhello\nreturn %x\n}", "a.ir")
    with pytest.raises(UsageError, match=r"a\.ir: returned value %x is not defined"):
        read_graphs("graph g rank=0 tp=1 {\nreturn %x\n}", "a.ir")
