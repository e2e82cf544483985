// select_rows on the cpu target. Rows are divided among threads.
#pragma once
#include <cstring>

#include "plugins/cpu/runtime.h"

namespace llmc {

// y[i] = x[rows[i]], rows of H floats. The runtime has checked the row numbers.
template <int H>
void select_rows(const Ctx& c, int tid, int64_t count, const float* x, int64_t x_stride, const int32_t* rows, float* y) {
  const Share mine = share(count, tid, c.threads);
  for (int64_t i = mine.first; i < mine.last; ++i) std::memcpy(y + i * H, x + rows[i] * x_stride, H * sizeof(float));
}

}  // namespace llmc
