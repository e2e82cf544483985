"""Weights get the dtype that the precision asks for; FP8 layers get their scales.

Comes in: a graph with f32 weights, the precision, perhaps a calibration table. Goes out: the same graph with bf16,
E4M3, INT8 or INT4 weight recipes. Must not know: how scales were found, how weights are packed.

fp8: every linear layer W8A8 except those that the table keeps in bf16, and the matrices of latent attention, whose
inputs no calibration has seen: they are bf16 like the embedding. The output head (what the model's output is computed
from by no further linear layer) is FP8 or bf16, as is asked; its input stays float32. A head that is tied to the
embedding has numbers of its own then: of the embedding few rows are read, in bf16. Layers that experts are chosen by
stay float32: rounding them would send tokens to other experts. A weight that the table rounded is taken as it is stored
there; any other's scale is the largest magnitude of its row / 448, from the weight (`builder/ranges.py` holds the table
against it). Inputs are scaled by each token's largest magnitude / 448, statically by the table, or not at all: then
they stay float32, as do those that the table keeps.
int8: the same layers but the head W8A8, each token's input scaled by its largest magnitude / 127. Where the table
smooths an input, its columns are multiplied by factors first, which the weight was divided by before it was rounded;
inputs of experts are not smoothed.
int4: of the same layers but the head the weights alone, in groups of 128 columns with a scale and a zero point a row;
inputs stay float32. What the table did not round is rounded to nearest by the range of each group.
A checkpoint that is quantized already keeps its own numbers and scales, also where the model reads several of its
tensors as one, and what it left alone is bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.calibration import OWN_HEAD, WEIGHTS, CalibrationTable, Ranges
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import FP8_MAX, TensorType
from llmc.builder.checkpoint.source import Quantization, StoredLinear
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.kept import Kept, keep
from llmc.builder.weights.recipe import (
    Cast,
    Fp8,
    Fp8Scale,
    Int4,
    Int4Scale,
    Int4Zero,
    Int8,
    Int8Scale,
    Load,
    Recipe,
    StoredTensor,
    leaves,
)
from llmc.builder.weights.rounded import factors_name, scale_name, weight_name, zero_name
from llmc.plugins.linear import groups

#: Operators whose weights change, and which of their inputs that is.
_WEIGHT = {"linear": 1, "embedding": 1, "head_linear": 1, "grouped_linear": 2}
#: Those of them that are bf16 in an engine of rounded weights too.
_ALWAYS_BF16 = ("embedding", "head_linear")
#: Of precisions with one scale a row: the dtype of weights, and the recipes that round to it.
_BY_ROW = {"fp8": ("f8e4m3", Fp8, Fp8Scale), "int8": ("i8", Int8, Int8Scale)}


@dataclass(frozen=True)
class Precision:
    """`name` fp32|bf16|fp8|int8|int4; `activations` token|static|none (fp8 only). `own`: what the checkpoint is
    quantized with itself; where it holds weights whose bytes can be kept, nothing else is quantized, but for an output
    head if that is asked. `lm_head`: bf16|fp8|own of the output head.
    """

    name: str
    table: CalibrationTable | None = None
    activations: str = "token"
    own: Quantization | None = None
    lm_head: str = "bf16"

    @property
    def stored(self) -> Mapping[str, StoredLinear]:
        """Weight tensor -> what the checkpoint holds of it in this precision."""
        if self.own is None or self.own.scheme.weights != self.name:
            return {}
        return {entry.weight: entry for entry in self.own.linears.values()}

    @property
    def calibrated(self) -> bool:
        """Whether the table has rounded weights."""
        return self.table is not None and self.table.rounded is not None

    def head_unrounded(self, path: str) -> bool:
        """Whether an output head is bf16: by choice, or because the calibration could not round it; rounding it to
        nearest costs too much.
        """
        return self.lm_head == "bf16" or (self.calibrated and self.ranges(path) is None)

    def ranges(self, path: str) -> Ranges | None:
        """What the table says of a module."""
        return None if self.table is None else self.table.tensors.get(path)


def quantize(graph: Graph, precision: Precision) -> tuple[Graph, PassReport]:
    """Stores weights as the precision says. Raises UnsupportedError for an FP8 layer that the table does not name."""
    view, edit = View(graph), Edit(graph)
    notes = _summary(precision) + (precision.own.notes(precision.name) if precision.own else [])
    if precision.name == "fp32":
        return graph, report("quantize", graph, graph, 0, notes=notes)
    heads, routers, stored = head_linears(view), router_linears(view), precision.stored
    matched = own = heads_rounded = 0
    notes += [f"{len(routers)} linear layers that experts are chosen by stay float32"] if routers else []
    notes += _to_nearest(graph, precision)
    for node in graph:
        if node.op not in _WEIGHT or node.outputs[0] in routers:
            continue
        recipe = weight_recipe(view, node.inputs[_WEIGHT[node.op]])
        if recipe is None or not any(isinstance(leaf, Load) for leaf in leaves(recipe)):
            notes.append(f"{node.op} @{node.path}: what it reads is no tensor of the checkpoint and stays float32")
            continue
        if stored:
            kept = None if node.op in _ALWAYS_BF16 else _kept(stored, node, recipe, precision.name)
            rounded = kept is None and node.out in heads and precision.lm_head == "fp8"
            if kept:
                _require_own_head(node, node.out in heads, precision)
                edit.swap(node, _own(view, edit, node, kept, _own_x_scale(stored, recipe), precision))
            elif rounded:
                edit.swap(node, _by_row(view, edit, node, precision, "fp8", "none"))
                notes.append(f"{node.op} @{node.path}: the output head is rounded to FP8, to nearest")
            else:
                edit.swap(node, _bf16(view, edit, node))
            matched, own = matched + 1, own + (kept is not None)
            heads_rounded += rounded
            continue
        edit.swap(node, _node(view, edit, node, precision, node.out in heads, notes))
        matched += 1
    if own:
        but = ", but for the output head" if heads_rounded else ""
        notes.append(
            f"{own} linears keep the {precision.name.upper()} weights and scales of the checkpoint, what it left alone "
            f"is bf16{but}"
        )
    if stored and precision.lm_head == "fp8" and not heads_rounded:
        raise UnsupportedError(
            "--lm-head-dtype fp8: this model's output head is no linear module that could be rounded; drop the option"
        )
    after = edit.finish()
    return after, report("quantize", graph, after, matched, notes=notes)


def _node(view: View, edit: Edit, node: Node, precision: Precision, head: bool, notes: list[str]) -> Node:
    """The node with a weight in this precision; `head`: it is an output head."""
    ranges = precision.ranges(node.path)
    chosen = ranges is not None and ranges.choice is not None and ranges.choice.kept
    unrounded = head and precision.head_unrounded(node.path)
    if unrounded and precision.lm_head != "bf16":
        notes.append(f"{node.op} @{node.path}: the calibration has rounded no output head of this path: it stays bf16")
    if precision.name == "bf16" or node.op in _ALWAYS_BF16 or unrounded or chosen:
        return _bf16(view, edit, node)
    if head:
        return _by_row(view, edit, node, precision, "fp8", "none")
    if precision.name == "int4":
        return _int4(view, edit, node, precision)
    activations = precision.activations if precision.name == "fp8" else "token"
    if ranges is not None and ranges.choice is not None and ranges.choice.input_kept:
        activations = "none"
    return _by_row(view, edit, node, precision, precision.name, activations)


def _require_own_head(node: Node, head: bool, precision: Precision) -> None:
    """Raises UsageError where an output head that the checkpoint has quantized is asked to be something else."""
    if head and precision.lm_head != OWN_HEAD:
        raise UsageError(
            f"--lm-head-dtype {precision.lm_head}: the checkpoint has the output head ({node.path}) in "
            f"{precision.name.upper()} itself; drop the option"
        )


def _to_nearest(graph: Graph, precision: Precision) -> list[str]:
    """What is said of experts that the calibration did not round: it knows transformers' experts interface alone."""
    paths = [n.path for n in graph if n.op == "grouped_linear" and precision.ranges(n.path) is None]
    if not paths or not precision.calibrated or precision.stored:
        return []
    return [f"{len(paths)} stacks of experts are rounded to nearest by their ranges: their module loops over them"]


def head_linears(view: View) -> set[str]:
    """The outputs of the linear layers that the returned values depend on without another linear between."""
    found, wanted, seen = set(), list(view.graph.outputs), set()
    while wanted:
        name = wanted.pop()
        node = view.producers[name]
        if node.op == "linear":
            found.add(name)
        elif name not in seen:
            seen.add(name)
            wanted += node.inputs
    return found


def router_linears(view: View) -> set[str]:
    """The outputs of the linear layers that a `topk` depends on without another linear between."""
    found: set[str] = set()
    wanted = [node.inputs[0] for node in view.graph if node.op == "topk"]
    seen: set[str] = set()
    while wanted:
        node = view.producers[wanted.pop()]
        if node.op == "linear":
            found.add(node.out)
        elif node.outputs[0] not in seen and node.op not in _WEIGHT:
            seen.add(node.outputs[0])
            wanted += node.inputs
    return found


def _bf16(view: View, edit: Edit, node: Node) -> Node:
    """The node with a bf16 weight."""
    at = _WEIGHT[node.op]
    recipe = weight_recipe(view, node.inputs[at])
    assert recipe is not None
    weight = edit.param(Cast(recipe, "bf16"), TensorType("bf16", view.types[node.inputs[at]].shape), node)
    return node.replace(inputs=(*node.inputs[:at], weight.out, *node.inputs[at + 1 :]))


def _by_row(view: View, edit: Edit, node: Node, precision: Precision, form: str, activations: str) -> Node:
    """The node with a weight of one of `_BY_ROW`, its scales, and what becomes of its input."""
    at = _WEIGHT[node.op]
    recipe = weight_recipe(view, node.inputs[at])
    assert recipe is not None
    kind, (dtype, numbers, scale_of) = view.types[node.inputs[at]], _BY_ROW[form]
    ranges = precision.ranges(node.path)
    choice = None if ranges is None else ranges.choice
    if choice is None:  # rounded to nearest here
        scale: Recipe = scale_of(recipe)
        rounded: Recipe = numbers(recipe, scale)
    else:
        scale = StoredTensor(scale_name(node.path), "f32")
        rounded = StoredTensor(weight_name(node.path), dtype)
    weight = edit.param(rounded, TensorType(dtype, kind.shape), node)
    scales = edit.param(scale, TensorType("f32", kind.shape[:-1]), node)
    factors = None
    if choice is not None and choice.smoothing is not None:
        name = factors_name(choice.smoothing.module)
        factors = edit.param(StoredTensor(name, "f32"), TensorType("f32", kind.shape[-1:]), node)
    x_scale = _x_scale(node, precision) if activations == "static" else None
    return _quantized(view, edit, node, [weight, scales], _Input(x_scale, activations == "token", factors))


def _int4(view: View, edit: Edit, node: Node, precision: Precision) -> Node:
    """The node with an INT4 weight, the scales and the zero points of its groups."""
    recipe = weight_recipe(view, node.inputs[_WEIGHT[node.op]])
    assert recipe is not None
    ranges = precision.ranges(node.path)
    if ranges is None or ranges.choice is None:
        scale, zero = Int4Scale(recipe), Int4Zero(recipe)
        parts: tuple[Recipe, ...] = (Int4(recipe, scale, zero), scale, zero)
    else:
        names = (weight_name(node.path), "u4"), (scale_name(node.path), "f16"), (zero_name(node.path), "u4")
        parts = tuple(StoredTensor(*name) for name in names)
    return _grouped(view, edit, node, parts)


def _grouped(view: View, edit: Edit, node: Node, parts: Sequence[Recipe]) -> Node:
    """The node with these numbers, scales and zero points."""
    at = _WEIGHT[node.op]
    kind = view.types[node.inputs[at]]
    shape = (*kind.shape[:-1], groups(size_of(kind.shape[-1])))
    types = [TensorType("u4", kind.shape), TensorType("f16", shape), TensorType("u4", shape)]
    made = [edit.param(part, kind, node) for part, kind in zip(parts, types, strict=True)]
    inputs = [*node.inputs[:at], *(param.out for param in made), *node.inputs[at + 1 :]]
    known = view.types | {param.out: param.type for param in made}
    return edit.make(node.op, inputs, [known[n] for n in inputs], vars(node.attrs), like=node, outputs=node.outputs)


@dataclass(frozen=True)
class _Input:
    """An input is rounded by a static `scale`, or `per_token`, or stays float32; `factors`: a parameter that multiplies
    its columns before.
    """

    scale: float | None
    per_token: bool
    factors: Node | None = None


def _quantized(view: View, edit: Edit, node: Node, made: Sequence[Node], x: _Input) -> Node:
    """The node with a weight and its scales, `made` as parameters."""
    attrs: dict[str, object] = vars(node.attrs) | {"x_per_token": x.per_token, "x_scale": x.scale}
    if made[0].type.dtype == "i8" and node.op == "linear":
        attrs["x_factors"] = x.factors is not None
        made = [*made, x.factors] if x.factors else made
    at = _WEIGHT[node.op]
    before, after = node.inputs[:at], node.inputs[at + 1 :]
    inputs = [*before, *(param.out for param in made), *after]
    types = [*(view.types[n] for n in before), *(param.type for param in made), *(view.types[n] for n in after)]
    return edit.make(node.op, inputs, types, attrs, like=node, outputs=node.outputs)


def _kept(stored: Mapping[str, StoredLinear], node: Node, recipe: Recipe, precision: str) -> Kept | None:
    """The weight in the checkpoint's own bytes and scales; None where it holds other numbers. Raises UnsupportedError
    where its bytes cannot be taken as they are.
    """
    found = [leaf.name for leaf in leaves(recipe) if leaf.name in stored]
    kept = keep(recipe, {name: _tensors(entry, precision) for name, entry in stored.items()}) if found else None
    if found and kept is None:
        raise UnsupportedError(
            f"{node.op} @{node.path}: the checkpoint holds {found[0]} quantized, and the model reads it as {recipe}: "
            "its numbers cannot be kept; build with --dtype bf16"
        )
    return kept


def _tensors(entry: StoredLinear, precision: str) -> tuple[StoredTensor, ...]:
    """The numbers of a weight, its scales, and of INT4 its zero points."""
    if entry.zero is None:
        return StoredTensor(entry.weight, _BY_ROW[precision][0]), StoredTensor(entry.scale, "f32")
    return StoredTensor(entry.weight, "u4"), StoredTensor(entry.scale, "f16"), StoredTensor(entry.zero, "u4")


def _own_x_scale(stored: Mapping[str, StoredLinear], recipe: Recipe) -> float | None:
    """The scale of the input: where several tensors are one weight, the largest of theirs, which fits all values."""
    scales = [stored[leaf.name].input_scale for leaf in leaves(recipe) if leaf.name in stored]
    return max((scale for scale in scales if scale is not None), default=None)


def _own(view: View, edit: Edit, node: Node, kept: Kept, x_scale: float | None, precision: Precision) -> Node:
    """The node with the checkpoint's numbers and scales."""
    if precision.name == "int4":
        return _grouped(view, edit, node, (kept.weight, *kept.others))
    shape = view.types[node.inputs[_WEIGHT[node.op]]].shape
    weight = edit.param(kept.weight, TensorType(_BY_ROW[precision.name][0], shape), node)
    scales = edit.param(kept.others[0], TensorType("f32", shape[:-1]), node)
    per_token = precision.own is not None and precision.own.scheme.activations == "token"
    return _quantized(view, edit, node, [weight, scales], _Input(x_scale, per_token))


def _summary(precision: Precision) -> list[str]:
    """Of the table's choices: what rounding costs in each module, the dearest first, and which are kept for that."""
    tensors = {} if precision.table is None or precision.name not in WEIGHTS else precision.table.tensors
    name, head = precision.name.upper(), None if precision.table is None else precision.table.head
    choices = {path: ranges.choice for path, ranges in tensors.items() if ranges.choice is not None}
    total = sum(choice.loss for choice in choices.values()) or 1.0
    return [
        f"{path}: {100 * choice.loss / total:.2f} % of the loss of pure {name}, "
        f"{'kept in bf16' if choice.kept else 'FP8' if path == head else name}"
        f"{', its input as it is' if choice.input_kept else ''}"
        for path, choice in sorted(choices.items(), key=lambda item: (-item[1].loss, item[0]))
        if choice.loss > 0  # of experts it is not measured
    ]


def _x_scale(node: Node, precision: Precision) -> float:
    if precision.table is None:
        raise UsageError(
            "fp8 with static activations needs a calibration table: run `llmc calibrate` and pass its file"
        )
    entry = precision.table.tensors.get(node.path)
    if entry is None:
        raise UnsupportedError(
            f"{node.op} @{node.path}: the calibration table has no entry for it, so its FP8 scale is unknown; "
            "calibrate this model again, or build with --fp8-activations token or --dtype bf16"
        )
    scale = entry.input_amax / FP8_MAX if entry.choice is None else entry.choice.input_scale
    if not np.float32(scale) > 0:
        raise UnsupportedError(
            f"{node.op} @{node.path}: input_amax is {entry.input_amax} in the calibration table, too little for a "
            "float32 scale: its input was always zero; calibrate with other text, or build with --dtype bf16"
        )
    return scale
