"""What a cubin is compiled from: a kernel, the types of its arguments, its constants and the architecture.

Comes in: a `CudaCall`, the dtypes and strides that lowering gave its values. Goes out: `Variant`, which launches share
whose code is the same. Must not know: Triton, graphs, places in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.cuda.modules import module_texts, parameters
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import TRITON_TYPES, Arg, CudaCall, Pool, Space, States, StepArray, Symbol, Temporary

Constant = int | float | bool | str | None

#: What every pointer and every constant that is declared divisible is a multiple of: bytes, or elements.
ALIGNMENT = 16
#: The first architecture whose instructions know E4M3.
FP8_SM = 89


@dataclass(frozen=True)
class Variant:
    """`signature`: each parameter as it is declared, with Triton's type of it or "constexpr". `constexprs`: their
    values, in that order. `divisible`: parameters that are multiples of ALIGNMENT, as pointers in bytes.
    """

    sm: int
    kernel: str
    source: str | None
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Constant], ...]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a launch passes, in order: the parameters without constexprs."""
        return tuple(name for name, kind in self.signature if kind != "constexpr")

    def key(self, *versions: str) -> str:
        """A hex digest over all that decides about the code: the kernel's modules and `versions` too."""
        own = [
            self.sm,
            self.kernel,
            self.signature,
            self.constexprs,
            self.divisible,
            self.num_warps,
            self.num_stages,
        ]
        parts = [repr(own), *module_texts(self.kernel, self.source), *versions]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def variant(
    call: CudaCall,
    sm: int,
    dtypes: Mapping[Pointer, str],
    strides: Mapping[RowStride, int],
    unaligned: Set[Pointer] = frozenset(),
) -> Variant:
    """`dtypes`: in which dtype each input and output that `call` names lies in memory; `strides`: elements from row to
    row; `unaligned`: pointers that are no multiple of ALIGNMENT bytes.

    Raises ValueError where the arguments are not the kernel's parameters, UnsupportedError for FP8 before sm_89.
    """
    declared = parameters(call.kernel, call.source)
    given = [*call.args, *call.constexprs]
    if sorted(given) != sorted(declared):
        raise ValueError(f"{call.kernel} takes {', '.join(declared)}; the launch names {', '.join(given)}")
    types = {name: _type(arg, dtypes) for name, arg in call.args.items()}
    if sm < FP8_SM and f"*{TRITON_TYPES['f8e4m3']}" in types.values():
        raise UnsupportedError(
            f"cuda:sm_{sm} has no FP8 (kernel {call.kernel}): build for sm_{FP8_SM} or later, or with a precision "
            "and a cache of bf16"
        )
    return Variant(
        sm=sm,
        kernel=call.kernel,
        source=call.source,
        signature=tuple((name, types.get(name, "constexpr")) for name in declared),
        constexprs=tuple((name, call.constexprs[name]) for name in declared if name in call.constexprs),
        divisible=tuple(
            name
            for name in declared
            if name in call.args and (name in call.multiples_of_16 or _divisible(call.args[name], strides, unaligned))
        ),
        num_warps=call.num_warps,
        num_stages=call.num_stages,
    )


def _type(arg: Arg, dtypes: Mapping[Pointer, str]) -> str:
    """What Triton calls the type of an argument."""
    match arg:
        case Pointer():
            return f"*{TRITON_TYPES[dtypes[arg]]}"
        case Pool(dtype=dtype) | Temporary(dtype=dtype) | Space(dtype=dtype):
            return f"*{TRITON_TYPES[dtype]}"
        case StepArray():
            return "*i32"
        case States():
            return "*fp32"
        case float():
            return "fp32"
    return "i32"


def _divisible(arg: Arg, strides: Mapping[RowStride, int], unaligned: Set[Pointer]) -> bool:
    match arg:
        case Pointer():
            return arg not in unaligned
        case Pool(offset=offset):
            return offset % ALIGNMENT == 0
        case RowStride():
            return strides[arg] % ALIGNMENT == 0
        case int():
            return arg % ALIGNMENT == 0
        case float() | Symbol():
            return False
    return True
