// copy on the cpu target: elements of four bytes, moved as they are. Rows of the output are divided among threads.
#pragma once
#include <cstring>

#include "plugins/cpu/runtime.h"

namespace llmc {

// y[d0, d1, d2, d3], contiguous, from x with a stride for each axis: a transposed or broadcast tensor; of one axis only
// every step-th entry from start on.
template <class T>
void copy(const Ctx& c, int tid, T* y, int64_t d0, int64_t d1, int64_t d2, int64_t d3, const T* x, int64_t s0, int64_t s1,
          int64_t s2, int64_t s3, int axis, int64_t start, int64_t step) {
  static_assert(sizeof(T) == 4);
  int64_t stride[4] = {s0, s1, s2, s3};
  x += start * stride[axis];
  stride[axis] *= step;
  const Share mine = share(d0 * d1 * d2, tid, c.threads);
  for (int64_t row = mine.first; row < mine.last; ++row) {
    const T* from = x + row / (d1 * d2) * stride[0] + row / d2 % d1 * stride[1] + row % d2 * stride[2];
    T* to = y + row * d3;
    if (stride[3] == 1)
      std::memcpy(to, from, d3 * sizeof(T));
    else
      for (int64_t i = 0; i < d3; ++i) to[i] = from[i * stride[3]];
  }
}

// Columns at..at+width of y [rows, y_width] from x [rows, width], then those of the next input. All threads share the rows.
template <class T>
void concat(const Ctx&, int, int64_t, T*, int64_t) {}
template <class T, class... Others>
void concat(const Ctx& c, int tid, int64_t rows, T* y, int64_t y_width, const T* x, int64_t x_stride, int64_t width,
            Others... others) {
  static_assert(sizeof(T) == 4);
  const Share mine = share(rows, tid, c.threads);
  for (int64_t row = mine.first; row < mine.last; ++row)
    std::memcpy(y + row * y_width, x + row * x_stride, width * sizeof(T));
  concat<T>(c, tid, rows, y + width, y_width, others...);
}

}  // namespace llmc
