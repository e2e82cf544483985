"""Runs torch.export on the stock transformers model: parameters on the meta device, buffers real, T and S symbolic.

Comes in: a Hugging Face config. Goes out: `Exported`. Must not know: our graph, any model family.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.functions import Min
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from llmc.artifacts.errors import LlmcError, UnsupportedError
from llmc.builder.naming import parameter_recipes
from llmc.builder.reference import parameter_names
from llmc.builder.trace import expert_loop, experts_hook, frequencies, written_out
from llmc.builder.trace.counted import counted_tokens
from llmc.builder.trace.hook import IMPLEMENTATION
from llmc.builder.trace.places import innermost
from llmc.builder.trace.recurrent_hook import recurrences
from llmc.builder.weights.recipe import Recipe

#: Example sizes. Different from each other and from 0 and 1, which torch.export would take for constants.
_TOKENS, _ROWS = 7, 3
#: Bounds of T and S while tracing: none, and one below which the tables that models keep for masks all lie.
_MANY, _FEW = 1 << 20, 32


@dataclass(frozen=True)
class Exported:
    """`program` takes ids and positions [1,T] and rows [S]. `buffers`: the values that the model computed for itself,
    by name. `names`: parameter name -> all names of that parameter (tied ones have several). `stored`: how parameters
    are made of the checkpoint's tensors, by any of their names; None where every parameter counts as stored.
    `positioned`: the model takes positions. `note`: in what the program differs from the model, for the user.
    """

    program: torch.export.ExportedProgram
    architecture: str
    buffers: dict[str, torch.Tensor]
    names: dict[str, tuple[str, ...]]
    stored: dict[str, Recipe] | None
    positioned: bool
    note: str


#: A model, its buffers' values, what `frequencies.fix` says, its program, and whether it takes positions.
_Built: TypeAlias = tuple[Any, dict[str, torch.Tensor], str, torch.export.ExportedProgram, bool]


class _ParametersOnMeta(TorchFunctionMode):
    """Puts uninitialised tensors, which is what modules make parameters from, on the meta device; buffers stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _CountsAreTold(TorchFunctionMode):
    """Gives a model that counts its tokens (0, 1, ..., T-1) their positions instead, which is what it counts them for:
    alone in a pass that starts at 0, a token's number is its position.
    """

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()
        self.ids, self.positions = ids, positions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.arange or not isinstance(result.shape[0], torch.SymInt):
            return result
        given = {
            **dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False)),
            **(kwargs or {}),
        }
        if (given.get("start", 0), given.get("step", 1)) != (0, 1):
            return result
        if result.shape[0].node.expr != self.ids.shape[1].node.expr:
            return result
        return self.positions[0].to(result.dtype)


class _ConstantsStayReal(TorchFunctionMode):
    """Keeps the values of what a model's forward makes of Python numbers, for a device that holds none: `torch.tensor`
    makes them on the CPU and moves them then, lists that index a tensor likewise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0] if args else None, torch.Tensor):
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            items = index if isinstance(index, tuple) else (index,)
            args = (tensor, tuple(self._indices(item, tensor.device) for item in items))
        return func(*args, **kwargs)

    @staticmethod
    def _indices(item: Any, device: torch.device) -> Any:
        plain = isinstance(item, list) and item and all(type(n) is int for n in item)
        return torch.tensor(item).to(device) if plain else item


class _StridesArePlain(TorchFunctionMode):
    """Copies a value whose strides are minima of products of T before it is reshaped: merging axes gives such strides,
    and torch.export would bound T by them. `reshape` may copy, and a copy means nothing to the graph.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.reshape, torch.reshape):
            strides = (s.node.expr for s in args[0].stride() if isinstance(s, torch.SymInt))
            if any(expr.has(Min) for expr in strides):
                args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        return func(*args, **(kwargs or {}))


class _Ragged(torch.nn.Module):
    """The model as a function of ids, positions and the rows whose logits are wanted. `positioned`: the model is told
    positions; one that is not may count its tokens, or only carry states. Some are told and count as well.
    """

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.positioned = "position_ids" in inspect.signature(model.forward).parameters
        self._options = options

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with _ConstantsStayReal(), _StridesArePlain():
            told = {"position_ids": positions} if self.positioned else {}
            # Where a model writes its attention out, its mask is recognised by what it makes of counts.
            counts = self.positioned and self.model.config._attn_implementation != IMPLEMENTATION
            with contextlib.nullcontext() if counts else _CountsAreTold(ids, positions):
                return self.model(input_ids=ids, logits_to_keep=rows, **told, **self._options).logits


def export(
    config: PretrainedConfig, tensors: Mapping[str, Sequence[int]] | None = None, longest: int | None = None
) -> Exported:
    """Builds the model and exports it; `tensors` are the shapes of what is stored, `longest` the most tokens of a
    sequence, where they are fewer than the model can take. Raises UnsupportedError with the reason where either fails,
    CheckpointError for tensors that cannot become the model's parameters.
    """
    config = copy.deepcopy(config)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"transformers has no causal language model of model_type {config.model_type!r}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError("config.json: quantization_config: give the checkpoint before quantization")
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    try:
        model, buffers, note, program, positioned = _traced(config, longest)
        stored = None if tensors is None else parameter_recipes(model, tensors)
    except LlmcError:
        raise
    except Exception as error:  # third-party model code under a tracer: anything may come
        raise UnsupportedError(f"{_name_of(kind)} cannot be traced with ragged tokens: {_reason(error)}") from error
    names = parameter_names(model)
    return Exported(program, type(model).__name__, buffers, names, stored, positioned, note)


def _traced(config: Any, longest: int | None) -> _Built:
    """`_build` with our attention; where the model does not call it, with its own, recognised by what it computes. The
    model's masks and tables may bound the tokens then, which means nothing for what is served.
    """
    failure: Exception | None = None
    try:
        built = _build(config, IMPLEMENTATION, _MANY, longest)
        if not written_out.writes_out(built[3]):
            return built
    except LlmcError:
        raise
    except Exception as error:  # a model that looks its attention up, or needs a mask
        failure = error
    try:
        built = _build(config, "eager", _FEW, longest)
    except Exception as error:
        raise failure or error from None
    _, buffers, _, program, _ = built
    if failure and not written_out.writes_out(program):
        raise failure
    written_out.replace(program, buffers, _widest(config))
    return built


def _build(config: Any, attention: str, most: int, longest: int | None) -> _Built:
    """The model with that attention function, exported for up to `most` tokens, to serve sequences of `longest`."""
    with no_init_weights(), _ParametersOnMeta():
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation=experts_hook.IMPLEMENTATION,
        ).eval()
    for module in filter(expert_loop.loops_over_experts, model.modules()):
        module.forward = expert_loop.grouped_forward(module)
    note = frequencies.fix(model, longest)
    buffers = dict(model.named_buffers())
    model.to("meta")
    model.tie_weights()
    return model, buffers, note, *_export(model, most)


def _widest(config: Any) -> int:
    """The largest window that the config names, in any of its fields."""
    fields = config.to_dict().items()
    return max((v for k, v in fields if ("window" in k or "chunk" in k) and isinstance(v, int)), default=0)


def _name_of(kind: Any) -> str:
    """The class that a config maps to; some map to several."""
    return getattr(kind, "__name__", str(kind))


def _reason(error: Exception) -> str:
    """What torch.export says, in one line: its first sentence, the first fact that it lists, and the source line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    facts = [lines[0].partition(" For more information")[0], *[li[2:] for li in lines if li.startswith("- ")][:1]]
    call = next((i for i, line in enumerate(lines) if "following call raised this error" in line), None)
    return "; ".join(facts) + (innermost(lines[call + 1 :]) if call is not None else _raised_at(error))


def _raised_at(error: Exception) -> str:
    """The innermost line of a model's own code that an exception came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/modeling_" in frame.filename]
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _export(model: Any, most: int) -> tuple[torch.export.ExportedProgram, bool]:
    """The exported program, and whether the model takes positions."""
    accepted = inspect.signature(model.forward).parameters
    if "logits_to_keep" not in accepted:
        raise UnsupportedError(
            f"{type(model).__name__} takes no logits_to_keep, so the rows whose logits are wanted cannot be chosen"
        )
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    wanted = {"use_cache": False, "return_dict": True}
    options = {name: value for name, value in wanted.items() if name in accepted or anything}
    wrapper = _Ragged(model, options).eval()
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    tokens = torch.export.Dim("T", min=2, max=min(max(longest, _TOKENS), most))  # some grow their tables for more
    rows = torch.export.Dim("S", min=2, max=1 << 20)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    arguments = (ids, ids.clone(), torch.zeros(_ROWS, dtype=torch.int64, device="meta"))
    with _quiet(), torch.no_grad(), recurrences(model), counted_tokens() as places:
        try:
            program = torch.export.export(
                wrapper, arguments, dynamic_shapes=({1: tokens}, {1: tokens}, {0: rows}), strict=False
            )
        except Exception as error:
            if not places or not str(error).startswith("Constraints violated"):
                raise
            raise UnsupportedError(
                f"{type(model).__name__} cannot be traced with ragged tokens: it counts the tokens of a step, as a "
                f"loop over them does that no operator stands for ({places[0]})"
            ) from error
        if any(_mutates(node) for node in program.graph.nodes):
            program = program.run_decompositions({})  # operators stay as they are, in-place ones become functions
    return program, wrapper.positioned


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings, and the whole graphs that torch.export logs or prints to stderr before it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
