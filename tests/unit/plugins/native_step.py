"""Compiles kernel calls as an engine does and runs them on numpy arrays: what kernel tests of this folder share.

A `Launch` is a `CpuCall` with its types; `build(source(launches))` compiles several into one shared object for each ISA
level; a `Rank` holds threads, scratch, cache and comm memory, and its `call` runs one launch in a step.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import C_TYPES, CpuCall, Pointer, RowStride, render
from llmc.plugins.operator import KVCache
from llmc.runtime.native import RankStruct, StepStruct
from tests.unit.plugins.compiled import ISAS, aligned, compile_library

_RUNTIME = """
#include <new>
#include <cstdlib>
struct Rank { llmc_rank rank; llmc::Pool pool; llmc::RankComm comm; llmc::Ctx ctx; int64_t began, took; };
struct Work { Rank* rank; int launch; const void* const* in; void* const* out; const int64_t* in_stride; };
extern "C" void* test_open(const llmc_rank* rank, int64_t shared, int64_t per_thread, int64_t slot_bytes) {
  if (!llmc::tiles_allowed()) return nullptr;
  llmc::RankComm comm(rank->comm, rank->rank, rank->tp, slot_bytes);
  Rank* r = new Rank{*rank, llmc::Pool(rank->threads), comm, {}, 0, 0};
  shared = llmc::whole_pages(shared), per_thread = llmc::whole_pages(per_thread);
  auto* scratch = (uint8_t*)aligned_alloc(4096, llmc::scratch_bytes(shared, per_thread, rank->threads) + 4096);
  r->ctx = {&r->rank, nullptr, rank->threads, &r->pool, &r->comm, scratch, shared, per_thread};
  return r;
}
extern "C" int64_t test_took(void* rank) { return ((Rank*)rank)->took; }
extern "C" void test_close(void* rank) { free(((Rank*)rank)->ctx.scratch_memory); delete (Rank*)rank; }
extern "C" void test_abort(uint8_t* comm) { llmc::comm_abort(comm); }
extern "C" int test_call(void* rank, const llmc_step* step, int launch, const void* const* in, void* const* out,
                         const int64_t* in_stride) {
  Rank* r = (Rank*)rank;
  r->ctx.step = step;
  Work work{r, launch, in, out, in_stride};
  r->pool.run([](void* w, int tid) {
    Rank* rank = ((Work*)w)->rank;
    rank->ctx.barrier(tid);  // as between a step's launches: all threads are awake
    if (tid == 0) rank->began = llmc::clock_ns();
    run_launch(*(Work*)w, tid);
  }, &work);
  r->took = llmc::clock_ns() - r->began;
  return r->comm.failed() ? 2 : 0;
}
"""


@dataclass(frozen=True)
class Launch:
    call: CpuCall
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]


_SYMBOLS = {"T": "int64_t(w.rank->ctx.step->num_tokens)", "S": "int64_t(w.rank->ctx.step->num_rows)"}


def _value(arg: Pointer | RowStride, launch: Launch) -> str:
    if isinstance(arg, RowStride):
        assert arg.side == "in"
        return f"w.in_stride[{arg.index}]"
    kind = C_TYPES[(launch.inputs if arg.side == "in" else launch.outputs)[arg.index].dtype]
    return f"({'const ' * (arg.side == 'in')}{kind}*)w.{arg.side}[{arg.index}]"


def _arguments(launch: Launch) -> str:
    return ", ".join(render(arg, lambda value: _value(value, launch), _SYMBOLS) for arg in launch.call.args)


def source(launches: Sequence[Launch]) -> str:
    """One C++ translation unit."""
    headers = dict.fromkeys(
        ["plugins/cpu/runtime.h", "plugins/cpu/amx_permission.h", *(launch.call.header for launch in launches)]
    )
    cases = [
        f"    case {i}: llmc::{launch.call.function}(w.rank->ctx, tid, {_arguments(launch)}); break;"
        for i, launch in enumerate(launches)
    ]
    dispatch = (
        "static void run_launch(const Work& w, int tid) {\n  switch (w.launch) {\n" + "\n".join(cases) + "\n  }\n}\n"
    )
    start = _RUNTIME.index('extern "C"')
    preludes = dict.fromkeys(launch.call.prelude for launch in launches)
    includes = [f'#include "{header}"' for header in headers]
    return "\n".join([*includes, *preludes, _RUNTIME[:start], dispatch, _RUNTIME[start:]])


@functools.cache
def build(text: str, isas: tuple[str, ...] = ISAS) -> dict[str, ctypes.CDLL]:
    """ISA level -> the text, compiled for it; both levels at once. Raises AssertionError with the compiler's words."""
    with ThreadPoolExecutor(len(isas)) as pool:
        paths = list(pool.map(lambda isa: compile_library(text, isa), isas))
    return {isa: ctypes.CDLL(str(path)) for isa, path in zip(isas, paths, strict=True)}


@dataclass
class Step:
    """`llmc_step` without ids and rows, which no kernel here reads. i32 arrays."""

    query_start: np.ndarray
    context_len: np.ndarray
    block_tables: np.ndarray
    state_slots: np.ndarray | None = None

    def struct(self) -> StepStruct:
        tables = self.block_tables
        struct = StepStruct(int(self.query_start[-1]), len(self.context_len), 0, tables.shape[1])
        struct.query_start, struct.context_len = self.query_start.ctypes.data, self.context_len.ctypes.data
        struct.block_tables = tables.ctypes.data
        struct.state_slots = None if self.state_slots is None else self.state_slots.ctypes.data
        return struct


class Rank:
    """One rank of compiled launches."""

    def __init__(
        self,
        dll: ctypes.CDLL,
        launches: Sequence[Launch],
        threads: int = 1,
        kv: np.ndarray | None = None,
        comm: tuple[int, int, np.ndarray, int] = (0, 1, np.empty(0, np.uint8), 0),
        state: np.ndarray | None = None,
    ) -> None:
        """`comm`: rank, tp, shared memory, slot bytes."""
        self.dll, self.launches, self.kv, self.state = dll, launches, kv, state
        rank, tp, self.comm, slot = comm
        struct = RankStruct(rank, tp, threads)
        struct.kv = None if kv is None else kv.ctypes.data
        struct.state = None if state is None else state.ctypes.data
        struct.comm = self.comm.ctypes.data if tp > 1 else None
        dll.test_open.restype = ctypes.c_void_p
        dll.test_open.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        dll.test_call.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        dll.test_took.argtypes, dll.test_took.restype = [ctypes.c_void_p], ctypes.c_int64
        dll.test_close.argtypes = [ctypes.c_void_p]
        shared = max(launch.call.scratch.shared for launch in launches)
        per_thread = max(launch.call.scratch.per_thread for launch in launches)
        self.handle = dll.test_open(ctypes.byref(struct), shared, per_thread, slot)

    def call(self, index: int, step: Step, inputs: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> int:
        """Runs a launch; inputs may be row-strided views. Returns what llmc_run would: 0, or 2 after a failure."""
        struct = step.struct()
        ins = (ctypes.c_void_p * max(len(inputs), 1))(*(x.ctypes.data for x in inputs))
        outs = (ctypes.c_void_p * max(len(out), 1))(*(x.ctypes.data for x in out))
        strides = (ctypes.c_int64 * max(len(inputs), 1))(*(x.strides[0] // x.itemsize for x in inputs))
        return int(self.dll.test_call(self.handle, ctypes.byref(struct), index, ins, outs, strides))

    def took(self) -> float:
        """Seconds of the last launch, from all threads being there to all having returned."""
        return int(self.dll.test_took(self.handle)) / 1e9

    def close(self) -> None:
        self.dll.test_close(self.handle)


def pack(cache: KVCache, dtype: str, tiles: bool = False) -> np.ndarray:
    """The cache as kernels hold it (paged_attention/layout.h), read in vectors or in tiles: u8[num_blocks, bytes]."""
    keys, values = (x.astype(NUMPY_DTYPES[dtype]) for x in (cache.keys, cache.values))
    count, heads = len(keys), keys.shape[2]
    parts = [_key_tiles(keys), _value_tiles(values)] if tiles else [keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)]
    runs = (count, heads if tiles else 1, -1)  # of keys, before as many of values
    flat = [np.ascontiguousarray(part).reshape(runs).view(np.uint8) for part in parts]
    return aligned(np.concatenate(flat, axis=2).reshape(count, -1))


def _key_tiles(keys: np.ndarray) -> np.ndarray:
    count, size, heads, width = keys.shape
    return keys.reshape(count, size // 16, 16, heads, width // 2, 2).transpose(0, 3, 1, 4, 2, 5)


def _value_tiles(values: np.ndarray) -> np.ndarray:
    count, size, heads, width = values.shape
    run = min(size, 32)
    return values.reshape(count, size // run, run // 2, 2, heads, width // 16, 16).transpose(0, 4, 1, 5, 2, 6, 3)


def unpack(
    packed: np.ndarray, block_size: int, kv_heads: int, widths: tuple[int, int], dtype: str, tiles: bool = False
) -> KVCache:
    """The inverse of `pack`; `widths` of a key and of a value head."""
    count = len(packed)
    runs = packed.view(NUMPY_DTYPES[dtype]).reshape(count, kv_heads if tiles else 1, -1)
    keys, values = np.split(runs, [(1 if tiles else kv_heads) * widths[0] * block_size], axis=2)
    if tiles:
        run = min(block_size, 32)
        shape = (count, kv_heads, block_size // run, widths[1] // 16, run // 2, 16, 2)
        keys = keys.reshape(count, kv_heads, block_size // 16, widths[0] // 2, 16, 2).transpose(0, 2, 4, 1, 3, 5)
        values = values.reshape(shape).transpose(0, 2, 4, 6, 1, 3, 5)
        return KVCache(*(x.reshape(count, block_size, kv_heads, -1) for x in (keys, values)))
    keys = keys.reshape(count, kv_heads, widths[0], block_size).transpose(0, 3, 1, 2)
    return KVCache(keys, values.reshape(count, kv_heads, block_size, widths[1]).transpose(0, 2, 1, 3))
