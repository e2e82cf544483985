// The sum of x over the ranks. The meeting and the order are those of plugins/cpu/rank_barrier.h.
#pragma once
#include <algorithm>

#include "plugins/cpu/runtime.h"

namespace llmc {

// x, y: n floats. With one rank a copy.
inline void all_reduce(const Ctx& c, int tid, const float* x, float* y, int64_t n) {
  const Share own = share(n, tid, c.threads);
  if (c.rank->tp == 1) {
    std::copy(x + own.first, x + own.last, y + own.first);
    return;
  }
  std::copy(x + own.first, x + own.last, c.comm->slot(c.comm->rank) + own.first);
  rank_all_reduce(*c.comm, tid, c.threads, [&] { c.barrier(tid); }, y, n, 1);
}

}  // namespace llmc
