"""Compiles kernel calls into one library and runs them on numpy arrays, as an engine's generated code would.

`Library([call, ...], isa)` compiles once; `library.run(i, inputs, outputs, ...)` runs call i on a pool of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmc.plugins.cpu.call import C_TYPES, CpuCall, Pointer, RowStride, render
from tests.unit.plugins.compiled import compile_library

MAX_VALUES = 8

_HEAD = """
#include <cstdlib>
#include <ctime>
#include "plugins/cpu/amx_permission.h"
#include "plugins/cpu/runtime.h"
struct Request {
  int32_t threads; int32_t pad; int64_t T, S; int64_t shared, per_thread;
  void* in[8]; int64_t in_stride[8]; void* out[8]; int64_t out_stride[8];
  llmc_rank* rank; llmc_step* step; uint8_t* comm; int64_t slot; int32_t rank_number, tp;
  int64_t repeat, advance; double* seconds;
};
// A single thread's own time, so that others on the machine do not count.
static double now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
static llmc::Pool* pool(int threads) {
  static llmc::Pool* pools[65];
  if (!pools[threads]) pools[threads] = new llmc::Pool(threads);
  return pools[threads];
}
"""
_CALL = """
namespace llmc {{
static void work_{i}(void* what, int tid) {{
  const auto& [request, c] = *static_cast<std::pair<const Request*, llmc::Ctx>*>(what);
  const Request& r = *request;
  {function}(c, tid, {args});
}}
}}
extern "C" int call_{i}(const Request* r) {{
  if (!llmc::tiles_allowed()) return 3;
  llmc::Pool private_pool(r->tp > 1 ? r->threads : 1);
  llmc::RankComm comm(r->comm, r->rank_number, r->tp, r->slot);
  std::pair<const Request*, llmc::Ctx> both(r, llmc::Ctx());
  llmc::Ctx& c = both.second;
  c.rank = r->rank; c.step = r->step; c.threads = r->threads; c.comm = &comm;
  c.pool = r->tp > 1 ? &private_pool : pool(r->threads);
  c.shared_scratch = llmc::whole_pages(r->shared);
  c.thread_scratch = llmc::whole_pages(r->per_thread);
  const int64_t bytes = llmc::scratch_bytes(c.shared_scratch, c.thread_scratch, c.threads);
  c.scratch_memory = static_cast<uint8_t*>(aligned_alloc(4096, bytes ? bytes : 4096));
  __builtin_memset(c.scratch_memory, 0xff, bytes);
  Request changing = *r;
  both.first = &changing;
  for (int64_t i = 0; i < r->repeat; ++i) {{
    const double start = now(r->threads);
    c.pool->run(llmc::work_{i}, &both);
    if (r->seconds) r->seconds[i] = now(r->threads) - start;
    changing.in[1] = static_cast<char*>(changing.in[1]) + r->advance;
  }}
  free(c.scratch_memory);
  return comm.failed() ? 2 : 0;
}}
"""


class Request(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("T", ctypes.c_int64),
        ("S", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("per_thread", ctypes.c_int64),
        ("inputs", ctypes.c_void_p * MAX_VALUES),
        ("in_stride", ctypes.c_int64 * MAX_VALUES),
        ("outputs", ctypes.c_void_p * MAX_VALUES),
        ("out_stride", ctypes.c_int64 * MAX_VALUES),
        ("rank", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("comm", ctypes.c_void_p),
        ("slot", ctypes.c_int64),
        ("rank_number", ctypes.c_int32),
        ("tp", ctypes.c_int32),
        ("repeat", ctypes.c_int64),
        ("advance", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
    )


def _value(arg: Pointer | RowStride, types: dict[Pointer, str]) -> str:
    if isinstance(arg, RowStride):
        return f"r.{arg.side}_stride[{arg.index}]"
    return f"({'const ' if arg.side == 'in' else ''}{C_TYPES[types.get(arg, 'f32')]}*)r.{arg.side}[{arg.index}]"


class Library:
    """`types` gives for each call the dtypes of its values, where they are not f32."""

    def __init__(self, calls: Sequence[CpuCall], isa: str, types: Sequence[dict[Pointer, str]] | None = None) -> None:
        self.calls = calls
        text = [f'#include "{h}"' for h in sorted({c.header for c in calls})] + [_HEAD]
        text += [f"namespace llmc {{\n{p}\n}}" for p in dict.fromkeys(c.prelude for c in calls) if p]
        for i, call in enumerate(calls):
            known = types[i] if types else {}
            args = ", ".join(render(a, lambda v: _value(v, known), {"T": "r.T", "S": "r.S"}) for a in call.args)  # noqa: B023
            text.append(_CALL.format(i=i, function=call.function, args=args))
        self._library = ctypes.CDLL(str(compile_library("\n".join(text), isa)))

    def run(
        self,
        index: int,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        threads: int = 1,
        tokens: int = 0,
        rows: int = 0,
        repeat: int = 1,
        call: Callable[[Any, Any], int] = lambda function, request: int(function(request)),
        **fields: int,
    ) -> None:
        """Inputs and outputs as numpy arrays; a row stride is theirs. The last axis must be contiguous. Of `repeat`
        runs each reads input 1 `advance` bytes further on; `seconds` is the address of their times. `call` is given the
        compiled function and what to call it with.
        """
        request = Request(threads=threads, T=tokens, S=rows, repeat=repeat, tp=1)
        request.shared, request.per_thread = self.calls[index].scratch.shared, self.calls[index].scratch.per_thread
        for values, pointers, strides in (
            (inputs, request.inputs, request.in_stride),
            (outputs, request.outputs, request.out_stride),
        ):
            for i, value in enumerate(values):
                pointers[i] = value.ctypes.data
                strides[i] = value.strides[0] // value.itemsize if value.ndim > 1 else 1
        for name, value in fields.items():
            setattr(request, name, value)
        assert call(self._library[f"call_{index}"], ctypes.byref(request)) == 0
