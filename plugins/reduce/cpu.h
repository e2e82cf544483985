// reduce on the cpu target. Rows are divided among threads; sixteen lanes and one fixed tree (lanes.h).
#pragma once
#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {
namespace red {

struct Sum {
  static constexpr float kStart = 0;
  static Lanes join(Lanes a, Lanes b) { return a + b; }
  static float join(float a, float b) { return a + b; }
  static float finish(float x, int) { return x; }
};
struct Mean : Sum {
  static float finish(float x, int n) { return x / n; }
};
struct Max {  // NaN if any is
  static constexpr float kStart = -__builtin_inff();
  static Lanes join(Lanes a, Lanes b) { return fn::maximum(a, b); }
  static float join(float a, float b) { return a != a || a > b ? a : b; }
  static float finish(float x, int) { return x; }
};

// Kind over x[0..H): sixteen lanes, then one tree.
template <int H, class Kind>
inline float row(const float* x) {
  Lanes all = splat(Kind::kStart);
  for (int i = 0; i + kLanes <= H; i += kLanes) all = Kind::join(all, load(x + i));
  if constexpr (H % kLanes != 0) {
    const Lanes rest = load(x + H / kLanes * kLanes, H % kLanes);
    all = select(iota() < splat(float(H % kLanes)), Kind::join(all, rest), all);
  }
  float lanes[kLanes];
  store(lanes, all);
  return Kind::finish(tree(lanes, [](float a, float b) { return Kind::join(a, b); }), H);
}

}  // namespace red

// y[row] = Kind over x[row][0..H).
template <int H, class Kind>
void reduce(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, float* y) {
  const Share mine = share(rows, tid, c.threads);
  for (int64_t row = mine.first; row < mine.last; ++row) y[row] = red::row<H, Kind>(x + row * x_stride);
}

}  // namespace llmc
