"""A launch of a Triton kernel in the form that TensorRT's ahead-of-time plug-ins take.

Comes in: a `CudaCall`, the width of its rows. Goes out: `PluginKernel`. Must not know: TensorRT, Triton, networks.

Such a plug-in is one launch, which is handed pointers to its inputs, i32 numbers, and pointers to its outputs, in this
order; there are no floats among its arguments, and no memory of its own. So a kernel is generated around the call's
own: it has its parameters in that order, and what does not change from step to step as constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc.artifacts.types import NUMPY_DTYPES
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, CudaCall, Pool, StepArray, Symbol

#: The keys and values of a layer, as the kernel takes them, and as a kernel that writes them gives them on.
POOL, WRITTEN = "pool", "pool_written"


@dataclass(frozen=True)
class PluginKernel:
    """`call`: the generated kernel, its arguments in the order `inputs`, `numbers`, `outputs`. Values are named in0 and
    out0 by their index, arrays and numbers of a step as they are.
    """

    call: CudaCall
    inputs: tuple[str, ...]
    numbers: tuple[str, ...]
    outputs: tuple[str, ...]


def plugin_kernel(call: CudaCall, strides: Mapping[RowStride, int], writes: bool) -> PluginKernel:
    """`strides`: elements from row to row. `writes`: whether the kernel changes the pool. Raises ValueError for a
    launch with memory of its own.
    """
    inputs: dict[str, Arg] = {}
    numbers: dict[str, Arg] = {}
    outputs: dict[str, Arg] = {}
    constants: dict[str, int | float] = {}
    passed: dict[str, str] = {}
    for name, arg in call.args.items():
        match arg:
            case Pointer(side, index):
                passed[name] = f"{side}{index}"
                (inputs if side == "in" else outputs)[passed[name]] = arg
            case StepArray(array):
                passed[name] = array
                inputs[array] = arg
            case Pool(offset=offset, dtype=dtype):
                passed[name] = f"{POOL} + {offset // NUMPY_DTYPES[dtype].itemsize}"
                inputs[POOL] = replace(arg, offset=0)
            case Symbol(symbol):
                passed[name] = symbol
                numbers[symbol] = arg
            case RowStride():
                passed[name] = name
                constants[name] = strides[arg]
            case int() | float():
                passed[name] = name
                constants[name] = arg
            case _:
                raise ValueError(
                    f"{call.kernel} has memory of its own, and TensorRT gives a plug-in none ahead of time"
                )
    if writes:
        outputs[WRITTEN] = inputs[POOL]
    made = CudaCall(
        kernel=f"plugin:plugin_{_name(call)}",
        args={**inputs, **numbers, **outputs},
        constexprs={**call.constexprs, **constants},
        grid=call.grid,
        num_warps=call.num_warps,
        num_stages=call.num_stages,
        source=_source(call, [*inputs, *numbers, *outputs], [*call.constexprs, *constants], passed),
    )
    return PluginKernel(made, tuple(inputs), tuple(numbers), tuple(outputs))


def _name(call: CudaCall) -> str:
    return call.kernel.partition(":")[2]


def _source(call: CudaCall, names: list[str], constants: list[str], passed: Mapping[str, str]) -> str:
    """The text of a module with the call's kernel and the one around it."""
    module, _, kernel = call.kernel.partition(":")
    own = call.source or f"import triton\nimport triton.language as tl\n\nfrom llmc.plugins.{module} import {kernel}\n"
    parameters = ", ".join([*names, *(f"{name}: tl.constexpr" for name in constants)])
    arguments = [*passed.items(), *((name, name) for name in call.constexprs)]
    body = ", ".join(f"{name}={value}" for name, value in arguments)
    return f"{own}\n\n@triton.jit\ndef plugin_{kernel}({parameters}):\n    {kernel}({body})\n"
