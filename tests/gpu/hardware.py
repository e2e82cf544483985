"""A GPU in the place of the interpreter: launches of kernel tests are compiled as a build compiles them, and made
through the runtime's driver.

Comes in: launches on one flat memory, what each is compiled from. Goes out: that memory as the GPU leaves it. Must not
know: operators, graphs.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from llmc.builder.cuda.compile import CudaCompiler, cubin_cache, worker_process
from llmc.builder.cuda.cubin import Cubin, resources
from llmc.builder.cuda.interpret import Address, Launch
from llmc.builder.cuda.variant import Variant
from llmc.runtime.cuda import driver
from tests.unit.cuda.backend import MEMORY, interpreter


class Hardware:
    """`memory` u8 here, and as much on GPU 0. What launches may touch is copied there and back; what lies between must
    stay as it is. Close it at the end.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.sm = driver.devices()[0].sm
        driver.open_device(0)
        self.memory = memory
        self._base = driver.allocate(memory.nbytes)
        self._stream = driver.Stream()
        self._loaded: dict[Variant, tuple[Any, Cubin]] = {}
        self._cache, self._compiler = cubin_cache(), CudaCompiler(None)
        self._open = ExitStack()
        self._worker = self._open.enter_context(worker_process(self._open.enter_context(tempfile.TemporaryDirectory())))

    def run(self, launches: Sequence[Launch], variants: Sequence[Variant]) -> None:
        """Makes them in order, and waits."""
        ready = [self._function(variant) for variant in variants]
        spans = _joined(arg for launch in launches for arg in launch.args.values() if isinstance(arg, Address))
        first, last = spans[0][0], spans[-1][1]
        host = self.memory[first:last]
        self._stream.upload(self._base + first, host.ctypes.data, last - first)
        kept = [self._launch(*pair, variant) for *pair, variant in zip(launches, ready, variants, strict=True)]
        found = np.empty_like(host)
        self._stream.download(found.ctypes.data, self._base + first, last - first)
        self._stream.wait()
        del kept  # arguments are read when a launch is made, or when it runs
        at = first
        for start, end in [*spans, (last, last)]:
            gap = slice(at - first, start - first)
            assert np.array_equal(found[gap], host[gap]), "a kernel wrote where no argument leads"
            at = end
        host[:] = found

    def _launch(self, launch: Launch, ready: tuple[Any, Cubin], variant: Variant) -> Any:
        """What the launch's arguments lie in."""
        function, cubin = ready
        cells: list[Any] = [self._cell(launch.args[name]) for name in variant.arguments]
        cells += [ctypes.c_uint64(0)] * (len(cubin.parameters) - len(cells))
        sizes = [parameter.size for parameter in resources(cubin.code).parameters]
        assert [ctypes.sizeof(cell) for cell in cells] == sizes, f"{launch.kernel}: the cubin takes {sizes}"
        pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        x, y, z = launch.grid
        if x and y and z:
            blocks = (x * cubin.num_ctas, y, z)
            self._stream.launch(function, blocks, 32 * cubin.num_warps, cubin.shared, ctypes.addressof(pointers))
        return cells, pointers

    def _cell(self, arg: Address | int | float) -> Any:
        match arg:
            case Address():
                return ctypes.c_uint64(self._base + arg.offset)
            case float():
                return ctypes.c_float(arg)
        return ctypes.c_int32(arg)

    def _function(self, variant: Variant) -> tuple[Any, Cubin]:
        """Compiled by one process that lives as long as this: Triton takes long to start."""
        if variant not in self._loaded:
            key = self._compiler.key(variant)
            if (data := self._cache.get(key)) is None:
                data = msgspec.msgpack.encode(self._worker.compile(variant).cubin)
                self._cache.put(key, data)
            cubin = msgspec.msgpack.decode(data, type=Cubin)
            assert not cubin.scratch, f"{variant.kernel} needs scratch memory"
            self._loaded[variant] = driver.load_function(cubin.code, cubin.entry, cubin.shared), cubin
        return self._loaded[variant]

    def close(self) -> None:
        """Ends the process that compiles."""
        self._open.close()


class Recorded(Hardware):
    """Of a driver that only records (fake_driver.c): what it was handed is interpreted as well, so that tests find the
    results of a GPU.
    """

    def run(self, launches: Sequence[Launch], variants: Sequence[Variant]) -> None:
        """As above, and then in the interpreter."""
        super().run(launches, variants)
        interpreter().run(launches)


def hardware(name: str) -> Hardware:
    """GPU 0, which the driver calls `name`."""
    if name.startswith("Fake"):
        return Recorded(interpreter().memory)
    return Hardware(np.frombuffer(mmap.mmap(-1, MEMORY), np.uint8))


def _joined(addresses: Any) -> list[tuple[int, int]]:
    """Bytes that belong to any of them, as spans in order."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted((a.offset, a.offset + a.nbytes) for a in addresses):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans
