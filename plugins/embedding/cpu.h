// embedding on the cpu target: rows of a table, widened to floats. Tokens are divided among threads.
#pragma once
#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

// y[i] = table[ids[i]]; T is float or bf16. The runtime has checked the ids.
template <int H, class T>
void embedding(const Ctx& c, int tid, int64_t tokens, const int32_t* ids, const T* table, float* y) {
  const Share mine = share(tokens, tid, c.threads);
  for (int64_t t = mine.first; t < mine.last; ++t) {
    const T* row = table + int64_t(ids[t]) * H;
    for (int i = 0; i < H; ++i) y[t * H + i] = to_float(row[i]);
  }
}

}  // namespace llmc
