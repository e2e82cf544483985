"""Small random models as traced graphs: every choice is drawn, every type is valid by construction.

`random_model(pick)` gives a graph of primitives as tracing emits them; `pick(options)` chooses one of a list, simplest
first: hypothesis draws and shrinks with it, `random.Random(seed).choice` gives fixed graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmc.artifacts.types import Dim, TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.operators import ALL

Pick = Callable[[Sequence[Any]], Any]
VOCAB = 40

#: Bounded, so that rounding stays rounding through a chain of them.
_UNARY = ("tanh", "neg", "sigmoid", "silu", "relu", "cos", "abs")


class Maker:
    """Emits nodes; types follow from the operators' rules."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.path = ""

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        values = ALL[op].attrs(**attrs)
        return self._add(op, inputs, values, ALL[op].infer(values, [self.types[name] for name in inputs])[0])

    def _add(self, op: str, inputs: tuple[str, ...], attrs: Any, kind: TensorType, path: str | None = None) -> str:
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, attrs, (name,), (kind,), self.path if path is None else path))
        self.types[name] = kind
        return name

    def input(self, name: str, shape: tuple[Dim, ...]) -> str:
        return self._add("input", (), ALL["input"].attrs(name=name), TensorType("i32", shape), "")

    def weight(self, name: str, *shape: int) -> str:
        recipe = f"load('{self.path}.{name}')"
        return self._add("param", (), ALL["param"].attrs(recipe=recipe), TensorType("f32", shape))

    def const(self, value: float) -> str:
        return self._add("const", (), ALL["const"].attrs(values=(value,)), TensorType("f32", ()))

    def shape(self, value: str) -> tuple[Dim, ...]:
        return self.types[value].shape

    def width(self, value: str) -> int:
        size = self.shape(value)[-1]
        assert isinstance(size, int)
        return size

    def at(self, path: str) -> Maker:
        self.path = path
        return self

    def linear(self, x: str, rows: int, path: str, bias: bool = False) -> str:
        """Over the last axis; the operator takes a matrix."""
        self.at(path)
        *others, columns = self.shape(x)
        flat = x if len(others) == 1 else self.emit("reshape", x, shape=("T", columns))
        weights = [self.weight("weight", rows, self.width(x))] + ([self.weight("bias", rows)] if bias else [])
        y = self.emit("linear", flat, *weights, bias=bias)
        return y if len(others) == 1 else self.emit("reshape", y, shape=(*others, rows))

    def part(self, x: str, start: int, stop: int, step: int = 1) -> str:
        return self.emit("slice", x, axis=len(self.shape(x)) - 1, start=start, stop=stop, step=step)


def random_model(pick: Pick) -> Graph:
    """One to three layers of attention, MLPs, norms and formulas in any arrangement."""
    m = Maker(pick)
    ids, positions, rows = m.input("ids", (1, "T")), m.input("positions", (1, "T")), m.input("rows", ("S",))
    hidden = pick([16, 24, 36])
    x = m.emit("embedding", ids, m.at("embed").weight("weight", VOCAB, hidden))
    blocks = {"mlp": _mlp, "attention": _attention, "formula": _formula, "views": _views}
    style = pick(["pre", "post", "parallel", "bare"])
    for layer in range(pick([1, 2, 3])):
        own = [pick(list(blocks)) for _ in range(pick([1, 2]))]
        normed = x
        for number, block in enumerate(own):
            # No numbers of their own in paths: blocks of one number may be built in any way, and nothing stops for it.
            base = f"layer{layer}.block{number}"
            if style == "pre" or (style == "parallel" and not number):
                normed = _norm(m, x, f"{base}.norm")
            source = normed if style in ("pre", "parallel") else x
            y = blocks[block](m, source, base, layer * 2 + number, positions)
            y = _norm(m, y, f"{base}.norm") if style == "post" else y
            m.at(f"layer{layer}")
            x = m.emit("add", *([x, y] if pick([True, False]) else [y, x]))
    x = _norm(m, x, "norm") if pick([True, False]) else x
    last = m.at("").emit("select_rows", m.emit("reshape", x, shape=("T", hidden)), rows)
    logits = m.linear(last, VOCAB, "head")
    if pick([False, True]):  # a softcap
        cap = m.const(5.0)
        logits = m.emit("mul", m.emit("tanh", m.emit("div", logits, cap)), cap)
    return Graph("random", tuple(m.nodes), (logits,))


def _norm(m: Maker, x: str, path: str) -> str:
    m.at(path)
    kind, width = m.pick(["rms", "layer", "rms_plus_one", "bare"]), m.width(x)
    if kind == "layer":
        return m.emit("layer_norm", x, m.weight("weight", width), m.weight("bias", width), eps=1e-5)
    square = m.emit("pow", x, m.const(2.0)) if m.pick([True, False]) else m.emit("mul", x, x)
    mean = m.emit("reduce", square, kind="mean", axis=-1, keepdim=True)
    normed = m.emit("mul", x, m.emit("rsqrt", m.emit("add", mean, m.const(1e-5))))
    if kind == "bare":
        return normed
    weight = m.weight("weight", width)
    return m.emit("mul", normed, m.emit("add", weight, m.const(1.0)) if kind == "rms_plus_one" else weight)


def _mlp(m: Maker, x: str, base: str, _: int, positions: str) -> str:
    hidden, inner, bias = m.width(x), m.pick([8, 20, 70]), m.pick([False, True])
    kind, act = m.pick(["plain", "gated", "packed"]), m.pick(["silu", "gelu", "relu", "tanh"])
    if kind == "packed":
        both = m.linear(x, 2 * inner, f"{base}.gate_up", bias)
        gate, up = m.at(base).part(both, 0, inner), m.part(both, inner, 2 * inner)
    else:
        gate = m.linear(x, inner, f"{base}.gate", bias)
        up = m.linear(x, inner, f"{base}.up", bias) if kind == "gated" else ""
    y = m.at(base).emit(act, gate)
    if up:
        y = m.emit("mul", y, up) if m.pick([True, False]) else m.emit("mul", up, y)
    return m.linear(y, hidden, f"{base}.down", bias)


def _attention(m: Maker, x: str, base: str, layer: int, positions: str) -> str:
    kv, group, dim = m.pick([1, 2, 3]), m.pick([1, 2]), m.pick([8, 4, 16])
    heads, bias = kv * group, m.pick([False, True])
    hidden, widths = m.width(x), (heads * dim, kv * dim, kv * dim)
    if m.pick([False, True]):
        packed, start, flat = m.linear(x, sum(widths), f"{base}.qkv", bias), 0, []
        for width in widths:
            flat.append(m.at(base).part(packed, start, start + width))
            start += width
    else:
        flat = [m.linear(x, width, f"{base}.{n}", bias) for n, width in zip("qkv", widths, strict=True)]
    m.at(base)
    split = [m.emit("reshape", f, shape=(1, "T", n, dim)) for f, n in zip(flat, (heads, kv, kv), strict=True)]
    if m.pick([False, True]):  # a norm of each head
        for i, name in enumerate(("q_norm", "k_norm")):
            m.at(f"{base}.{name}")
            split[i] = m.emit("rms_norm", split[i], m.weight("weight", dim), eps=1e-6)
    m.at(base)
    q, k, v = (m.emit("transpose", s, perm=(0, 2, 1, 3)) for s in split)
    style, rotary = m.pick(["none", "half", "interleaved"]), m.pick([dim, dim // 2])
    if style != "none":
        cos, sin = _tables(m, positions, rotary, style)
        q, k = (_rotated(m, value, cos, sin, rotary, style) for value in (q, k))
    window, softcap = m.pick([None, 4]), m.pick([None, 3.0])
    made = m.emit("attention", q, k, v, layer=layer, kv_heads=kv, head_dim=dim, v_dim=dim, scale=dim**-0.5,
                  window=window, softcap=softcap)  # fmt: skip
    return m.linear(m.emit("reshape", made, shape=(1, "T", heads * dim)), hidden, f"{base}.o", bias)


def _tables(m: Maker, positions: str, rotary: int, style: str) -> tuple[str, str]:
    """cos and sin f32[1,1,T,R]."""
    where = m.emit("reshape", m.emit("cast", positions, dtype="f32"), shape=(1, "T", 1))
    angles = m.emit("mul", where, m.weight("frequencies", rotary // 2))
    if style == "half":
        angles = m.emit("concat", angles, angles, axis=2)
    else:
        thin = m.emit("reshape", angles, shape=(1, "T", rotary // 2, 1))
        angles = m.emit("reshape", m.emit("concat", thin, thin, axis=3), shape=(1, "T", rotary))
    cos, sin = (m.emit("reshape", m.emit(f, angles), shape=(1, 1, "T", rotary)) for f in ("cos", "sin"))
    return cos, sin


def _rotated(m: Maker, x: str, cos: str, sin: str, rotary: int, style: str) -> str:
    width, shape = m.width(x), m.shape(x)
    turning = m.part(x, 0, rotary) if rotary < width else x
    if style == "half":
        low, high = m.part(turning, 0, rotary // 2), m.part(turning, rotary // 2, rotary)
        turned = m.emit("concat", m.emit("neg", high), low, axis=3)
    else:
        even, odd = m.part(turning, 0, rotary, 2), m.part(turning, 1, rotary, 2)
        thin = (*shape[:-1], rotary // 2, 1)
        pairs = [m.emit("reshape", part, shape=thin) for part in (m.emit("neg", odd), even)]
        turned = m.emit("reshape", m.emit("concat", *pairs, axis=4), shape=(*shape[:-1], rotary))
    y = m.emit("add", m.emit("mul", turning, cos), m.emit("mul", turned, sin))
    return m.emit("concat", y, m.part(x, rotary, width), axis=3) if rotary < width else y


def _formula(m: Maker, x: str, base: str, _: int, positions: str) -> str:
    """A chain of elementwise functions, of what came before, of weights and of numbers."""
    m.at(base)
    made = [x]
    for _ in range(m.pick([1, 2, 4, 6])):
        value = m.pick(made[::-1])
        step = m.pick(["unary", "add", "mul", "number", "weight", "reduce"])
        if step == "unary":
            made.append(m.emit(m.pick(_UNARY), value))
        elif step in ("add", "mul"):
            made.append(m.emit("tanh", m.emit(step, value, m.pick(made))))
        elif step == "number":
            made.append(m.emit(m.pick(["mul", "add", "maximum", "sub"]), value, m.const(m.pick([0.5, 1.0, -0.25]))))
        elif step == "weight":
            made.append(m.emit(m.pick(["mul", "add"]), value, m.weight(f"w{len(made)}", m.width(x))))
        else:
            peak = m.emit("reduce", value, kind=m.pick(["max", "mean"]), axis=2, keepdim=True)
            made.append(m.emit("sub", value, peak))
    return made[-1]


def _views(m: Maker, x: str, base: str, _: int, positions: str) -> str:
    """The columns in another order and back into place: halves exchanged, or seen as a transposed matrix."""
    m.at(base)
    width = m.width(x)
    if m.pick([True, False]):
        half = width // 2
        return m.emit("concat", m.part(x, half, width), m.emit("neg", m.part(x, 0, half)), axis=2)
    folded = m.emit("reshape", x, shape=(1, "T", 4, width // 4))
    turned = m.emit(m.pick(_UNARY), m.emit("transpose", folded, perm=(0, 1, 3, 2)))
    back = m.emit("transpose", turned, perm=(0, 1, 3, 2)) if m.pick([True, False]) else turned
    return m.emit("reshape", back, shape=(1, "T", width))
