"""The launches of a program, ready to be made: arguments packed once, grids from a step's numbers.

Comes in: `Steps`, functions, addresses. Goes out: launches on a stream. Must not know: steps, ranks, graphs.

A launch is given the address of an array with the address of each argument. Numbers of a step stand in one cell each,
which all launches point to: a step changes four cells and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.artifacts.cuda_program import SYMBOLS, Address, AllReduce, Argument, Float, Int, Kernel, Launch, Steps, Symbol
from llmc.runtime.cuda.driver import Event, Stream

#: Sums elements of a dtype over the ranks where they lie: (address, count, dtype, stream).
AllReducer = Callable[[int, int, str, Stream], None]


class Cells:
    """SYMBOLS as i32s in memory."""

    def __init__(self) -> None:
        self.values = {name: ctypes.c_int32() for name in SYMBOLS}

    def set(self, symbols: Mapping[str, int]) -> None:
        """For the launches that come."""
        for name, cell in self.values.items():
            cell.value = symbols[name]


class _Ready:
    """A launch with its arguments in memory."""

    def __init__(self, launch: Launch, kernel: Kernel, function: Any, address: Callable[[Address], int], cells: Cells):
        self.launch, self.kernel, self.function = launch, kernel, function
        self._cells = [_cell(arg, address, cells) for arg in launch.args]  # kept alive
        self._pointers = (ctypes.c_void_p * len(self._cells))(*map(ctypes.addressof, self._cells))
        self.arguments = ctypes.addressof(self._pointers)


def _cell(arg: Argument, address: Callable[[Address], int], cells: Cells) -> Any:
    match arg:
        case Address():
            return ctypes.c_uint64(address(arg))
        case Symbol(name):
            return cells.values[name]
        case Int(value):
            return ctypes.c_int32(value)
        case Float(value):
            return ctypes.c_float(value)
    raise AssertionError(arg)


class Launches:
    """Those of one kind of steps."""

    def __init__(
        self,
        steps: Steps,
        kernels: Sequence[Kernel],
        functions: Sequence[Any],
        address: Callable[[Address], int],
        all_reduce: AllReducer,
    ) -> None:
        self.steps, self._address, self._all_reduce = steps, address, all_reduce
        self._cells = Cells()
        self._ready = [
            item
            if isinstance(item, AllReduce)
            else _Ready(item, kernels[item.kernel], functions[item.kernel], address, self._cells)
            for item in steps.launches
        ]

    def run(self, stream: Stream, symbols: Mapping[str, int], events: Sequence[Event] | None = None) -> None:
        """Launches all, in order; with `events`, one more than launches, notes when each began and the last ended."""
        self._cells.set(symbols)
        for number, item in enumerate(self._ready):
            if events is not None:
                events[number].record(stream)
            if isinstance(item, AllReduce):
                count = item.count.value(symbols)
                if count:
                    self._all_reduce(self._address(item.at), count, item.dtype, stream)
                continue
            x, y, z = item.launch.blocks(symbols)
            if x and y and z:
                kernel = item.kernel
                blocks = (x * kernel.num_ctas, y, z)
                stream.launch(item.function, blocks, kernel.threads, kernel.shared, item.arguments)
        if events is not None:
            events[len(self._ready)].record(stream)
