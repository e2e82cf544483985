"""Runs the launches of `plugins/<operator>/cuda.py` on numpy arrays, as an executor would, and compares them with the
operator's reference: in the interpreter, or compiled on a GPU (see `backend`). What kernel tests of the cuda targets
share.

Every byte that nobody has written is 0xFF, which is NaN in every float: what a kernel reads without right shows. Rows
lie further apart than they are wide where a launch asks for their distance; blocks hold other layers' bytes too, and
slots those of other states.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.cuda.interpret import Address, resolve
from llmc.builder.cuda.variant import Variant, variant
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import (
    Arg,
    Collective,
    CudaCall,
    CudaEnv,
    Pool,
    States,
    StepArray,
    Symbol,
    Temporary,
)
from llmc.plugins.operator import Operator, StepContext
from llmc.profiles import load_target
from tests.unit.cuda.backend import MEMORY, architecture, memory, on_gpu, run

#: Elements between the rows of matrices that are no part of them.
GAP = 16
#: Bytes of a block (a slot) before a layer's (a state's) part.
BEFORE = 256
UNWRITTEN = 0xFF
#: What a sum of E4M3 products may differ by on a GPU, whose tensor cores keep 14 bits of such a sum on the way.
FP8_SUM = 2e-3


@dataclass
class Step:
    """What launches know of a step: the context, `rows` (S), and how many padded sequences follow its own."""

    context: StepContext
    rows: int = 0
    padded: int = 0
    ids: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return int(self.context.query_start[-1]) + self.padded

    def arrays(self) -> dict[str, np.ndarray]:
        """STEP_ARRAYS, padded sequences included: their block tables and slots lead nowhere."""
        c = self.context
        counts = np.diff(c.query_start)
        first = np.repeat(c.context_len - c.query_start[1:], counts)
        tables = c.block_tables.reshape(len(c.context_len), -1)
        wrong = np.full((self.padded, tables.shape[1]), -(2**30))
        slots = c.state_slots if len(c.state_slots) else np.zeros(len(counts))
        arrays = {
            "ids": np.zeros(self.tokens) if self.ids is None else self.ids,
            "positions": np.append(first + np.arange(len(first)), [-1] * self.padded),
            "sequence": np.append(np.repeat(np.arange(len(counts)), counts), len(counts) + np.arange(self.padded)),
            "query_start": np.append(c.query_start, c.query_start[-1] + 1 + np.arange(self.padded)),
            "context_len": np.append(c.context_len, [0] * self.padded),
            "block_tables": np.concatenate([tables, wrong]),
            "state_slots": np.append(slots, [-(2**30)] * self.padded),
            "rows": np.arange(self.rows),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def symbols(self) -> dict[str, int]:
        """SYMBOLS and `table_stride`."""
        c = self.context
        return {
            "T": self.tokens,
            "S": self.rows,
            "num_seqs": len(c.context_len) + self.padded,
            "max_context": int(max(c.context_len, default=0)),
            "table_stride": int(c.block_tables.shape[-1]),
        }


@dataclass
class Value:
    """An input or output in memory."""

    address: Address
    stride: int
    view: np.ndarray


@dataclass
class Machine:
    """Lays values out in the memory and answers what arguments are."""

    step: Step
    env: CudaEnv
    strided: frozenset[RowStride]
    top: int = 4096
    values: dict[Pointer, Value] = field(default_factory=dict)
    arrays: dict[str, Address] = field(default_factory=dict)
    temporaries: dict[str, Address] = field(default_factory=dict)
    pool: Address | None = None
    slots: Address | None = None

    def space(self, nbytes: int, dtype: str) -> Address:
        """New memory, unwritten."""
        address = Address(self.top, nbytes, dtype)
        self.top += -(-nbytes // 256) * 256 + 256
        assert self.top < MEMORY
        memory()[address.offset : self.top] = UNWRITTEN
        return address

    def bytes(self, address: Address) -> np.ndarray:
        return memory()[address.offset : address.offset + address.nbytes]

    def value(self, pointer: Pointer, kind: TensorType, array: np.ndarray | None) -> None:
        """Places an input, or room for an output; an axis named by a symbol makes rows."""
        dtype = self.env.stored.get((pointer.side, pointer.index), kind.dtype)
        symbols = self.step.symbols()
        shape = [symbols[d] if isinstance(d, str) else d for d in kind.shape]
        if kind.dtype == "u4":  # two in a byte, rows begin with one
            dtype, shape[-1] = "u8", -(-shape[-1] // 2)
            array = None if array is None else _nibbles(array)
        width = prod(shape[1:])
        rows_apart = RowStride(pointer.side, pointer.index) in self.strided and isinstance(kind.shape[0], str)
        apart = GAP if rows_apart else 0
        item = NUMPY_DTYPES[dtype].itemsize
        stride = width + apart
        rows = shape[0] if shape else 1
        address = self.space(max(0, (rows - 1) * stride + width) * item, kind.dtype if dtype == "u8" else dtype)
        room = memory()[address.offset : address.offset + rows * stride * item]
        table = room.view(NUMPY_DTYPES[dtype]).reshape(rows, stride)
        if array is not None:
            flat = np.asarray(array).reshape(len(array) if array.ndim else 1, -1)
            table[: len(flat), :width] = flat.astype(table.dtype)
        self.values[pointer] = Value(address, stride, table[:, :width].reshape([*shape[:1], *shape[1:]] or [1]))

    def argument(self, arg: Arg) -> Address | int | float:
        """What the executor would pass."""
        match arg:
            case Pointer():
                return self.values[arg].address
            case RowStride(side, index):
                return self.values[Pointer(side, index)].stride
            case StepArray(name):
                return self.arrays[name]
            case Symbol(name):
                return self.step.symbols()[name]
            case Pool(offset=offset, dtype=dtype):
                assert self.pool is not None
                return Address(self.pool.offset + BEFORE + offset, self.pool.nbytes - BEFORE - offset, dtype)
            case States():
                assert self.slots is not None
                return Address(self.slots.offset + BEFORE, self.slots.nbytes - BEFORE, "f32")
            case Temporary(name, dtype, elements):
                count = sum(product.value(self.step.symbols()) for product in elements)
                if name not in self.temporaries:
                    self.temporaries[name] = self.space(count * NUMPY_DTYPES[dtype].itemsize, dtype)
                return self.temporaries[name]
        return arg

    def variant(self, call: CudaCall) -> Variant:
        """What a call is compiled from. Everything lies on a multiple of 256 bytes."""
        dtypes = {pointer: value.address.dtype for pointer, value in self.values.items()}
        strides = {RowStride(pointer.side, pointer.index): value.stride for pointer, value in self.values.items()}
        return variant(call, self.env.sm, dtypes, strides)


def _nibbles(array: np.ndarray) -> np.ndarray:
    """u4[..,K] as bytes u8[..,ceil(K/2)]."""
    even = np.pad(array.astype(np.uint8), [*[(0, 0)] * (array.ndim - 1), (0, array.shape[-1] % 2)])
    return even[..., ::2] | even[..., 1::2] << 4


def launches(operator: Operator, attrs: Any, types: Sequence[TensorType], env: CudaEnv) -> tuple[Any, ...]:
    """What the plug-in launches, by the target's tactics unless the environment has some."""
    if not env.tactics:
        env = replace(env, tactics=load_target(f"cuda:sm_{env.sm}").tactics.get(operator.name, {}))
    module = importlib.import_module(f"llmc.plugins.{operator.name}.cuda")
    return tuple(module.launch(attrs, types, operator.infer(attrs, types), env))


def execute(
    operator: Operator, attrs: Any, types: Sequence[TensorType], inputs: Sequence[np.ndarray], step: Step, env: CudaEnv
) -> list[np.ndarray]:
    """Runs the launches; returns the outputs as they lie in memory, without padded rows. Writes `step.context`'s cache
    and states, as the reference does. `types` have symbols where rows are.
    """
    calls = [call for call in launches(operator, attrs, types, env) if not isinstance(call, Collective)]
    asked = {arg for call in calls for arg in call.args.values() if isinstance(arg, RowStride)}
    machine = Machine(step, env, frozenset(asked))
    for name, array in step.arrays().items():
        machine.arrays[name] = machine.space(array.nbytes, "i32")
        machine.bytes(machine.arrays[name])[:] = array.reshape(-1).view(np.uint8)
    for index, (kind, array) in enumerate(zip(types, inputs, strict=True)):
        machine.value(Pointer("in", index), kind, array)
    outputs = operator.infer(attrs, types)
    for index, kind in enumerate(outputs):
        machine.value(Pointer("out", index), kind, None)
    caches, states = _place_cache(machine), _place_states(machine)
    run(
        [resolve(call, machine.argument, step.symbols()) for call in calls],
        lambda: [machine.variant(call) for call in calls],
    )
    for array, view in [*caches, *states]:
        array[...] = view
    results = []
    for index, kind in enumerate(outputs):
        value = machine.values[Pointer("out", index)]
        rows = len(value.view) - (step.padded if kind.shape[:1] in (("T",), ("S",)) else 0)
        results.append(value.view[:rows].copy())
        if RowStride("out", index) in machine.strided:
            _check_gaps(value)
    return results


def _check_gaps(value: Value) -> None:
    """Between the rows of an output nothing was written."""
    flat = memory()[value.address.offset :].view(value.view.dtype)
    width = prod(value.view.shape[1:])
    for row in range(len(value.view) - 1):
        gap = flat[row * value.stride + width : (row + 1) * value.stride]
        assert (gap.view(np.uint8) == UNWRITTEN).all()


def layer_bytes(step: Step, layer: int) -> int:
    """One layer's part of a block."""
    cache = step.context.kv[layer]
    return cache.keys[0].nbytes + cache.values[0].nbytes


def environment(step: Step, decode: bool = False, sm: int | None = None, **more: Any) -> CudaEnv:
    """A `CudaEnv` that fits the step and its memory here."""
    c = step.context
    given: dict[str, Any] = {"block_size": c.block_size, "max_context": 4096, "max_sequences": 64}
    for layer, cache in c.kv.items():
        given["kv_dtype"] = next(name for name, kind in NUMPY_DTYPES.items() if kind == cache.keys.dtype)
        given["kv_block_bytes"] = layer_bytes(step, layer) + 2 * BEFORE
    for state in c.states.values():
        given["slot_bytes"] = state[0].nbytes + 2 * BEFORE
    tokens = (1, 64) if decode else (1, 4096)
    return CudaEnv(**{"sm": sm or architecture(), "tokens": tokens, "decode": decode, **given, **more})


def _place_cache(machine: Machine) -> list[tuple[np.ndarray, np.ndarray]]:
    """The pool with the blocks of the one layer; pairs of the reference's array and its place, as it sees it."""
    pairs = []
    for cache in machine.step.context.kv.values():
        size = machine.env.kv_block_bytes
        machine.pool = machine.space(len(cache.keys) * size, machine.env.kv_dtype)
        blocks = machine.bytes(machine.pool).reshape(-1, size)[:, BEFORE:]
        split = cache.keys[0].nbytes
        for array, part in (
            (cache.keys, blocks[:, :split]),
            (cache.values, blocks[:, split : split + cache.values[0].nbytes]),
        ):
            if array.size:
                count, tokens, heads, width = array.shape
                place = part.view(array.dtype).reshape(count, heads, tokens, width, copy=False).swapaxes(1, 2)
                place[...] = array
                pairs.append((array, place))
    return pairs


def _place_states(machine: Machine) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = []
    for array in machine.step.context.states.values():
        size = machine.env.slot_bytes
        machine.slots = machine.space(len(array) * size, "f32")
        part = machine.bytes(machine.slots).reshape(-1, size)[:, BEFORE : BEFORE + array[0].nbytes]
        place = part.view(np.float32).reshape(array.shape, copy=False)
        place[...] = array
        pairs.append((array, place))
    return pairs


def as_stored(types: Sequence[TensorType], inputs: Sequence[np.ndarray], env: CudaEnv) -> list[np.ndarray]:
    """The inputs rounded to what lies in memory, so that the reference computes with the same numbers."""
    given = []
    for index, (kind, array) in enumerate(zip(types, inputs, strict=True)):
        dtype = NUMPY_DTYPES[env.stored.get(("in", index), kind.dtype)]
        given.append(array.astype(dtype).astype(NUMPY_DTYPES[kind.dtype]))
    return given


def check(
    operator: Operator,
    attrs: Any,
    types: Sequence[TensorType],
    inputs: Sequence[np.ndarray],
    step: Step,
    env: CudaEnv,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    cache_ulps: int = 1,
) -> list[np.ndarray]:
    """Runs both and compares outputs, cache and states; outputs in bf16 may be one rounding away. `cache_ulps`: by how
    many numbers of its dtype a cached one may differ, as a value halfway between two may fall on either side.
    """
    wanted = copy.deepcopy(step.context)
    given = as_stored(types, inputs, env)
    if on_gpu() and any(kind.dtype == "f8e4m3" for kind in types):
        rtol, atol = max(rtol, FP8_SUM), max(atol, FP8_SUM)
    expected = operator.reference(wanted, attrs, given)
    found = execute(operator, attrs, types, given, step, env)
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        dtype = env.stored.get(("out", index), "f32")
        relative = max(rtol, 2**-8) if dtype == "bf16" else rtol
        np.testing.assert_allclose(
            got.astype(np.float64).reshape(want.shape), want, relative, atol, err_msg=f"output {index}"
        )
    for layer, cache in wanted.kv.items():
        for want, got in ((cache.keys, step.context.kv[layer].keys), (cache.values, step.context.kv[layer].values)):
            apart = np.abs(ordered(want) - ordered(got))
            assert not apart.size or apart.max() <= cache_ulps, f"cached numbers {apart.max()} apart"
    for state, array in wanted.states.items():
        np.testing.assert_allclose(step.context.states[state], array, rtol, atol, err_msg=f"state {state}")
    return found


def ordered(array: np.ndarray) -> np.ndarray:
    """Floats as integers whose difference counts the numbers between them; every NaN is the same."""
    bits = array.view(f"i{array.itemsize}").astype(np.int64)
    ordered = np.where(bits < 0, -(bits & (2 ** (8 * array.itemsize - 1) - 1)), bits)
    return np.where(np.isnan(array.astype(np.float32)), 2**40, ordered)


def stored(names: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """`CudaEnv.stored`, for `environment`."""
    return {"stored": dict(names)}


def plain_step(tokens: int, rows: int = 0) -> Step:
    """A step of one sequence without cache, for operators that know nothing of sequences."""
    context = StepContext(16, np.array([0, tokens], np.int32), np.array([tokens], np.int32), np.zeros((1, 1), np.int32))
    return Step(context, rows or tokens)
