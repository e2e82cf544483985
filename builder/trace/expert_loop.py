"""Experts modules that loop over their experts in Python, without transformers' experts interface.

Comes in: a module whose forward takes hidden_states, top_k_index and top_k_weights. Goes out: a forward of the same
meaning made of `llmc::grouped_linear`. Must not know: model families, graphs.

The loop is run for the first and the last expert, each with more tokens than it would ever get its share of, on
stand-ins for hidden states, weights and parameters that write down what is done to them: which matrices multiply, what
happens between. Where both take all their tokens, in order, and do the same to each of them, each with its own part of
the same parameters, that is replayed on all tokens. Anything else raises UnsupportedError with the module's class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from llmc.artifacts.errors import UnsupportedError

_SIGNATURE = ["hidden_states", "top_k_index", "top_k_weights"]

#: Tokens of a run: all choose the expert, which a loop with a capacity would not give all of them. A size of no model.
_TOKENS = 61
#: What a stand-in stands for: rows of tokens; the same times their weights; the sum of those; weights of tokens; a
#: parameter of all experts, or a view of it; one expert's part of it.
ROWS, WEIGHTED, SUM, MIX, STACK, EXPERT = "rows", "weighted", "sum", "mix", "stack", "expert"


def loops_over_experts(module: torch.nn.Module) -> bool:
    """Whether a module is called as experts are and does not use the experts interface."""
    return not hasattr(module, "has_gate") and list(inspect.signature(module.forward).parameters) == _SIGNATURE


@dataclass
class _Call:
    """One thing that was done to rows: `function` on earlier rows (by number), experts' parts and plain values."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Tape:
    """What one expert does. Rows are numbered: 0 is the input, n the result of call n-1."""

    def __init__(self, expert: int) -> None:
        self.expert = expert
        self.calls: list[_Call] = []
        self.result: int | None = None


class _StandIn:
    """A value on the meta device with its role. `recipe` of a parameter or of a part of one: how it is made from the
    module's parameters; `number` of rows: which.
    """

    def __init__(self, tape: _Tape, role: str, meta: torch.Tensor, number: int = 0, recipe: Any = None) -> None:
        self.tape, self.role, self.meta, self.number, self.recipe = tape, role, meta, number, recipe

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.meta, name)
        if name == "T":
            return _apply(torch.t, (self,), {})
        if not callable(value):
            return value
        function = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: _apply(function, (self, *args), kwargs)


for _name in ("getitem", "mul", "rmul", "add", "radd", "sub", "truediv", "matmul", "neg"):
    _function = getattr(torch.Tensor, f"__{_name}__")
    setattr(_StandIn, f"__{_name}__", lambda *args, _f=_function: _apply(_f, args, {}))


def _metas(value: Any) -> Any:
    if isinstance(value, _StandIn):
        return value.meta
    return type(value)(map(_metas, value)) if isinstance(value, tuple | list) else value


def _apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does to stand-ins what `function` would do, and writes it down."""
    given = [a for a in args if isinstance(a, _StandIn)] + [a for a in kwargs.values() if isinstance(a, _StandIn)]
    tape, roles = given[0].tape, [g.role for g in given]
    name = re.sub("^__r?|__$|_$", "", function.__name__)
    if name == "index_add" and roles == [SUM, WEIGHTED] and tape.result is None and _adds_all(*args, **kwargs):
        tape.result = given[1].number
        return given[0]
    meta = function(*_metas(args), **{key: _metas(value) for key, value in kwargs.items()})
    made = _result(tape, name, _Call(function, args, kwargs), given, meta) if isinstance(meta, torch.Tensor) else None
    if made is None:
        raise UnsupportedError(f"its experts compute {name} of {', '.join(roles)}, which cannot be compiled")
    return made


def _adds_all(total: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> bool:
    """Whether an index_add adds each token's row to that token."""
    return dim == 0 and alpha == 1 and torch.equal(index, torch.arange(_TOKENS))


def _takes_all(call: _Call, first: _StandIn, shape: torch.Size) -> bool:
    """Whether an index takes every token once, in order: none is dropped, none stands in another's place."""
    numbers = torch.arange(_TOKENS)[:, None]
    taken = call.function(numbers.expand(first.meta.shape), *call.args[1:], **call.kwargs)
    wanted = numbers.expand(first.meta.shape)
    return taken.shape == shape == wanted.shape and torch.equal(taken, wanted)


def _is_by_row(call: _Call) -> bool:
    """Whether a call does the same to rows [1,n] as to each of [3,2,n]: a row alone decides what becomes of it."""
    generator = torch.Generator().manual_seed(0)
    known: dict[int, torch.Tensor] = {}

    def given(value: Any, place: tuple[int, int] | None) -> Any:
        if not isinstance(value, _StandIn):
            return value
        rows = known.setdefault(value.number, torch.randn(3, 2, value.meta.shape[-1], generator=generator))
        return rows.clone() if place is None else rows[place][None].clone()

    def run(place: tuple[int, int] | None) -> torch.Tensor:
        kwargs = {name: given(value, place) for name, value in call.kwargs.items()}
        result: torch.Tensor = call.function(*(given(value, place) for value in call.args), **kwargs)
        return result

    together = run(None)
    apart = torch.stack([torch.cat([run((i, j)) for j in range(2)]) for i in range(3)])
    return together.shape == apart.shape and torch.allclose(together, apart, rtol=1e-4, atol=1e-5, equal_nan=True)


def _result(tape: _Tape, name: str, call: _Call, given: list[_StandIn], meta: torch.Tensor) -> _StandIn | None:
    """The stand-in for what a call gives; None for what experts are not known to do."""
    first, roles = given[0], {g.role for g in given}
    same = meta.shape == first.meta.shape
    if name == "zeros_like" and roles == {ROWS}:
        return _StandIn(tape, SUM, meta)
    if name in ("view", "reshape", "to", "type_as") and roles <= {SUM, ROWS, WEIGHTED} and (same or SUM in roles):
        return _StandIn(tape, first.role, meta, first.number)
    if name == "getitem" and roles in ({ROWS}, {MIX}):  # by the tokens that chose the expert
        return _StandIn(tape, first.role, meta, first.number) if _takes_all(call, first, meta.shape) else None
    if roles == {STACK}:
        return _of_parameter(tape, name, call, first, meta)
    if roles == {EXPERT} and name in ("t", "transpose") and meta.dim() == 2:
        return _StandIn(tape, EXPERT, meta, recipe=_Call(torch.transpose, (first.recipe, 1, 2), {}))
    if name == "mul" and roles == {ROWS, MIX}:
        rows = next(g for g in given if g.role == ROWS)
        return _StandIn(tape, WEIGHTED, meta, rows.number) if meta.shape == rows.meta.shape else None
    multiplies = name in ("matmul", "linear") and [g.role for g in given] == [ROWS, EXPERT]
    if multiplies or (roles == {ROWS} and meta.shape[:-1] == first.meta.shape[:-1] and _is_by_row(call)):
        tape.calls.append(call)
        return _StandIn(tape, ROWS, meta, len(tape.calls))
    return None


def _of_parameter(tape: _Tape, name: str, call: _Call, first: _StandIn, meta: torch.Tensor) -> _StandIn | None:
    """One expert's part of a parameter, or a view of the parameter."""
    if name == "getitem":
        chosen = meta.dim() == 2 == first.meta.dim() - 1 and int(call.args[1]) == tape.expert
        return _StandIn(tape, EXPERT, meta, recipe=first.recipe) if chosen else None
    if name in ("view", "reshape", "transpose", "permute"):
        return _StandIn(tape, STACK, meta, recipe=_Call(call.function, (first.recipe, *call.args[1:]), call.kwargs))
    return None


def _probe(module: torch.nn.Module, forward: Callable[..., Any], expert: int, hidden: int) -> _Tape:
    """What one expert does to its rows. The module's parameters are stand-ins meanwhile."""
    tape = _Tape(expert)
    owners = [(owner, name, value) for owner in module.modules() for name, value in owner._parameters.items()]
    with _disable_current_modes():
        rows = _StandIn(tape, ROWS, torch.empty(_TOKENS, hidden, device="meta"))
        mix = _StandIn(tape, MIX, torch.empty(_TOKENS, 1, device="meta"))
        try:
            for owner, name, value in owners:
                if value is not None:
                    empty = torch.empty([int(d) for d in value.shape], device="meta")
                    owner._parameters[name] = _StandIn(tape, STACK, empty, recipe=value)
            result = forward(rows, torch.full((_TOKENS, 1), expert), mix)
        finally:
            for owner, name, value in owners:
                owner._parameters[name] = value
    if not isinstance(result, _StandIn) or result.role != SUM or tape.result is None:
        raise UnsupportedError("its experts return something else than the weighted sum of what each computes")
    return tape


def _key(value: Any) -> Any:
    """A recorded value as something that can be compared between experts."""
    match value:
        case _StandIn(role=role, number=number, recipe=recipe):
            return (role, number, _key(recipe))
        case _Call(function=function, args=args, kwargs=kwargs):
            return (function, _key(args), _key(tuple(sorted(kwargs.items()))))
        case torch.Tensor():
            return id(value)
        case tuple() | list():
            return tuple(map(_key, value))
    return value


def _experts_of(tape: _Tape) -> int:
    """How many experts the parameters are stacks of."""
    parts = [a for call in tape.calls for a in call.args if isinstance(a, _StandIn) and a.role == EXPERT]
    counts = {int(_made(part.recipe).shape[0]) for part in parts}
    if len(counts) != 1:
        raise UnsupportedError(f"its parameters are stacks of {', '.join(map(str, sorted(counts)))} experts")
    return counts.pop()


def _made(recipe: Any) -> torch.Tensor:
    """A parameter, or a view of one."""
    if not isinstance(recipe, _Call):
        return recipe
    made: torch.Tensor = recipe.function(_made(recipe.args[0]), *recipe.args[1:], **recipe.kwargs)
    return made


def grouped_forward(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """A forward for all tokens at once; raises UnsupportedError where the loop cannot be understood."""
    loop = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        try:
            tape = _probe(module, loop, 0, hidden_states.shape[-1])
            other = _probe(module, loop, _experts_of(tape) - 1, hidden_states.shape[-1])
            if _key(tuple(tape.calls)) != _key(tuple(other.calls)) or tape.result != other.result:
                raise UnsupportedError("its first and its last expert compute different things")
        except UnsupportedError as error:
            raise UnsupportedError(f"{type(module).__name__} cannot be compiled: {error}") from error
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _replay(module, tape, rows, top_k_index, top_k_weights).reshape(hidden_states.shape)

    return forward


def _replay(module: torch.nn.Module, tape: _Tape, rows: torch.Tensor, index: torch.Tensor,
            mix: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The recorded calls on rows [T,H], each for all experts of a token, and the weighted sum [T,H]."""
    values = [rows]
    for number, call in enumerate(tape.calls, 1):
        part = next((a for a in call.args if isinstance(a, _StandIn) and a.role == EXPERT), None)
        if part is None:
            args = [values[a.number] if isinstance(a, _StandIn) else a for a in call.args]
            values.append(call.function(*args, **call.kwargs))
            continue
        weight = _made(part.recipe)
        weight = weight if call.function is torch.nn.functional.linear else weight.transpose(1, 2)
        last = number == tape.result
        x = values[call.args[0].number]
        values.append(
            torch.ops.llmc.grouped_linear(
                x, index, weight, None, mix if last else None, _parameter_name(module, part.recipe)
            )
        )
        if last:
            return values[-1]
    assert tape.result is not None
    return (values[tape.result] * mix.unsqueeze(-1)).sum(dim=1)


def _parameter_name(module: torch.nn.Module, recipe: Any) -> str:
    """The name of the parameter that a part is of."""
    while isinstance(recipe, _Call):
        recipe = recipe.args[0]
    return next(name for name, value in module.named_parameters() if value is recipe)
