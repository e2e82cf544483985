"""Kernels as TensorRT's ahead-of-time plug-ins. Comes in: `PluginKernel`s, TensorRT's module of plug-ins. Goes out:
what a network takes as a layer. Must not know: operators, networks.

See https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/extending-custom-layers.html. TensorRT reads
the functions' signatures, which depend on the kernel: they are given as `__signature__`.

`KernelLaunchParams` tells with how much shared memory a block is launched, and nothing in that interface raises what a
kernel may have, as cuFuncSetAttribute does. Without that the driver refuses to launch with more than SHARED_MEMORY.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from types import GenericAlias
from typing import Any

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import Dim
from llmc.builder.cuda.variant import Variant
from llmc.builder.trt.plugin_kernel import POOL, WRITTEN, PluginKernel
from llmc.builder.trt.ptx import Ptx
from llmc.plugins.cuda.call import Product

NAMESPACE = "llmc"
#: Bytes of shared memory that a block of any kernel has, static and dynamic together (CUDA C++ Programming Guide).
SHARED_MEMORY = 48 << 10
#: A number of the step -> the input, and its axis, that is as long.
_SIZES = {"T": ("in0", 0), "num_seqs": ("context_len", 0), "table_stride": ("block_tables", 1)}


class AotPlugins:
    """`trtp` is the module `tensorrt.plugin`, whose registry is the process's own, `f32` TensorRT's name of that dtype;
    `compile_ptx` compiles variants. Kernels that are alike are one plug-in.
    """

    def __init__(self, trtp: Any, f32: Any, compile_ptx: Callable[[Sequence[Variant]], list[Ptx]]) -> None:
        self._trtp, self._f32, self._compile = trtp, f32, compile_ptx

    def register(
        self, operator: str, kernel: PluginKernel, compiled: Variant, shapes: Sequence[tuple[Dim, ...]]
    ) -> Callable[..., Any]:
        """The plug-in as a function of tensors. `shapes`: those of the f32 results, over T. Raises UnsupportedError for
        a kernel that needs more shared memory than a plug-in has.
        """
        name = f"{operator}_{compiled.key(str(shapes), repr(kernel.call.grid))[:12]}"
        found = getattr(getattr(self._trtp.op, NAMESPACE, None), name, None)
        if found is None:
            self._define(f"{NAMESPACE}::{name}", kernel, compiled, shapes)
            found = getattr(getattr(self._trtp.op, NAMESPACE), name)
        plugin: Callable[..., Any] = found
        return plugin

    def _define(
        self, identity: str, kernel: PluginKernel, compiled: Variant, shapes: Sequence[tuple[Dim, ...]]
    ) -> None:
        trtp = self._trtp
        ptx = self._fitting(compiled)
        if ptx.parameters != (*kernel.inputs, *kernel.numbers, *kernel.outputs):
            raise ValueError(f"{compiled.kernel} takes {', '.join(ptx.parameters)}, which is no plug-in's order")

        def describe(*inputs: Any) -> tuple[Any, ...]:
            sizes = _Sizes(trtp, kernel, inputs)
            rows = [trtp.from_shape_expr(tuple(map(sizes.dim, shape)), self._f32) for shape in shapes]
            pool = [inputs[kernel.inputs.index(POOL)].aliased()] if WRITTEN in kernel.outputs else []
            return (*rows, *pool)

        def launch(*given: Any) -> tuple[Any, ...]:
            sizes = _Sizes(trtp, kernel, given)
            how = trtp.KernelLaunchParams()
            axes = [sizes.axis(axis) for axis in kernel.call.grid] + [1, 1]
            how.grid_x = axes[0] * ptx.num_ctas if ptx.num_ctas > 1 else axes[0]
            how.grid_y, how.grid_z = axes[1:3]
            how.block_x, how.shared_mem = ptx.threads, ptx.shared
            numbers = trtp.SymIntExprs(len(kernel.numbers))
            for i, symbol in enumerate(kernel.numbers):
                numbers[i] = trtp.SymInt32(sizes.dim(symbol))
            return ptx.entry, ptx.text, how, numbers

        tensors = [_parameter(name, trtp.TensorDesc) for name in kernel.inputs]
        results = GenericAlias(tuple, (trtp.TensorDesc,) * len(kernel.outputs))
        _declare(describe, tensors, results)
        rest = [_parameter("outputs", results), _parameter("tactic", int)]
        answer = GenericAlias(tuple, (str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs))
        _declare(launch, [*tensors, *rest], answer)
        trtp.register(identity)(describe)
        trtp.aot_impl(identity)(launch)

    def _fitting(self, compiled: Variant) -> Ptx:
        """With as many stages as the shared memory of a plug-in has room for: their number changes no result."""
        for stages in range(compiled.num_stages, 0, -1):
            (ptx,) = self._compile([replace(compiled, num_stages=stages)])
            if (needed := ptx.shared + ptx.static_shared) <= SHARED_MEMORY:
                return ptx
        raise UnsupportedError(
            f"{compiled.kernel} needs {needed} bytes of shared memory, and TensorRT launches a plug-in with "
            f"{SHARED_MEMORY} at most; --target cuda:sm_{compiled.sm} launches it with more"
        )


class _Sizes:
    """Numbers of a step as TensorRT's symbolic expressions of its inputs' shapes."""

    def __init__(self, trtp: Any, kernel: PluginKernel, inputs: Sequence[Any]) -> None:
        self._trtp, self._places, self._inputs = trtp, kernel.inputs, inputs

    def dim(self, dim: Dim) -> Any:
        """A number as it is, a symbol as the length of an input."""
        if isinstance(dim, int):
            return dim
        name, axis = _SIZES[dim]
        return self._inputs[self._places.index(name)].shape_expr[axis]

    def axis(self, products: tuple[Product, ...]) -> Any:
        """The sum of products that an axis of a grid is."""
        terms = sorted((self._product(product) for product in products), key=lambda term: isinstance(term, int))
        total = terms[0]
        for term in terms[1:]:  # symbolic ones first: a number cannot be added to one
            total = total + term
        return total

    def _product(self, product: Product) -> Any:
        number, symbol = 1, None
        for dim in product.dims:
            if isinstance(dim, int):
                number *= dim
            else:
                symbol = self.dim(dim) if symbol is None else symbol * self.dim(dim)
        if symbol is None:
            return -(-number // product.divisor)
        value = symbol * number if number > 1 else symbol
        return self._trtp.cdiv(value, product.divisor) if product.divisor > 1 else value


def _parameter(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _declare(function: Callable[..., Any], parameters: Sequence[Parameter], result: Any) -> None:
    function.__signature__ = Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
