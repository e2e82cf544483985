"""Walks the exported program and builds the graph; counts what an eager runner would launch.

Comes in: a `Checkpoint`, or a config and the shapes of stored tensors. Goes out: `Traced`. Must not know: single ATen
operators (the table has them), passes, any model family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, GraphError, layer_of
from llmc.builder.operators import ALL
from llmc.builder.trace import aten, complex, recurrent, routing, shapes
from llmc.builder.trace.emitter import Complex, Emitter, Name, Value
from llmc.builder.trace.export import Exported, export
from llmc.builder.trace.places import module_path, own_name
from llmc.builder.trace.table import IDENTITIES, Table

#: Every operator that can be translated.
TABLE: Table = {**aten.TABLE, **shapes.TABLE, **recurrent.TABLE, **routing.TABLE}

#: Operators that the tracer adds or that only check; no runner executes them.
_CHECKS = re.compile(r"_assert|sym_|_functional_assert")


class Checkpoint(Protocol):
    """What tracing reads of a checkpoint: its config, and each tensor's `shape` by Hugging Face parameter names."""

    def hf_config(self) -> Any:
        """A new `PretrainedConfig`."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Parameter name -> what is stored; only its `shape` is read."""


@dataclass(frozen=True)
class Traced:
    """`graph` takes ids i32[1,T], positions i32[1,T], rows i32[S] and returns logits f32[1,S,V]. `buffers` are the
    values of its `buffer(...)` recipes. `eager_launches` are the kernels that PyTorch would launch for one step without
    compiling, `eager_launches_per_layer` those of modules inside a numbered layer, by layer. `note`: in what the graph
    differs from the model, for the user; empty if in nothing.
    """

    graph: Graph
    architecture: str
    buffers: dict[str, np.ndarray]
    eager_launches: int
    eager_launches_per_layer: float
    note: str = ""


def trace(checkpoint: Checkpoint, longest: int | None = None) -> Traced:
    """Traces a checkpoint's model, for sequences of up to `longest` tokens (None: of what its config allows). Raises
    UnsupportedError, naming operator, module and source line, or CheckpointError where the checkpoint lacks a tensor
    that its config asks for, or has it in another shape. Of a checkpoint without any tensors every parameter counts as
    stored.
    """
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    return trace_model(checkpoint.hf_config(), shapes or None, longest)


def trace_model(config: Any, tensors: Mapping[str, Sequence[int]] | None = None, longest: int | None = None) -> Traced:
    """Traces the causal language model of a config; `tensors` None: every parameter counts as stored."""
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = True  # a sixth of the time
    try:
        return _traced(config, tensors, longest)
    except UnsupportedError:
        torch.fx.config.do_not_emit_stack_traces = False
        return _traced(config, tensors, longest)  # what raises again then names its line of Python
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _traced(config: Any, tensors: Mapping[str, Sequence[int]] | None, longest: int | None) -> Traced:
    exported = export(config, tensors, longest)
    emitter = Emitter(exported, tensors)
    outputs = _walk(exported, emitter)
    read = {name for node in emitter.nodes for name in node.inputs}
    nodes = tuple(node for node in emitter.nodes if node.op != "param" or node.out in read)
    graph = Graph(config.model_type, nodes, outputs)
    try:
        graph.validate(ALL)
    except GraphError as error:
        raise UnsupportedError(f"{exported.architecture}: {error}") from error
    _check_caches(exported, graph)
    launches, per_layer = _count(exported.program)
    return Traced(graph, exported.architecture, emitter.buffers, launches, per_layer, exported.note)


def _walk(exported: Exported, emitter: Emitter) -> tuple[str, ...]:
    """Translates every node that the logits depend on, in order; returns the names of the outputs."""
    values: dict[str, Any] = _sources(exported, emitter)
    live = _live(exported.program.graph)
    for node in exported.program.graph.nodes:
        emitter.at = node
        if node.op == "output":
            (logits,) = (values[a.name] for a in node.args[0])
            return (emitter.value(logits),)
        number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)
        if node.op == "call_function" and node in live and not number:
            values[node.name] = _translate(emitter, node, values)
    raise UnsupportedError(f"{exported.architecture} returns nothing")


def _live(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that the output depends on: models make masks and positions that nobody reads then."""
    live: set[torch.fx.Node] = set()
    wanted = [node for node in graph.nodes if node.op == "output"]
    while wanted:
        node = wanted.pop()
        if node not in live:
            live.add(node)
            wanted += node.all_input_nodes
    return live


def _sources(exported: Exported, emitter: Emitter) -> dict[str, Any]:
    """The values of the program's placeholders: inputs, weights, buffers, constants."""
    signature = exported.program.graph_signature
    placeholders = {node.name: node for node in exported.program.graph.nodes if node.op == "placeholder"}
    tokens, rows = (placeholders[signature.user_inputs[i]].meta["val"].shape[-1] for i in (0, 2))
    emitter.symbols = {tokens.node.expr: "T", rows.node.expr: "S"}
    values: dict[str, Any] = {}
    kinds = {"ids": (1, "T"), "positions": (1, "T"), "rows": ("S",)}
    for (name, shape), placeholder in zip(kinds.items(), signature.user_inputs, strict=True):
        values[placeholder] = emitter.input(name, TensorType("i32", shape))
    for name, target in signature.inputs_to_parameters.items():
        values[name] = _Weight(own_name(target))
    for name, target in signature.inputs_to_buffers.items():
        own = own_name(target)
        stored = exported.stored is not None and target not in signature.non_persistent_buffers
        values[name] = _Weight(own) if stored else exported.buffers[own]
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        values[name] = exported.program.constants[target]
    return values


@dataclass(frozen=True)
class _Weight:
    """A parameter, or a stored buffer, that no node has read yet: it enters the graph where it is first used."""

    name: str


def _translate(emitter: Emitter, node: torch.fx.Node, values: dict[str, Any]) -> Any:
    """The value (or tuple of values) of a node: computed here if it depends on nothing, by the table otherwise."""

    def resolve(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            value = values.get(argument.name, argument)  # a size stays a node
            return emitter.weight(value.name, emitter.kind(argument)) if isinstance(value, _Weight) else value
        if isinstance(argument, list | tuple):
            return [resolve(a) for a in argument]
        return argument

    if getattr(node.target, "__name__", "") == "getitem":
        return resolve(node.args[0])[node.args[1]]
    if not isinstance(node.target, torch._ops.OpOverload):
        raise emitter.unsupported("it is no tensor operator")
    arguments = {a.name: resolve(v) for a, v in zip(node.target._schema.arguments, node.args, strict=False)}
    arguments |= {name: resolve(v) for name, v in node.kwargs.items()}
    if _is_constant(arguments.values()):
        return _compute(node, arguments)
    arguments = _from_behind(emitter, node, arguments)
    name = node.target._opname
    overload = node.target._overloadname
    space = "" if node.target.namespace == "aten" else f"{node.target.namespace}."
    translation = TABLE.get(f"{space}{name}.{overload}") or TABLE.get(f"{space}{name}")
    if complex.is_complex(node, arguments):
        translation = complex.TABLE.get(name)
    if translation is None:
        raise emitter.unsupported("it has no translation into llmc's operators")
    try:
        value: Value | tuple[Value, ...] = translation(emitter, **arguments)
    except TypeError as error:
        raise emitter.unsupported(f"this form of it has no translation ({error})") from error
    return _checked(emitter, node, value)


def _from_behind(emitter: Emitter, node: torch.fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """Axes counted from the last, where an input has an axis that stands for two: those behind it keep their place.
    Raises UnsupportedError for an operator that works along such an axis, or moves axes.
    """
    tensors = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    behind = [t.dim() - 1 - i for t in tensors for i, dim in enumerate(t.shape) if len(emitter.dims(dim)) > 1]
    if not behind:
        return arguments
    given = arguments.get("dim")
    axes = [given] if isinstance(given, int) else given or []
    axes = [axis - tensors[0].dim() if axis >= 0 else axis for axis in axes]
    if arguments.keys() & {"dims", "dim0", "dim1"} or any(axis < -min(behind) for axis in axes):
        raise emitter.unsupported("it moves or works along an axis of tokens and heads together")
    return {**arguments, "dim": axes[0] if isinstance(given, int) else axes} if axes else arguments


def _flat(arguments: Any) -> list[Any]:
    return [x for a in arguments for x in (_flat(a) if isinstance(a, list) else [a])]


def _is_constant(arguments: Any) -> bool:
    """Whether nothing among the arguments comes from inputs, weights, or the number of tokens."""
    flat = _flat(arguments)
    real = all(t.device.type != "meta" for t in flat if isinstance(t, torch.Tensor))
    return real and not any(isinstance(a, Name | Complex | torch.fx.Node) for a in flat)


def _compute(node: torch.fx.Node, arguments: dict[str, Any]) -> Any:
    """Runs an operator on real constants."""
    assert callable(node.target)
    return node.target(
        **{name: torch.device("cpu") if isinstance(v, torch.device) else v for name, v in arguments.items()}
    )


def _checked(emitter: Emitter, node: torch.fx.Node, value: Value | tuple[Value, ...]) -> Value | tuple[Value, ...]:
    """The value, where its type is what the tracer found; a translation that gives another type is a defect."""
    if isinstance(value, Name):
        found = emitter.types[value]
        if not emitter.fits(found, node):
            raise emitter.unsupported(f"its translation gives {found} instead of {emitter.kind(node)}")
    return value


def _check_caches(exported: Exported, graph: Graph) -> None:
    """A model that attends or carries a state by operators of its own would mix tokens of different sequences."""
    layers = [node.attrs.layer for node in graph if node.op == "attention"]
    if not layers and not any(ALL[node.op].state_shape for node in graph):
        raise UnsupportedError(
            f"{exported.architecture} calls neither transformers' attention interface nor a recurrent kernel that is "
            "known here, so nothing keeps the tokens of different sequences apart"
        )
    counts = any("positions" in node.inputs for node in graph)
    biased = any(node.op == "attention" and node.attrs.slopes for node in graph)  # positions are in the distances
    if layers and not (exported.positioned or counts or biased):
        raise UnsupportedError(
            f"{exported.architecture} neither takes position_ids nor counts its tokens, so tokens of several "
            "sequences cannot share a step"
        )
    if len(set(layers)) != len(layers):
        raise UnsupportedError(f"{exported.architecture} attends twice in one layer, or shares a cache between layers")


def _count(program: torch.export.ExportedProgram) -> tuple[int, float]:
    """Kernels that PyTorch launches for the program as it stands, and by layer: everything but views and no-ops."""
    total, inside, layers = 0, 0, set()
    for node in program.graph.nodes:
        if node.op != "call_function" or not _launches(node):
            continue
        total += 1
        layer = layer_of(module_path(node))
        if layer is not None:
            inside += 1
            layers.add(layer)
    return total, inside / len(layers) if layers else 0.0


def _launches(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or _CHECKS.search(str(target)):
        return False
    first = node.args[0] if node.args else None
    if target._opname in ("to", "type_as", "_to_copy"):
        return isinstance(first, torch.fx.Node) and first.meta["val"].dtype != node.meta["val"].dtype
    view = any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments)
    return not (view or target._opname in IDENTITIES or target._opname in ("reshape", "flatten", "expand_as"))
