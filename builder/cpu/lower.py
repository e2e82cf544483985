"""From fused graphs to programs: kernel calls bound to memory, weights placed, activations planned.

Comes in: one graph per rank of plug-in operators and views, a shape profile, a target. Goes out: `CpuLowered`. Reads no
weights and compiles nothing, so that the memory arithmetic of `--dry-run` is this and nothing else. Must not know: C++,
single operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import KVLayer, ShapeProfile, TokenRange
from llmc.builder.alias import Alias, resolve, width
from llmc.builder.arena import Arena, Life, aligned, plan_memory
from llmc.builder.cpu.program import CpuLowered, CpuRank, Launch, Place, RangeProgram
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.lowered import columns_of
from llmc.builder.passes.views import SILENT
from llmc.builder.slots import state_table
from llmc.builder.weights.placement import Stored, offsets, place, stored_form
from llmc.plugins import cpu_launch
from llmc.plugins.all_reduce.cpu import comm_bytes, slot_bytes
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Scratch
from llmc.plugins.cpu.recurrent import state_bytes
from llmc.plugins.latent_attention.cpu import layer_bytes as latent_bytes
from llmc.plugins.paged_attention.cpu import layer_bytes
from llmc.profiles import CpuTarget


def lower(
    graphs: Sequence[Graph],
    profile: ShapeProfile,
    target: CpuTarget,
    kv_dtype: str,
    vocab: Sequence[tuple[int, int]],
) -> CpuLowered:
    """`vocab`: (first column, columns) of each rank's logits. Raises UnsupportedError, with the module, for what the
    kernels of the target cannot do.
    """
    ranks = [_Rank(graph, profile, kv_dtype, target.tiles) for graph in graphs]
    members, shared = place([rank.stored() for rank in ranks])
    cols = max(rank.reduced_cols for rank in ranks)
    slots = slot_bytes(profile.max_num_batched_tokens, cols) if len(ranks) > 1 else 0
    written, vocab_size = columns_of(vocab)
    programs = []
    for rank, member, columns in zip(ranks, members, written, strict=True):
        places = offsets(member, shared)
        ranges = tuple(rank.bind(i, places, columns, vocab_size) for i in range(len(profile.token_ranges)))
        programs.append(
            CpuRank(
                graph=rank.graph,
                weights=member,
                kv_layers=rank.kv_layers,
                kv_block_bytes=rank.kv_block_bytes,
                state_layers=tuple(rank.states.values()),
                state_slot_bytes=rank.state_slot_bytes,
                vocab=columns,
                ranges=ranges,
                constants=rank.constants,
                needs=rank.scratch,
            )
        )
    comm = comm_bytes(profile.max_num_batched_tokens, cols, len(ranks))
    return CpuLowered(tuple(programs), shared, comm, vocab_size, profile, target, kv_dtype, slots)


def kv_table(graph: Graph, block_size: int, kv_dtype: str) -> tuple[tuple[KVLayer, ...], int]:
    """Each attention layer's part of a block, in the order of layers, and the bytes of a block."""
    attention = {n.attrs.layer: n for n in graph if n.op in ("paged_attention", "latent_attention")}
    layers, offset = [], 0
    for layer, node in sorted(attention.items()):
        a = node.attrs
        try:
            if node.op == "latent_attention":
                nbytes = latent_bytes(a.latent, a.rope, block_size, kv_dtype)
                layers.append(KVLayer(layer, 1, a.latent + a.rope, kv_dtype, offset, nbytes, latent=a.latent))
            else:
                nbytes = layer_bytes(a.kv_heads, a.head_dim, a.value_dim, block_size, kv_dtype)
                layers.append(KVLayer(layer, a.kv_heads, a.head_dim, kv_dtype, offset, nbytes, a.window))
        except ValueError as error:
            raise UnsupportedError(f"{node.op} @{node.path}: {error}") from error
        offset += aligned(nbytes)
    return tuple(layers), offset


@dataclass(frozen=True)
class _Bound:
    """A node that is launched, with its call."""

    node: Node
    call: CpuCall


class _Rank:
    """One rank's graph while it is lowered: calls first (they say how weights are stored), then memory."""

    def __init__(self, graph: Graph, profile: ShapeProfile, kv_dtype: str, tiles: bool) -> None:
        self.graph, self.profile, self.tiles = graph, profile, tiles
        self.types = graph.types()
        self.producers = graph.producers()
        self.aliases = resolve(graph)
        self.kv_layers, self.kv_block_bytes = kv_table(graph, profile.block_size, kv_dtype)
        self.states, self.state_slot_bytes = state_table(graph, state_bytes)
        self.constants = tuple(node for node in graph if node.op == "const")
        self.calls = [self._calls(tokens, kv_dtype) for tokens in profile.token_ranges]
        self._check_packing()
        self.forms = [[self._form(b.node, i, b.call) for i in range(len(b.node.inputs))] for b in self.calls[0]]

    # ---- kernel calls

    def rows(self, tokens: TokenRange) -> int:
        """The most rows that a step of this range wants logits of."""
        return min(tokens.max, self.profile.max_num_seqs)

    def _calls(self, tokens: TokenRange, kv_dtype: str) -> list[_Bound]:
        env = KernelEnv(
            tokens=(tokens.min, tokens.max),
            rows=(0, self.rows(tokens)),
            tp=self.graph.tp,
            block_size=self.profile.block_size,
            kv_dtype=kv_dtype,
            kv_block_bytes=self.kv_block_bytes,
            kv_offsets={layer.layer: layer.offset for layer in self.kv_layers},
            max_sequences=self.profile.max_num_seqs,
            max_context=self.profile.max_seq_len,
            slot_bytes=self.state_slot_bytes,
            state_offsets={number: layer.offset for number, layer in self.states.items()},
            tiles=self.tiles,
        )
        return [_Bound(node, self._call(node, env)) for node in self.graph if node.op not in SILENT]

    def _call(self, node: Node, env: KernelEnv) -> CpuCall:
        inputs = [self.types[name] for name in node.inputs]
        try:
            call = cpu_launch(node.op)(node.attrs, inputs, node.types, env)
        except (UnsupportedError, ValueError) as error:
            raise UnsupportedError(f"{node.op} @{node.path}: {error}") from error
        for index, name in enumerate(node.inputs):
            if self.aliases[name].stride != width(self.types[name]) and Pointer("in", index) not in call.strided:
                raise GraphError(f"{node.op} @{node.path}: cannot read %{name}, whose rows do not lie side by side")
        return call

    @property
    def scratch(self) -> Scratch:
        """What the neediest launch of any range needs."""
        every = [bound.call.scratch for calls in self.calls for bound in calls]
        return Scratch(max((s.shared for s in every), default=0), max((s.per_thread for s in every), default=0))

    @property
    def reduced_cols(self) -> int:
        """Columns of the widest all-reduce, as floats a token."""
        return max((bound.call.sums_ranks for calls in self.calls for bound in calls), default=0) // 4

    # ---- weights

    def _form(self, node: Node, index: int, call: CpuCall) -> Stored | None:
        """How input `index` is stored; None where it is no parameter."""
        name = node.inputs[index]
        root = self.producers[self.aliases[name].root]
        packing = call.packing.get(index)
        if root.op != "param":
            if packing is not None:
                raise UnsupportedError(
                    f"{node.op} @{node.path}: its weight is computed at run time, and kernels of the cpu target read "
                    "weights that were packed when the plan was built"
                )
            return None
        if packing is not None and self.types[name] != root.type:
            raise GraphError(f"{node.op} @{node.path}: a view of the parameter %{root.out} cannot be packed")
        return stored_form(root.attrs.recipe, root.type, packing, node.path)

    def _check_packing(self) -> None:
        """The same bytes serve every range."""
        for bounds in zip(*self.calls, strict=True):
            if any(b.call.packing != bounds[0].call.packing for b in bounds):
                raise GraphError(f"{bounds[0].node.op} @{bounds[0].node.path}: token ranges store weights differently")

    def stored(self) -> list[Stored]:
        """Every stored form that the kernels read, in the order of their reading."""
        return [form for forms in self.forms for form in forms if form is not None]

    # ---- memory

    def bind(
        self, number: int, weights: Mapping[str, tuple[str, int]], columns: tuple[int, int], vocab_size: int
    ) -> RangeProgram:
        """The launches of token range `number` with every value's place."""
        tokens, calls = self.profile.token_ranges[number], self.calls[number]
        direct = self._direct_output(calls, columns, vocab_size)
        arena = self._arena(tokens, calls, direct)
        launches = []
        for bound, forms in zip(calls, self.forms, strict=True):
            inputs = tuple(
                self._place(self.aliases[name], arena, weights[form.recipe] if form else None)
                for name, form in zip(bound.node.inputs, forms, strict=True)
            )
            logits = Place("logits", 4 * columns[0], vocab_size)
            outputs = tuple(
                logits if name == direct else self._place(self.aliases[name], arena) for name in bound.node.outputs
            )
            launches.append(Launch(bound.node, bound.call, inputs, outputs))
        return RangeProgram(tokens, self.rows(tokens), tuple(launches), arena.nbytes)

    def _place(self, alias: Alias, arena: Arena, stored: tuple[str, int] | None = None) -> Place:
        node = self.producers[alias.root]
        if stored is not None:
            space, start = stored
        elif node.op == "input":
            space, start = node.attrs.name, 0
        elif node.op == "const":
            if alias.offset:
                raise GraphError(f"const %{alias.root}: a part of a constant has no place")
            space, start = "const", self.constants.index(node)
        else:
            space, start = "arena", arena.offsets[alias.root]
        return Place(space, start + alias.offset, alias.stride)

    def _direct_output(self, calls: Sequence[_Bound], columns: tuple[int, int], vocab_size: int) -> str | None:
        """The value that is written straight into the step's logits; None where another rank writes them."""
        if len(self.graph.outputs) != 1:
            raise GraphError(f"the graph returns {len(self.graph.outputs)} values, not the logits")
        name = self.graph.outputs[0]
        alias, kind = self.aliases[name], self.types[name]
        made = [b for b in calls if alias.root in b.node.outputs]
        if not made or kind.dtype != "f32" or self.types[alias.root].shape != kind.shape or alias.offset:
            raise GraphError(f"the returned value %{name} is a view or no f32 result of a kernel")
        if any(alias.root == self.aliases[n].root for b in calls for n in b.node.inputs):
            raise GraphError(f"the returned value %{name} is also an input of a kernel")
        if not columns[1]:
            return None
        node, call = made[0].node, made[0].call
        if columns[1] != vocab_size and Pointer("out", node.outputs.index(alias.root)) not in call.strided:
            raise UnsupportedError(
                f"{node.op} @{node.path}: makes this rank's columns of the logits and cannot write them apart from the "
                "other ranks'; only tp 1 works"
            )
        return alias.root

    def _arena(self, tokens: TokenRange, calls: Sequence[_Bound], direct: str | None) -> Arena:
        """Offsets for all results, at the range's largest T and S."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, node in enumerate(b.node for b in calls):
            for name in node.outputs:
                first[name] = last[name] = index
            for name in node.inputs:
                last[self.aliases[name].root] = index
        sizes = {"T": tokens.max, "S": self.rows(tokens)}
        return plan_memory(
            Life(name, self.types[name].nbytes(**sizes), index, last[name])
            for name, index in first.items()
            if name != direct
        )
