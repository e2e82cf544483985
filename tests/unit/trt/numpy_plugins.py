"""A stand-in for the module `tensorrt.plugin`: holds functions to the form that TensorRT asks of them, and runs a
plug-in's kernel in Triton's interpreter, with the grid and the arguments that it names.

Comes in: `Variant`s that are to be "compiled". Goes out: plug-ins whose layers compute. Sizes are expressions of known
value, which behave as TensorRT's do: a number stands right of an operator, and nothing is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmc.builder.cuda.interpret import Address, Launch
from llmc.builder.cuda.variant import Variant
from llmc.builder.trt.ptx import Ptx
from tests.unit.cuda.backend import interpreter
from tests.unit.trt.numpy_tensorrt import NUMPY, Tensor

#: Shared memory of a block that a launch may have without asking the driver for more, and what the code names of it.
MOST_SHARED, STATIC_SHARED = 49152, 1024
_LLMC = {"FLOAT": "f32", "BF16": "bf16", "FP8": "f8e4m3", "INT32": "i32"}


@dataclass(frozen=True, eq=False)
class Size:
    """A symbolic number."""

    value: int

    def __add__(self, other: Size | int) -> Size:
        return Size(self.value + _value(other))

    def __mul__(self, other: Size | int) -> Size:
        return Size(self.value * _value(other))


def _value(size: Size | int) -> int:
    return size.value if isinstance(size, Size) else size


@dataclass
class TensorDesc:
    """What a plug-in learns of a tensor."""

    shape_expr: tuple[Size | int, ...]
    dtype: Any
    alias_of: TensorDesc | None = None

    def aliased(self) -> TensorDesc:
        return TensorDesc(self.shape_expr, self.dtype, self)


@dataclass
class KernelLaunchParams:
    grid_x: Size | int = 1
    grid_y: Size | int = 1
    grid_z: Size | int = 1
    block_x: Size | int = 1
    shared_mem: Size | int = 0


class SymIntExprs(list[Any]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


@dataclass
class PluginLayer:
    """What a network has of a plug-in."""

    results: list[Tensor]
    name: str = ""
    type: Any = field(default_factory=lambda: SimpleNamespace(name="PLUGIN_V3"))

    def get_output(self, index: int) -> Tensor:
        return self.results[index]


@dataclass
class Definition:
    """A plug-in; called with tensors it is what `add_plugin` takes."""

    describe: Callable[..., Any]
    launch: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Definition, tuple[Tensor, ...]]:
        assert len(tensors) == len(inspect.signature(self.describe).parameters)
        return self, tensors


@dataclass
class Plugins:
    """`compiled`: the variants by the text that stands for their PTX; `launches`: what was run; `stage_bytes`: what
    each stage of a kernel takes of shared memory.
    """

    __name__ = "tensorrt.plugin"
    TensorDesc, KernelLaunchParams, SymIntExprs = TensorDesc, KernelLaunchParams, SymIntExprs
    op: SimpleNamespace = field(default_factory=SimpleNamespace)
    compiled: dict[str, Variant] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    stage_bytes: int = 0

    def compile(self, variants: Sequence[Variant]) -> list[Ptx]:
        """In the place of `compile_ptx`."""
        made = []
        for variant in variants:
            text = f"ptx {len(self.compiled)}"
            self.compiled[text] = variant
            entry, threads = variant.kernel.partition(":")[2], 32 * variant.num_warps
            shared = self.stage_bytes * variant.num_stages
            made.append(Ptx(text, entry, threads, 1, shared, STATIC_SHARED, variant.arguments))
        return made

    def SymInt32(self, value: Size | int) -> Size:
        return Size(_value(value))

    def cdiv(self, first: Size, second: int) -> Size:
        return Size(-(-first.value // second))

    def from_shape_expr(self, shape: tuple[Size | int, ...], dtype: Any) -> TensorDesc:
        return TensorDesc(shape, dtype)

    def register(self, identity: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            space, name = identity.split("::")
            signature = inspect.signature(function)
            assert all(p.annotation is TensorDesc for p in signature.parameters.values())
            assert set(signature.return_annotation.__args__) == {TensorDesc}
            if not hasattr(self.op, space):
                setattr(self.op, space, SimpleNamespace())
            assert not hasattr(getattr(self.op, space), name)
            setattr(getattr(self.op, space), name, Definition(function))
            return function

        return decorate

    def aot_impl(self, identity: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            space, name = identity.split("::")
            definition = getattr(getattr(self.op, space), name)
            own = list(inspect.signature(definition.describe).parameters)
            signature = inspect.signature(function)
            assert list(signature.parameters) == [*own, "outputs", "tactic"]
            assert signature.return_annotation.__args__[2:] == (KernelLaunchParams, SymIntExprs)
            definition.launch = function
            return function

        return decorate

    def layer(self, definition: Definition, tensors: tuple[Tensor, ...]) -> PluginLayer:
        """The layer of a network, whose kernel has run."""
        assert definition.launch is not None
        descs = [TensorDesc(tuple(map(Size, t.shape)), t.dtype) for t in tensors]
        outputs = definition.describe(*descs)
        entry, text, how, numbers = definition.launch(*descs, outputs, 0)
        variant = self.compiled[text]
        assert entry == variant.kernel.partition(":")[2]
        assert _value(how.block_x) == 32 * variant.num_warps
        assert _value(how.shared_mem) == self.stage_bytes * variant.num_stages <= MOST_SHARED - STATIC_SHARED
        arguments, results = self._place(tensors, descs, outputs)
        given = [*arguments, *(_value(number) for number in numbers), *results]
        grid = (_value(how.grid_x), _value(how.grid_y), _value(how.grid_z))
        launch = Launch(
            variant.kernel,
            dict(zip(variant.arguments, given, strict=True)),
            dict(variant.constexprs),
            grid,
            variant.source,
        )
        interpreter().run([launch])
        self.launches.append(launch)
        arrays = []
        for desc, address in zip(outputs, results, strict=True):
            raw = interpreter().memory[address.offset : address.offset + address.nbytes].copy()
            shape = [_value(n) for n in desc.shape_expr]
            arrays.append(Tensor(raw.view(NUMPY[desc.dtype.name]).reshape(shape), desc.dtype))
        return PluginLayer(arrays)

    def _place(
        self, tensors: Sequence[Tensor], descs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]
    ) -> tuple[list[Address], list[Address]]:
        """Puts the inputs into the interpreter's memory; where they and the outputs are."""
        memory, top = interpreter().memory, 4096
        arguments, results = [], []
        for tensor in tensors:
            raw = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
            arguments.append(Address(top, raw.size, _LLMC[tensor.dtype.name]))
            memory[top : top + raw.size] = raw
            top += _room(raw.size)
        for desc in outputs:
            if desc.alias_of is not None:
                results.append(arguments[next(i for i, own in enumerate(descs) if own is desc.alias_of)])
                continue
            size = int(np.prod([_value(n) for n in desc.shape_expr])) * NUMPY[desc.dtype.name].itemsize
            results.append(Address(top, size, _LLMC[desc.dtype.name]))
            memory[top : top + size] = 0xFF
            top += _room(size)
        return arguments, results


def _room(nbytes: int) -> int:
    """What lies between the starts of two values."""
    return -(-nbytes // 256) * 256 + 4096
