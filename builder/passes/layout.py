"""Where the axes of a traced value lie in the value that stands for it: views that need no operator.

Comes in: requests to emit nodes and to bring values into an order of axes. Goes out: `Lazy`, `Emitter`. Must not know:
what operators compute. A batch axis of size 1 is stored nowhere, a transpose only renumbers axes, an expanded axis
stays unexpanded until somebody needs its elements. Nodes that compute the same from the same inputs are emitted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc.artifacts.types import Dim, TensorType
from llmc.builder.ir import GraphError, Node
from llmc.builder.operators import ALL
from llmc.builder.primitives.shapes import count


@dataclass(frozen=True)
class Lazy:
    """A traced value of `shape`: its axis i is axis `axes[i]` of the emitted value `name`, or stored nowhere (None).

    An axis whose traced size is not the stored one (1, or nowhere) repeats. Stored axes beyond those have size 1.
    """

    name: str
    shape: tuple[Dim, ...]
    axes: tuple[int | None, ...]

    def stored(self) -> list[int]:
        """The traced axes that are stored, in the order of storage."""
        mapped = [(axis, i) for i, axis in enumerate(self.axes) if axis is not None]
        return [i for _, i in sorted(mapped)]

    def padded(self, rank: int) -> Lazy:
        """The same with axes of size 1 in front, as broadcasting adds them."""
        extra = rank - len(self.shape)
        return Lazy(self.name, (1,) * extra + self.shape, (None,) * extra + self.axes)


#: Operators that leave their first input as it is when the second is this constant.
_NEUTRAL = {"mul": 1.0, "div": 1.0, "pow": 1.0, "add": 0.0, "sub": 0.0}
_COMMUTATIVE = frozenset({"mul", "add"})


class Emitter:
    """The canonical graph under construction. `source` is the traced node whose name and path new nodes take."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.source: Node | None = None
        self._known: dict[tuple[object, ...], str] = {}
        self._producers: dict[str, Node] = {}

    # -- nodes

    def emit(self, op: str, inputs: Sequence[str], stem: str = "", **attrs: Any) -> str:
        """A node whose type follows from the operator's rule; raises GraphError naming the module where it refuses."""
        operator = ALL[op]
        values = operator.attrs(**attrs)
        try:
            (kind,) = operator.infer(values, [self.types[i] for i in inputs])
        except ValueError as error:
            path = self.source.path if self.source else ""
            raise GraphError(f"{op} @{path}: {error}") from error
        return self.add(op, tuple(inputs), values, kind, stem)

    def add(self, op: str, inputs: tuple[str, ...], attrs: Any, kind: TensorType, stem: str = "") -> str:
        """The value of a node: an existing one where that computes the same. Named `stem`, or like the traced node."""
        same = self._neutral(op, inputs, kind)
        if same is not None:
            return same
        key = (op, inputs, attrs, kind)
        if key not in self._known:
            assert self.source is not None
            path = "" if op == "const" else self.source.path
            node = Node(op, inputs, attrs, (self._fresh(stem or self.source.outputs[0]),), (kind,), path)
            self.nodes.append(node)
            self.types[node.out] = kind
            self._producers[node.out] = node
            self._known[key] = node.out
        return self._known[key]

    def _neutral(self, op: str, inputs: tuple[str, ...], kind: TensorType) -> str | None:
        """The input that an operator would return unchanged."""
        if op not in _NEUTRAL:
            return None
        pairs = [inputs, inputs[::-1]] if op in _COMMUTATIVE else [inputs]
        for value, other in pairs:
            node = self._producers[other]
            if node.op == "const" and set(node.attrs.values) == {_NEUTRAL[op]} and self.types[value] == kind:
                return value
        return None

    def _fresh(self, stem: str) -> str:
        name, number = stem, 0
        while name in self.types:
            number += 1
            name = f"{stem}.{number}"
        return name

    def reshape(self, name: str, shape: tuple[Dim, ...], stem: str = "") -> str:
        """The value in another shape; reshapes of reshapes become one."""
        node = self._producers[name]
        while node.op == "reshape":
            node = self._producers[node.inputs[0]]
        return node.out if node.type.shape == shape else self.emit("reshape", [node.out], stem, shape=shape)

    def adjoining(self, names: Sequence[str], axis: int) -> list[str]:
        """Values to be joined, where neighbours that are neighbouring slices of one value are one slice."""
        runs: list[tuple[str, int, int]] = []
        for name in names:
            source, start, stop = self._range(name, axis)
            if runs and runs[-1][0] == source and runs[-1][2] == start:
                runs[-1] = (source, runs[-1][1], stop)
            else:
                runs.append((source, start, stop))
        if len(runs) == len(names):
            return list(names)
        return [
            source if (start, stop) == (0, self.types[source].shape[axis])
            else self.emit("slice", [source], axis=axis, start=start, stop=stop, step=1)
            for source, start, stop in runs
        ]  # fmt: skip

    def _range(self, name: str, axis: int) -> tuple[str, int, int]:
        """The value that a value is entries start:stop of, through slices of slices; itself where it is no slice."""
        size = self.types[name].shape[axis]
        assert isinstance(size, int)
        start = 0
        while (node := self._producers[name]).op == "slice" and node.attrs.axis % node.type.rank == axis:
            if node.attrs.step != 1 and size != 1:
                break
            start = node.attrs.start + start * node.attrs.step
            name = node.inputs[0]
        return name, start, start + size

    # -- lazy values

    def size(self, x: Lazy, i: int) -> Dim:
        """The stored size of traced axis i."""
        axis = x.axes[i]
        return 1 if axis is None else self.types[x.name].shape[axis]

    def align(self, x: Lazy, order: Sequence[int], *, full: bool = True, trim: bool = False) -> str:
        """A value with exactly the traced axes of `order`, in that order. `full`: repeated axes have all elements.
        `trim`: leading axes that are not stored may be left out, as broadcasting puts them back.
        """
        kept = [i for i in order if x.axes[i] is not None]
        axes = [axis for i in kept if (axis := x.axes[i]) is not None]
        loose = [a for a in range(self.types[x.name].rank) if a not in axes]
        name = x.name
        if axes != sorted(axes):
            name = self.emit("transpose", [name], f"{x.name}.transposed", perm=(*loose, *axes))
        if trim:
            order = order[order.index(kept[0]) :] if kept else []
        name = self.reshape(name, tuple(self.size(x, i) for i in order), f"{x.name}.view")
        wanted = tuple(x.shape[i] for i in order)
        if not full or self.types[name].shape == wanted:
            return name
        return self.emit("broadcast", [name], f"{x.name}.wide", shape=wanted)

    def exact(self, x: Lazy) -> str:
        """A value of exactly the traced shape."""
        return self.align(x, range(len(x.shape)))

    def without(self, x: Lazy, i: int) -> Lazy:
        """The value where traced axis i, of size 1, is stored nowhere."""
        axis = x.axes[i]
        assert axis is not None
        shape = self.types[x.name].shape
        name = self.reshape(x.name, (*shape[:axis], *shape[axis + 1 :]), f"{x.name}.view")
        axes = (None if a is None or a == axis else a - (a > axis) for a in x.axes)
        return Lazy(name, x.shape, tuple(axes))

    def whole(self, name: str) -> Lazy:
        """The lazy value that is an emitted value as it stands."""
        shape = self.types[name].shape
        return Lazy(name, shape, tuple(range(len(shape))))

    def laid(self, name: str, shape: tuple[Dim, ...], order: Sequence[int]) -> Lazy:
        """The lazy value of a traced shape that an emitted value with the axes of `order` stands for."""
        return Lazy(name, shape, tuple(order.index(i) if i in order else None for i in range(len(shape))))

    def order(self, inputs: Sequence[Lazy], also: Sequence[int] = ()) -> list[int]:
        """One order for the stored axes of all inputs (of equal rank): that of the input that stores most, where the
        others' axes follow their traced left neighbour; symbols come first.
        """
        leader = max(inputs, key=lambda x: len(x.stored()))
        order = leader.stored()
        for i in sorted({i for x in inputs for i in x.stored()} | set(also)):
            if i not in order:
                left = [order.index(j) for j in order if j < i]
                order.insert(max(left) + 1 if left else 0, i)
        return sorted(order, key=lambda i: not any(isinstance(x.shape[i], str) for x in inputs))

    def view(self, x: Lazy, shape: tuple[Dim, ...]) -> Lazy:
        """The value reshaped: without an operator where only axes of size 1 come and go."""
        old, new = ([i for i, d in enumerate(s) if d != 1] for s in (x.shape, shape))
        if [x.shape[i] for i in old] == [shape[i] for i in new]:
            axes: list[int | None] = [None] * len(shape)
            for i, j in zip(old, new, strict=True):
                axes[j] = x.axes[i]
            for i, j in _paired_ones(x, old, shape, new):
                axes[j] = x.axes[i]
            return Lazy(x.name, shape, tuple(axes))
        in_place = self._regrouped(x, old, shape, new)
        if in_place:
            return in_place
        name = self.align(x, old)  # complete and in traced order: elements follow each other as in the trace
        return self.laid(self.reshape(name, tuple(shape[i] for i in new)), shape, new)

    def _regrouped(self, x: Lazy, old: list[int], shape: tuple[Dim, ...], new: list[int]) -> Lazy | None:
        """The reshape on the value as it is stored, where every group of axes that merges or splits lies together."""
        if any(self.size(x, i) != x.shape[i] for i in old):
            return None
        groups = _groups([x.shape[i] for i in old], [shape[i] for i in new])
        stored: list[tuple[int, list[int]]] = []
        for before, after in groups:
            axes = [x.axes[old[i]] for i in before]
            first = axes[0]
            if first is None or axes != list(range(first, first + len(axes))):
                return None
            stored.append((first, [new[j] for j in after]))
        order = [j for _, group in sorted(stored) for j in group]
        return self.laid(self.reshape(x.name, tuple(shape[j] for j in order)), shape, order)


def _paired_ones(x: Lazy, old: list[int], shape: tuple[Dim, ...], new: list[int]) -> list[tuple[int, int]]:
    """Stored axes of size 1 and the new axes of size 1 in the same gap between larger axes, paired from the right."""
    pairs = []
    for low, high, low_new, high_new in zip(
        [-1, *old], [*old, len(x.shape)], [-1, *new], [*new, len(shape)], strict=True
    ):
        ones = [i for i in range(low + 1, high) if x.axes[i] is not None]
        pairs += list(zip(reversed(ones), reversed(range(low_new + 1, high_new)), strict=False))
    return pairs


def _groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions that hold as many elements before and after, as index lists."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [i], [j]
        i, j = i + 1, j + 1
        while (a := count([old[k] for k in left])) != (b := count([new[k] for k in right])):
            if i < len(old) and (j >= len(new) or a[0] < b[0] or (a[0] == b[0] and a[1] < b[1])):
                left.append(i)
                i += 1
            elif j < len(new):
                right.append(j)
                j += 1
            else:
                break
        groups.append((left, right))
    return groups
