"""From fused graphs to programs for a GPU: launches bound to memory, weights placed, activations planned.

Comes in: one graph per rank of plug-in operators and views, a shape profile, a target. Goes out: `CudaLowered`. Reads
no weights and compiles nothing, so that the memory arithmetic of `--dry-run` is this and nothing else. Must not know:
Triton, single operators.

Every rank has the launches of decode steps, which are replayed as graphs, and of each token range those of steps of
any mixture. The first question to the plug-ins is which inputs they round to bf16 anyway: a value that all its readers
round lies in memory as bf16. The second, which knows that, gives the launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import ShapeProfile
from llmc.builder.alias import Alias, resolve
from llmc.builder.cuda.binding import Binder, Form
from llmc.builder.cuda.cache_layout import kv_table, state_bytes
from llmc.builder.cuda.program import CudaLowered, CudaRank, NodeCalls, StepCode
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.lowered import columns_of
from llmc.builder.passes.views import SILENT
from llmc.builder.slots import state_table
from llmc.builder.weights.placement import Stored, offsets, place, stored_form
from llmc.plugins import cuda_launch
from llmc.plugins.cpu.call import Pointer, Side
from llmc.plugins.cuda.call import Collective, CudaCall, CudaEnv
from llmc.profiles import CudaTarget

#: The dtype of a value that all its readers round.
NARROW = "bf16"
#: A recipe around that of a weight of 4-bit numbers: kernels read two in a byte.
_PACKING = {"u4": "nibbles({})"}
#: Memory that ranks share: the identity of their NCCL communicator, 128 bytes behind 8 that say it is there.
COMM_BYTES = 136


@dataclass(frozen=True)
class _Kind:
    """Steps that are compiled for: see `StepCode`."""

    decode: bool
    least: int
    most: int
    rows: int


def lower(
    graphs: Sequence[Graph],
    profile: ShapeProfile,
    target: CudaTarget,
    kv_dtype: str,
    vocab: Sequence[tuple[int, int]],
) -> CudaLowered:
    """`vocab`: (first column, columns) of each rank's logits. Raises UnsupportedError, with operator and module, for
    what the target has no kernel for.
    """
    ranks = [_Rank(graph, profile, target, kv_dtype) for graph in graphs]
    members, shared = place([rank.stored() for rank in ranks])
    written, vocab_size = columns_of(vocab)
    programs = []
    for rank, member, columns in zip(ranks, members, written, strict=True):
        places = offsets(member, shared)
        steps = rank.bind(places, bool(columns[1]))
        programs.append(
            CudaRank(
                graph=rank.graph,
                weights=member,
                kv_layers=rank.kv_layers,
                kv_block_bytes=rank.kv_block_bytes,
                state_layers=tuple(rank.states.values()),
                state_slot_bytes=rank.slot_bytes,
                vocab=columns,
                steps=steps,
                constants=rank.binder.constants,
            )
        )
    comm = COMM_BYTES if len(ranks) > 1 else 0
    return CudaLowered(tuple(programs), shared, comm, vocab_size, profile, target, kv_dtype)


def _kinds(profile: ShapeProfile) -> list[_Kind]:
    """Decode steps, then a kind for each token range."""
    seqs = profile.max_num_seqs
    ranges = [_Kind(False, r.min, r.max, min(r.max, seqs)) for r in profile.token_ranges]
    return [_Kind(True, 1, seqs, seqs), *ranges]


class _Rank:
    """One rank's graph while it is lowered: calls first (they say how values are stored), then memory."""

    def __init__(self, graph: Graph, profile: ShapeProfile, target: CudaTarget, kv_dtype: str) -> None:
        self.graph, self.profile, self.target = graph, profile, target
        self.types, self.producers = graph.types(), graph.producers()
        self.aliases = resolve(graph)
        self.kv_layers, self.kv_block_bytes = kv_table(graph, profile.block_size, kv_dtype, target)
        self.states, self.slot_bytes = state_table(graph, state_bytes)
        self.env = CudaEnv(
            sm=target.sm,
            tokens=(1, 1),
            decode=False,
            rank=graph.rank,
            tp=graph.tp,
            block_size=profile.block_size,
            kv_dtype=kv_dtype,
            kv_block_bytes=self.kv_block_bytes,
            max_sequences=profile.max_num_seqs,
            max_context=profile.max_seq_len,
            slot_bytes=self.slot_bytes,
        )
        self.kinds = _kinds(profile)
        self.dtypes = {name: kind.dtype for name, kind in self.types.items()}
        wide = [self._calls(kind) for kind in self.kinds]
        self.dtypes |= dict.fromkeys(self._narrow(wide), NARROW)
        self.calls = [self._calls(kind) for kind in self.kinds]
        self.forms = [[self._form(b.node, i) for i in range(len(b.node.inputs))] for b in self.calls[0]]
        self.binder = Binder(
            graph, self.aliases, self.dtypes, target.sm, profile, {k.layer: k.offset for k in self.kv_layers},
            {number: layer.offset for number, layer in self.states.items()},
        )  # fmt: skip

    # ---- launches

    def _calls(self, kind: _Kind) -> list[NodeCalls]:
        env = replace(self.env, tokens=(kind.least, kind.most), decode=kind.decode)
        return [NodeCalls(node, self._launch(node, env)) for node in self.graph if node.op not in SILENT]

    def _launch(self, node: Node, env: CudaEnv) -> tuple[CudaCall | Collective, ...]:
        launch = cuda_launch(node.op)
        if launch is None:
            raise UnsupportedError(f"{node.op} @{node.path}: {self.target} has no kernel for it; --target cpu has")
        kinds = {self.types[name].dtype for name in (*node.inputs, *node.outputs)}
        if "f8e4m3" in kinds and not self.target.fp8:
            raise UnsupportedError(
                f"{node.op} @{node.path}: {self.target} has no FP8; choose weights and an output head of another kind, "
                "or a target from sm_89 on"
            )
        sides: tuple[tuple[Side, tuple[str, ...]], ...] = (("in", node.inputs), ("out", node.outputs))
        stored = {
            (side, index): self.dtypes[name]
            for side, names in sides
            for index, name in enumerate(names)
            if self.dtypes[name] != self.types[name].dtype
        }
        env = replace(env, stored=stored, tactics=self.target.tactics.get(node.op, {}))
        inputs = [self.types[name] for name in node.inputs]
        try:
            return tuple(launch(node.attrs, inputs, node.types, env))
        except (UnsupportedError, ValueError) as error:
            raise UnsupportedError(f"{node.op} @{node.path}: {self.target}: {error}") from error

    def _narrow(self, kinds: Sequence[Sequence[NodeCalls]]) -> set[str]:
        """Values, and views of them, that every reader rounds: f32 results that neither leave the graph nor are summed
        over ranks.
        """
        roots = {
            name
            for bound in kinds[0]
            for index, name in enumerate(bound.node.outputs)
            if self.types[name].dtype == "f32" and Collective(index) not in bound.calls
        }
        roots.discard(self.aliases[self.graph.outputs[0]].root)
        read: set[str] = set()
        for bound in (bound for calls in kinds for bound in calls):
            for index, name in enumerate(bound.node.inputs):
                root = self.aliases[name].root
                read.add(root)
                readers = [
                    c for c in bound.calls if isinstance(c, CudaCall) and Pointer("in", index) in c.args.values()
                ]
                if not readers or any(index not in call.narrow for call in readers):
                    roots.discard(root)
        roots &= read
        return {name for name, alias in self.aliases.items() if alias.root in roots}

    # ---- weights

    def _form(self, node: Node, index: int) -> Stored | None:
        """How input `index` is stored; None where it is no parameter."""
        root = self.producers[self.aliases[node.inputs[index]].root]
        if root.op != "param":
            return None
        packing = _PACKING.get(root.type.dtype)
        if packing is not None and self.types[node.inputs[index]] != root.type:
            raise GraphError(f"{node.op} @{node.path}: a view of the parameter %{root.out} cannot be packed")
        return stored_form(root.attrs.recipe, root.type, packing, node.path)

    def stored(self) -> list[Stored]:
        """Every stored form that the kernels read, in the order of their reading."""
        return [form for forms in self.forms for form in forms if form is not None]

    # ---- memory

    def bind(self, weights: Mapping[str, tuple[str, int]], writes_logits: bool) -> tuple[StepCode, ...]:
        """The launches of each kind of steps with every argument's place."""
        forms = [
            tuple(Form(*weights[form.recipe], form.kind) if form else None for form in forms) for forms in self.forms
        ]
        direct = self._logits(self.calls[0]) if writes_logits else None
        steps = [
            self.binder.bind(kind.decode, kind.least, kind.most, kind.rows, calls, forms, direct)
            for kind, calls in zip(self.kinds, self.calls, strict=True)
        ]
        if self.graph.tp == 1:
            vocab = int(self.types[self.graph.outputs[0]].shape[-1])
            steps = [self.binder.bind_sampler(code, vocab) for code in steps]
        return tuple(steps)

    def _logits(self, calls: Sequence[NodeCalls]) -> str:
        """The value that is written straight into the step's logits."""
        if len(self.graph.outputs) != 1:
            raise GraphError(f"the graph returns {len(self.graph.outputs)} values, not the logits")
        name = self.graph.outputs[0]
        alias: Alias = self.aliases[name]
        made = [b for b in calls if alias.root in b.node.outputs]
        kind = self.types[name]
        if not made or kind.dtype != "f32" or self.types[alias.root].shape != kind.shape or alias.offset:
            raise GraphError(f"the returned value %{name} is a view or no f32 result of a kernel")
        return alias.root
