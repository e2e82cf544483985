"""The text of graphs: what is printed is read back, and every broken rule is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, GraphError, Node, parse_graph
from llmc.builder.operators import ALL, attrs_of

_KINDS = st.lists(st.sampled_from(["T", 1, 2, 7]), min_size=1, max_size=3, unique=True).map(
    lambda dims: TensorType("f32", tuple(dims))
)
_TEXT = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Small valid graphs over inputs, weights, constants and a few operators with attributes of every sort."""
    kind = draw(_KINDS)
    nodes = [
        Node("input", (), attrs_of("input")(name=draw(_TEXT)), ("x",), (kind,)),
        Node("param", (), attrs_of("param")(recipe=draw(_TEXT)), ("w.weight",), (kind,), "model.layers.0"),
        Node("const", (), attrs_of("const")((draw(st.floats(allow_nan=False)),)), ("c",),
             (TensorType("f32", ()),)),
    ]  # fmt: skip
    same = ["x", "w.weight"]
    for index in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from(["add", "mul", "silu", "transpose", "reduce", "slice"]))
        source = draw(st.sampled_from(same))
        if op in ("add", "mul"):
            inputs, attrs = (source, draw(st.sampled_from([*same, "c"]))), ALL[op].attrs()
        elif op == "silu":
            inputs, attrs = (source,), ALL[op].attrs()
        elif op == "transpose":
            inputs, attrs = (source,), ALL[op].attrs(tuple(draw(st.permutations(range(kind.rank)))))
        else:
            axis = next((i for i, d in enumerate(kind.shape) if d != "T"), None)
            if axis is None:
                continue
            keep = draw(st.booleans())
            attrs = ALL[op].attrs("sum", axis, keep) if op == "reduce" else ALL[op].attrs(axis, 0, 1)
            inputs = (source,)
        out = f"v{index}"
        (result,) = ALL[op].infer(
            attrs,
            [dict(zip(["x", "w.weight", "c"], [n.type for n in nodes[:3]], strict=True)).get(i, kind) for i in inputs],
        )
        nodes.append(Node(op, inputs, attrs, (out,), (result,), draw(st.sampled_from(["", "model.layers.3.mlp"]))))
        if result == kind:
            same.append(out)
    return Graph(draw(st.sampled_from(["g", "smollm2"])), tuple(nodes), (nodes[-1].out,), draw(st.integers(0, 3)), 4)


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_text_reads_back_as_the_same_graph(graph: Graph) -> None:
    graph.validate(ALL)
    again = parse_graph(str(graph), attrs_of)
    assert again == graph
    assert str(again) == str(graph)


def test_several_outputs() -> None:
    text = """graph g rank=1 tp=2 {
  %x: f32[T,4] = input() {name='x'}
  %w: f32[4] = param() {recipe="load('w')"}
  %s, %y: f32[T,4], f32[T,4] = rms_norm(%x, %w, %x) {eps=1e-05, residual=True, quantize=None} @model.norm
  return %s, %y
}
"""
    graph = parse_graph(text, attrs_of)
    graph.validate(ALL)
    assert str(graph) == text
    assert graph.producers()["y"].path == "model.norm"
    assert [node.op for node in graph.users()["x"]] == ["rms_norm"]


def test_infinity_is_written_as_a_number_and_strings_as_they_are() -> None:
    values = Node(
        "const", (), attrs_of("const")((float("inf"), -float("inf"), 1.0)), ("c",), (TensorType("f32", (3,)),)
    )
    attrs = attrs_of("rowwise")(steps=("an inf step",), results=("inf",))
    rows = Node("rowwise", ("c",), attrs, ("r",), (TensorType("f32", (3,)),))
    graph = Graph("g", (values, rows), ("r",))
    assert "values=(1e999, -1e999, 1.0)" in str(graph)
    assert "steps=('an inf step',), results=('inf',)" in str(graph)
    assert parse_graph(str(graph), attrs_of) == graph


HEAD = "graph g rank=0 tp=1 {\n  %x: f32[T,4] = input() {name='x'}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph g {\n}", "line 1: a graph starts with"),
        (HEAD + "}", "returns nothing"),
        (HEAD + "  %y = silu(%x)\n  return %y\n}", r"line 3: cannot read"),
        (HEAD + "  %y: f32[T,4] = frobnicate(%x)\n  return %y\n}", "line 3: no operator is named 'frobnicate'"),
        (HEAD + "  %y: f32[T,4] = reduce(%x) {kindd='sum'}\n  return %y\n}", "line 3: .*kindd"),
        (HEAD + "  %y: f99[T,4] = silu(%x)\n  return %y\n}", "line 3: dtype 'f99'"),
    ],
)
def test_text_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_graph(text, attrs_of)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%y: f32[T,4] = silu(%z) @a.b", r"silu %y @a\.b: input %z is not defined before it"),
        ("%x: f32[T,4] = silu(%x)", "silu %x: %x is defined twice"),
        ("%y: f32[T,5] = silu(%x) @m", r"silu %y @m: declared f32\[T,5\], rule gives f32\[T,4\]"),
        ("%y: f32[4] = reduce(%x) {kind='sum', axis=0, keepdim=False}", "mix tokens"),
    ],
)
def test_graph_that_breaks_a_rule(line: str, message: str) -> None:
    graph = parse_graph(f"{HEAD}  {line}\n  return %x\n}}", attrs_of)
    with pytest.raises(GraphError, match=message):
        graph.validate(ALL)


def test_returned_value_must_exist() -> None:
    with pytest.raises(GraphError, match="returned value %y is not defined"):
        parse_graph(HEAD + "  return %y\n}", attrs_of).validate(ALL)
