"""Gives every argument of a launch its place: the memory plan of a GPU's programs.

Comes in: a graph's launches, in which dtype each value is stored, where weights stand. Goes out: `StepCode`. Must not
know: plug-ins, how launches were chosen, Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmc.artifacts.cuda_program import Address, AllReduce, Argument, Float, Int, Product, Symbol
from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.alias import Alias, width
from llmc.builder.arena import ALIGN, Arena, Life, aligned, plan_memory
from llmc.builder.cuda.program import BoundCall, BoundReduce, NodeCalls, StepCode
from llmc.builder.cuda.variant import ALIGNMENT, variant
from llmc.builder.ir import Graph, GraphError, Node
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, Collective, CudaCall, Pool, Space, States, StepArray, Temporary
from llmc.plugins.cuda.call import Symbol as StepSymbol
from llmc.plugins.sampler.cuda import launch as sampler_launch
from llmc.plugins.sampler.cuda import scratch_bytes

#: The largest grid: x, y, z (CUDA C++ Programming Guide, technical specifications).
_LARGEST_GRID = (2**31 - 1, 65535, 65535)
#: What the choice of tokens stands for in lists of launches: it is no operator of the graph.
_SAMPLER = Node("sampler", (), None, (), ())


@dataclass(frozen=True)
class Form:
    """Where a weight stands, and what it is there."""

    space: str
    offset: int
    kind: TensorType


@dataclass(frozen=True)
class _Value:
    """An input or output of a launch: its place, the dtype there, elements from row to row, bytes that belong to it."""

    address: Address
    dtype: str
    stride: int
    nbytes: int


class Binder:
    """Of one rank. `dtypes`: in which dtype each value lies; `kv_offsets` and `state_offsets`: see cache_layout."""

    def __init__(
        self,
        graph: Graph,
        aliases: Mapping[str, Alias],
        dtypes: Mapping[str, str],
        sm: int,
        profile: ShapeProfile,
        kv_offsets: Mapping[int, int],
        state_offsets: Mapping[int, int],
    ) -> None:
        self.graph, self.aliases, self.dtypes, self.sm, self.profile = graph, aliases, dtypes, sm, profile
        self.types, self.producers = graph.types(), graph.producers()
        self.kv_offsets, self.state_offsets = kv_offsets, state_offsets
        self.constants, self._constant_offsets = _constants(graph)

    def bind(
        self,
        decode: bool,
        least: int,
        most: int,
        rows: int,
        calls: Sequence[NodeCalls],
        forms: Sequence[Sequence[Form | None]],
        direct: str | None,
    ) -> StepCode:
        """The launches of one kind of steps; `direct` is the value that is written as the step's logits."""
        sizes = {"T": most, "S": rows, "num_seqs": min(most, self.profile.max_num_seqs)}
        symbols = {**sizes, "max_context": self.profile.max_seq_len}
        arena = self._plan(calls, symbols, direct)
        step = _Step(self, arena, symbols, direct)
        launches: list[BoundCall | BoundReduce] = []
        for number, (bound, given) in enumerate(zip(calls, forms, strict=True)):
            launches += step.launches(number, bound, given)
        values = {
            name: (Address("logits") if name == direct else Address("arena", arena.offsets[name]), self.dtypes[name])
            for bound in calls
            for name in bound.node.outputs
        }
        return StepCode(decode, least, most, rows, tuple(launches), arena.nbytes, values)

    def bind_sampler(self, steps: StepCode, vocab: int) -> StepCode:
        """The same steps with the choice of tokens behind all else: whole rows of logits are there."""
        call, rows = sampler_launch(vocab), steps.rows
        sizes = {"logits": 4 * vocab * rows, "arena": scratch_bytes(vocab, rows), "tokens": 4 * rows}
        compiled = variant(call, self.sm, {}, {})
        given = [call.args[name] for name in compiled.arguments]
        args = tuple(Address(arg.name) for arg in given if isinstance(arg, Space | StepArray))
        bound = BoundCall(_SAMPLER, call, compiled, args, tuple(sizes.get(arg.space) for arg in args))
        nbytes = max(steps.arena_bytes, aligned(sizes["arena"]))
        return replace(steps, launches=(*steps.launches, bound), arena_bytes=nbytes)

    def nbytes(self, name: str, symbols: Mapping[str, int]) -> int:
        """Bytes of a value as it is stored."""
        sizes = {dim: symbols[dim] for dim in ("T", "S")}
        return self.types[name].size(**sizes) * NUMPY_DTYPES[self.dtypes[name]].itemsize

    def constant(self, name: str) -> Address:
        """Where a constant stands."""
        return Address("constants", self._constant_offsets[name])

    def _plan(self, calls: Sequence[NodeCalls], symbols: Mapping[str, int], direct: str | None) -> Arena:
        """Offsets of all results and temporaries, at the largest step. What launches of one node share lives as long
        as the node.
        """
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        lives: list[Life] = []
        for number, bound in enumerate(calls):
            for name in bound.node.outputs:
                first[name] = last[name] = number
            for name in bound.node.inputs:
                last[self.aliases[name].root] = number
            lives += [
                Life(_temporary(number, name), nbytes, number, number)
                for name, nbytes in _temporaries(bound, symbols).items()
            ]
        lives += [
            Life(name, self.nbytes(name, symbols), number, last[name])
            for name, number in first.items()
            if name != direct
        ]
        return plan_memory(lives)


class _Step:
    """The places of one kind of steps."""

    def __init__(self, binder: Binder, arena: Arena, symbols: Mapping[str, int], direct: str | None) -> None:
        self.binder, self.arena, self.symbols, self.direct = binder, arena, symbols, direct

    def launches(self, number: int, bound: NodeCalls, forms: Sequence[Form | None]) -> list[BoundCall | BoundReduce]:
        """Those of node `number`."""
        node = bound.node
        values = {Pointer("in", i): self._value(name, forms[i]) for i, name in enumerate(node.inputs)}
        values |= {Pointer("out", i): self._value(name, None) for i, name in enumerate(node.outputs)}
        made: list[BoundCall | BoundReduce] = []
        for call in bound.calls:
            if isinstance(call, Collective):
                made += self._reduce(node, values[Pointer("out", call.output)], call.output)
            else:
                made.append(self._call(number, node, call, values))
        return made

    def _value(self, name: str, form: Form | None) -> _Value:
        binder = self.binder
        alias, kind, dtype = binder.aliases[name], binder.types[name], binder.dtypes[name]
        root = binder.producers[alias.root]
        # An alias counts bytes of the type that the graph gives.
        offset = alias.offset // NUMPY_DTYPES[kind.dtype].itemsize * NUMPY_DTYPES[dtype].itemsize
        if form is not None:
            if form.kind.dtype == "u8":  # 4-bit numbers, two in a byte
                return _Value(Address(form.space, form.offset), dtype, int(form.kind.shape[-1]), form.kind.nbytes())
            return _Value(Address(form.space, form.offset + offset), dtype, alias.stride, form.kind.nbytes() - offset)
        nbytes = binder.nbytes(alias.root, self.symbols) - offset
        if root.op == "input":
            return _Value(Address(root.attrs.name), dtype, alias.stride, nbytes)
        if root.op == "const":
            return _Value(binder.constant(alias.root), dtype, alias.stride, nbytes)
        if alias.root == self.direct:
            return _Value(Address("logits", offset), dtype, alias.stride, nbytes)
        return _Value(Address("arena", self.arena.offsets[alias.root] + offset), dtype, alias.stride, nbytes)

    def _reduce(self, node: Node, value: _Value, output: int) -> list[BoundReduce]:
        if self.binder.graph.tp == 1:
            return []
        if value.dtype not in ("f32", "bf16"):
            raise GraphError(f"{node.op} @{node.path}: {value.dtype} cannot be summed over ranks")
        count = Product(tuple(node.types[output].shape))
        return [BoundReduce(node, AllReduce(value.address, count, value.dtype, _about(node)))]  # type: ignore[arg-type]

    def _call(self, number: int, node: Node, call: CudaCall, values: Mapping[Pointer, _Value]) -> BoundCall:
        self._check(node, call, values)
        compiled = variant(
            call,
            self.binder.sm,
            {pointer: value.dtype for pointer, value in values.items()},
            {RowStride(pointer.side, pointer.index): value.stride for pointer, value in values.items()},
            {pointer for pointer, value in values.items() if value.address.offset % ALIGNMENT},
        )
        given = [self._argument(number, node, call.args[name], values) for name in compiled.arguments]
        return BoundCall(node, call, compiled, tuple(a for a, _ in given), tuple(size for _, size in given))

    def _check(self, node: Node, call: CudaCall, values: Mapping[Pointer, _Value]) -> None:
        """Rows that a launch does not ask the distance of must lie side by side; a grid has its limits."""
        used = set(call.args.values())
        for pointer, value in values.items():
            names = node.inputs if pointer.side == "in" else node.outputs
            beside = value.stride == width(self.binder.types[names[pointer.index]]) or value.dtype == "u4"
            if pointer in used and not beside and RowStride(pointer.side, pointer.index) not in used:
                raise GraphError(
                    f"{node.op} @{node.path}: {call.kernel} cannot read %{names[pointer.index]}, whose rows do not lie "
                    "side by side"
                )
        sizes = [sum(product.value(self.symbols) for product in axis) for axis in call.grid]
        for axis, size, most in zip("xyz", sizes, _LARGEST_GRID, strict=False):
            if size > most:
                raise UnsupportedError(
                    f"{node.op} @{node.path}: {call.kernel} has {size} blocks in {axis}, and a GPU takes {most}: "
                    "choose a profile with fewer tokens or sequences"
                )

    def _argument(
        self, number: int, node: Node, arg: Arg, values: Mapping[Pointer, _Value]
    ) -> tuple[Argument, int | None]:
        """What is passed; for a pointer also the bytes behind it that are its own, as far as the plan limits them."""
        binder = self.binder
        match arg:
            case Pointer():
                return values[arg].address, values[arg].nbytes
            case RowStride(side, index):
                return Int(values[Pointer(side, index)].stride), None
            case StepArray(name) | Space(name):
                return Address(name), None
            case StepSymbol("table_stride"):
                return Int(-(-binder.profile.max_seq_len // binder.profile.block_size)), None
            case StepSymbol(name):
                return Symbol(name), None
            case Pool(layer, offset):
                return Address("kv", binder.kv_offsets[layer] + offset), None
            case States(state):
                return Address("states", binder.state_offsets[state]), None
            case Temporary(name):
                key = _temporary(number, name)
                return Address("arena", self.arena.offsets[key]), _size(arg, self.symbols)
            case float():
                if not math.isfinite(arg):
                    raise GraphError(f"{node.op} @{node.path}: {arg} as an argument of a launch")
                return Float(float(np.float32(arg))), None
        return Int(int(arg)), None


def _about(node: Node) -> str:
    return f"{node.op} @{node.path}"


def _temporary(number: int, name: str) -> str:
    """A name that no value has."""
    return f"{number}:{name}"


def _size(temporary: Temporary, symbols: Mapping[str, int]) -> int:
    elements = sum(product.value(symbols) for product in temporary.elements)
    return elements * NUMPY_DTYPES[temporary.dtype].itemsize


def _temporaries(bound: NodeCalls, symbols: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each temporary of a node's launches."""
    found: dict[str, int] = {}
    for call in bound.calls:
        for arg in call.args.values() if isinstance(call, CudaCall) else ():
            if isinstance(arg, Temporary):
                found[arg.name] = max(found.get(arg.name, 0), _size(arg, symbols))
    return found


def _constants(graph: Graph) -> tuple[bytes, dict[str, int]]:
    """The graph's constants one behind the other, and where each begins."""
    data, starts = bytearray(), {}
    for node in graph:
        if node.op == "const":
            data += bytes(-len(data) % ALIGN)
            starts[node.out] = len(data)
            shape = [int(d) for d in node.type.shape]
            data += np.array(node.attrs.values, NUMPY_DTYPES[node.type.dtype]).reshape(shape).tobytes()
    return bytes(data).ljust(aligned(len(data)), b"\0"), starts
