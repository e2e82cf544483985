// mean_squares on the cpu target. Rows are divided among threads; squares are summed in sixteen lanes and their tree.
#pragma once
#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

// y[row][column] = sum over x[row][0..N) of x^2, / width. y has COLUMNS columns.
template <int N, int COLUMNS>
void mean_squares_of(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, float width, float* y) {
  const Share mine = share(rows, tid, c.threads);
  for (int64_t row = mine.first; row < mine.last; ++row) {
    float lanes[kLanes] = {};
    for (int i = 0; i < N; ++i) lanes[i % kLanes] += x[row * x_stride + i] * x[row * x_stride + i];
    y[row * COLUMNS] = tree(lanes, [](float a, float b) { return a + b; }) / width;
  }
}

template <int N>
struct Squares {
  static constexpr int kWidth = N;
  const float* x;
  int64_t stride;
  float width;
};

template <class... Parts>
void mean_squares(const Ctx& c, int tid, int64_t rows, float* y, const Parts&... parts) {
  int column = 0;
  (mean_squares_of<Parts::kWidth, sizeof...(Parts)>(c, tid, rows, parts.x, parts.stride, parts.width, y + column++),
   ...);
}

}  // namespace llmc
