"""Recurrences as torch.export sees them: one operator each, without a kernel in PyTorch.

Comes in: the modules of a model. Goes out: `recurrences`, a context in which calling the model emits our operators.
Must not know: graphs, any model family.

transformers writes what mixers compute over all tokens as functions and marks each with the name of the fused kernel
that may take its place (`use_kernel_func_from_hub_with_fallback`). The functions themselves cut the tokens into chunks,
which ragged steps do not allow. Within the context every function of a kernel that is known here is replaced by its
operator, with that kernel's arguments (causal-conv1d, mamba-ssm, flash-linear-attention).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from llmc.artifacts.errors import UnsupportedError


@torch.library.custom_op("llmc::causal_conv", mutates_args=())
def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """x [1,C,T], weight [C,taps], bias [C] -> [1,C,T]; only ever traced."""
    raise _no_kernel("causal_conv")


@causal_conv.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmc::ssd_scan", mutates_args=())
def ssd_scan(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
             d: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """x [1,T,H,P], dt [1,T,H], a [H], b and c [1,T,G,N], d [H] -> [1,T,H,P]; only ever traced."""
    raise _no_kernel("ssd_scan")


@ssd_scan.register_fake
def _(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
      d: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("llmc::selective_scan", mutates_args=())
def selective_scan(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                   d: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """x and dt [1,C,T], a [C,N], b and c [1,N,T], d [C] -> [1,C,T]; only ever traced."""
    raise _no_kernel("selective_scan")


@selective_scan.register_fake
def _(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
      d: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("llmc::gated_delta", mutates_args=())
def gated_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
                normalize: bool) -> torch.Tensor:  # fmt: skip
    """q and k [1,T,KH,K], v [1,T,H,V], g [1,T,H] or [1,T,H,K], beta [1,T,H] -> [1,T,H,V]; only ever traced."""
    raise _no_kernel("gated_delta")


@gated_delta.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
      normalize: bool) -> torch.Tensor:  # fmt: skip
    return v.new_empty(v.shape)


def _no_kernel(name: str) -> NotImplementedError:
    return NotImplementedError(f"llmc::{name} stands in traced graphs and has no kernel in PyTorch")


def _refuse(kernel: str, **options: Any) -> None:
    """Raises for options that would change the result and that no operator here has."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"operator {kernel} is called with {name}, which cannot be compiled")


def _causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
                      return_final_states: bool = False, final_states_out: Any = None, activation: str | None = None,
                      cu_seqlens: Any = None, **_: Any) -> Any:  # fmt: skip
    _refuse("causal_conv1d_fn", seq_idx=seq_idx, initial_states=initial_states, cu_seqlens=cu_seqlens,
            return_final_states=return_final_states, final_states_out=final_states_out)  # fmt: skip
    silu = activation in ("silu", "swish")
    y = torch.ops.llmc.causal_conv(x, weight, bias, "silu" if silu else None)
    return y if silu or activation is None else ACT2FN[activation](y)


def _mamba_chunk_scan_combined(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, z: Any = None,
                               dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None,
                               cu_seqlens: Any = None, dt_softplus: bool = False,
                               dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
                               return_varlen_states: bool = False, **_: Any) -> Any:  # fmt: skip
    _refuse("mamba_chunk_scan_combined", initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens,
            return_final_states=return_final_states, return_varlen_states=return_varlen_states)  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    low, high = dt_limit
    if low > 0 or not dt_softplus:  # softplus is above zero already
        dt = torch.clamp(dt, min=low)
    if high != float("inf"):
        dt = torch.clamp(dt, max=high)
    y = torch.ops.llmc.ssd_scan(x, dt, A, B, C, D)
    return y if z is None else y * F.silu(z)


def _selective_scan_fn(u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
                       delta_softplus: bool = False, return_last_state: bool = False, **_: Any) -> Any:  # fmt: skip
    _refuse("selective_scan_fn", return_last_state=return_last_state)
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    y = torch.ops.llmc.selective_scan(u, delta, A, B, C, D)
    return y if z is None else y * F.silu(z)


def _delta_rule(kernel: str) -> Callable[..., Any]:
    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
             output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
             **_: Any) -> Any:  # fmt: skip
        _refuse(kernel, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.llmc.gated_delta(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel), None

    return rule


#: Kernel -> what stands for it. Each takes that kernel's arguments; positions count, as models name them differently.
_KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "mamba_chunk_scan_combined": _mamba_chunk_scan_combined,
    "selective_scan_fn": _selective_scan_fn,
    "chunk_gated_delta_rule": _delta_rule("chunk_gated_delta_rule"),
    "chunk_kda": _delta_rule("chunk_kda"),
}


def _kernel_of(value: Any) -> str | None:
    """The kernel that a marked function is the fallback of; the mark keeps both in its closure."""
    if not inspect.isfunction(value) or "torch_function" not in value.__code__.co_freevars:
        return None
    return inspect.getclosurevars(value).nonlocals.get("func_name")


@contextlib.contextmanager
def recurrences(model: torch.nn.Module) -> Iterator[None]:
    """Replaces the functions in the Python modules that the model's classes were defined in, and puts them back."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    before = []
    for home in (sys.modules[name] for name in sorted(names)):
        before += [(home, n, v, k) for n, v in vars(home).items() if (k := _kernel_of(v)) in _KERNELS]
    try:
        for home, name, _, kernel in before:
            setattr(home, name, _KERNELS[kernel])
        yield
    finally:
        for home, name, function, _ in before:
            setattr(home, name, function)
