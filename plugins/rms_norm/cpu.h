// rms_norm on the cpu target. Rows are divided among threads; sums run in sixteen lanes and one fixed tree (lanes.h).
#pragma once
#include <cmath>

#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

// y = x / sqrt(mean(x^2) + eps) * w by rows of H; with Residual x + residual instead of x, which goes to `sum`.
template <int H, bool Residual>
void rms_norm(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, const float* w, float eps,
              const float* residual, int64_t residual_stride, float* sum, float* y) {
  const Share mine = share(rows, tid, c.threads);
  for (int64_t row = mine.first; row < mine.last; ++row) {
    const float* from = x + row * x_stride;
    Lanes squares = splat(0);
    for (int i = 0; i < H; i += kLanes) {
      const int n = H - i < kLanes ? H - i : kLanes;
      Lanes v = n == kLanes ? load(from + i) : load(from + i, n);
      if (Residual) {
        const float* other = residual + row * residual_stride + i;
        v = v + (n == kLanes ? load(other) : load(other, n));
        fn::store(sum + row * H + i, v, n);
      }
      squares = fma(v, v, squares);
    }
    const Lanes scale = splat(1 / std::sqrt(llmc::sum(squares) / H + eps));
    if (Residual) from = sum + row * H;
    for (int i = 0; i < H; i += kLanes) {
      const int n = H - i < kLanes ? H - i : kLanes;
      if (n == kLanes) {
        store(y + row * H + i, load(from + i) * scale * load(w + i));
      } else {
        fn::store(y + row * H + i, load(from + i, n) * scale * load(w + i, n), n);
      }
    }
  }
}

}  // namespace llmc
