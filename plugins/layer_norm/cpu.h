// layer_norm on the cpu target. Rows are divided among threads; sums run in sixteen lanes and one fixed tree (lanes.h).
#pragma once
#include <cmath>

#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

// y = (x - mean) / sqrt(variance + eps) * w + b by rows of H; with Residual x + residual instead of x, which goes to `sum`.
template <int H, bool Residual>
void layer_norm(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, const float* w, const float* b,
                float eps, const float* residual, int64_t residual_stride, float* sum, float* y) {
  const Share mine = share(rows, tid, c.threads);
  const auto part = [](const float* p, int i) { return H - i >= kLanes ? load(p + i) : load(p + i, H - i); };
  const auto count = [](int i) { return H - i < kLanes ? H - i : kLanes; };
  for (int64_t row = mine.first; row < mine.last; ++row) {
    const float* from = x + row * x_stride;
    Lanes total = splat(0);
    for (int i = 0; i < H; i += kLanes) {
      Lanes v = part(from, i);
      if (Residual) {
        v = v + part(residual + row * residual_stride, i);
        fn::store(sum + row * H + i, v, count(i));
      }
      total = total + v;
    }
    const Lanes mean = splat(llmc::sum(total) / H);
    if (Residual) from = sum + row * H;
    Lanes squares = splat(0);
    for (int i = 0; i < H; i += kLanes) {
      const Lanes d = part(from, i) - mean;
      squares = select(iota() < splat(float(count(i))), fma(d, d, squares), squares);
    }
    const Lanes scale = splat(1 / std::sqrt(llmc::sum(squares) / H + eps));
    for (int i = 0; i < H; i += kLanes) {
      const Lanes v = (part(from, i) - mean) * scale;
      fn::store(y + row * H + i, fma(v, part(w, i), part(b, i)), count(i));
    }
  }
}

}  // namespace llmc
