"""The page of a plan: complete, self-contained, and its figures those of the plan; costs by hand; diffs of stages."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan
from llmc.artifacts.types import TensorType
from llmc.builder.build import BuildOptions, Progress, compile_plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.dump import DumpFolder
from llmc.builder.page.arena import blocks
from llmc.builder.page.costs import Cost, Step, launch_costs
from llmc.builder.page.render import lower_plan, render
from llmc.builder.page.stages import read_stages
from llmc.builder.verdict import Verdict
from llmc.cli import main
from tests.models import save_checkpoint

torch.set_num_threads(1)
#: Elements that HTML never closes.
VOID = {"meta", "br", "img", "hr", "input", "link"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A tiny model at bf16 on two ranks, and its dump."""
    folder = tmp_path_factory.mktemp("page")
    checkpoint = open_checkpoint(save_checkpoint(folder / "<tiny>"))
    dump = folder / "dump"
    compile_plan(
        checkpoint,
        BuildOptions(precision="bf16", tp=2),
        None,
        folder / "tiny.plan",
        Progress(),
        lambda path: Verdict({"quality.json": b'{"perplexity": 11.25, "gate": {"kl": 0.5, "windows": [1, 2]}}'}, {}),
        DumpFolder(dump),
    )
    return Plan.open(folder / "tiny.plan"), dump


class Reader(HTMLParser):
    """Checks that elements nest, and remembers text and what could reach outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(str(value))
            elif name in ("href", "src", "srcset", "action", "data", "xlink:href"):
                self.links.add(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_the_page_needs_nothing_beside_itself(built: tuple[Plan, Path]) -> None:
    page = render(*built)
    reader = read(page)
    assert reader.links == {f"#{name}" for name in reader.ids}, (
        "every link leads to a section, and every section is linked"
    )
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed"}
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"@import|url\(|https?:", style)
    assert "<tiny>" not in page
    assert f"<h1>{html.escape(built[0].manifest.model.name)}</h1>" in page


def test_the_page_says_what_the_plan_says(built: tuple[Plan, Path]) -> None:
    plan, dump = built
    m = plan.manifest
    text = " ".join(" ".join(read(render(plan, dump)).words).split())
    for report in m.build.passes:
        assert report.name in text
    for section in m.sections:
        assert f"{section.name} {section.size:,}" in text
    assert f"{m.build.launches_eager} → {m.ranks[0].launches} launches a step" in text
    assert f"{m.build.launches_eager_per_layer:.1f} → {m.ranks[0].launches_per_layer:.1f} launches a layer" in text
    assert f"All {m.ranks[1].launches} launches" in text
    assert "perplexity 11.25" in text
    assert "gate: kl 0.5 gate: windows 2 entries" in text
    assert "model.layers.1.mlp.down_proj.weight bf16[" in text
    assert plan.digest in text


def test_errors_of_rounded_tensors_stand_beside_them(built: tuple[Plan, Path]) -> None:
    rows = re.findall(
        r"<code>bf16\[[^<]*</code></td><td class=\"n\">[\d,]+</td>\s*<td class=\"n\">([^<]*)</td>", render(built[0])
    )
    assert len(rows) > 8
    for row in rows:
        assert 0.1 < float(row.removesuffix(" %")) < 0.25  # bf16 keeps 8 bits


def test_arenas_hold_all_values_and_none_in_the_way_of_another(built: tuple[Plan, Path]) -> None:
    for program in lower_plan(built[0]).programs:
        for span in program.ranges:
            values = blocks(program, span)
            assert max(v.offset + v.nbytes for v in values) <= span.arena_bytes
            assert sum(len(launch.outputs) for launch in span.launches) - 1 == len(values)  # the logits lie elsewhere
            for i, one in enumerate(values):
                for two in values[:i]:
                    apart = one.offset >= two.offset + two.nbytes or two.offset >= one.offset + one.nbytes
                    assert apart or one.first > two.last or two.first > one.last, (one, two)


def test_costs_are_those_of_the_shapes(built: tuple[Plan, Path]) -> None:
    program = lower_plan(built[0]).programs[0]
    launches = program.ranges[-1].launches
    step = Step(tokens=10, rows=1, context=10)
    found = zip(launches, launch_costs(program, launches, step), strict=True)
    costs = {(launch.node.op, launch.node.path): cost for launch, cost in found}
    down = costs["linear", "model.layers.0.mlp.down_proj"]
    assert down == Cost(weights=72 * 64 * 2, activations=10 * (64 + 72) * 4, kv=0, flops=2 * 10 * 72 * 64)
    head = costs["linear", "lm_head"]
    assert head.flops == 2 * 1 * 72 * program.vocab[1]
    attention = costs["paged_attention", "model.layers.0.self_attn"]
    assert attention.kv == 10 * 2 * 2 * 8 * 2  # two of three KV heads of 8 in bf16, keys and values
    assert attention.flops == 4 * (10 * 11 // 2) * 6 * 8
    assert costs["rope_cache", "model.layers.0.self_attn"].kv == attention.kv
    assert costs["embedding", "model.embed_tokens"].weights == 10 * 72 * 2
    assert Step(1, 1, 100).attended(None) == 100
    assert Step(4, 1, 10).attended(8) == 7 + 8 + 8 + 8
    three = Step(tokens=3, rows=3, context=10, sequences=3)
    assert three.attended(None) == 3 * 10
    batch = {(a.node.op, a.node.path): c for a, c in zip(launches, launch_costs(program, launches, three), strict=True)}
    assert batch["paged_attention", "model.layers.0.self_attn"].kv == 3 * attention.kv
    assert batch["linear", "lm_head"].flops == 3 * head.flops


def test_stages_show_what_came_and_went(built: tuple[Plan, Path]) -> None:
    plan, dump = built
    stages, layer = read_stages(dump, [p.graph for p in lower_plan(plan).programs])
    assert layer == 0
    shown = {stage.label.partition("-")[2]: stage for stage in stages}
    merge = shown["merge_qkv"]
    gone = [text for mark, text in merge.lines if mark == "-"]
    assert sum("_proj" in text for text in gone) == 3
    assert merge.notes[0].startswith(f"{merge.label}: matched 2 of 2")
    assert (shown["check_lowerable"].added, shown["check_lowerable"].removed) == (0, 0)
    assert not any("layers.1." in text for stage in stages for _, text in stage.lines)


def test_a_dump_of_another_build_is_refused(built: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, dump = built
    with pytest.raises(UsageError, match="holds no dump"):
        render(plan, tmp_path)
    last = sorted(dump.glob("*.rank0.ir"))[-1]
    (tmp_path / last.name).write_text(last.read_text().replace("eps=1e-06", "eps=1e-05"))
    with pytest.raises(UsageError, match="it is of another build"):
        render(plan, tmp_path)
    (tmp_path / last.name).write_text("graph")
    with pytest.raises(UsageError, match="a graph starts with"):
        render(plan, tmp_path)


def test_the_command_writes_it(built: tuple[Plan, Path], tmp_path: Path) -> None:
    def inspect(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["inspect", str(built[0].path), *map(str, arguments)])

    assert inspect("--html", tmp_path / "a.html").exit_code == 0
    assert (tmp_path / "a.html").read_text() == render(built[0])
    assert "exclude one another" in inspect("--html", tmp_path / "a.html", "--json").output
    assert "needs --html" in inspect("--dump", tmp_path).output


def test_two_4_bit_numbers_are_a_byte() -> None:
    step = Step(1, 1, 1)
    assert step.nbytes(TensorType("u4", (3, 5))) == 8
    assert step.nbytes(TensorType("f16", (3, 5))) == 30
