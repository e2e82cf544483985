// pointwise on the cpu target: the driver of a generated formula (cpu.py). Pieces of rows are divided among threads.
#pragma once
#include <tuple>
#include <utility>

#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {
namespace pw {

constexpr int64_t kPiece = 256;  // columns of one unit of work

inline Lanes lanes(const float* p, int n) { return n == kLanes ? load(p) : load(p, n); }
inline Lanes lanes(const int32_t* p, int n) {
  float x[kLanes] = {};
  for (int i = 0; i < n; ++i) x[i] = float(p[i]);
  return load(x);
}

// An input: where it starts, and its strides along the first three axes (0 where it is broadcast).
template <class T>
struct Operand {
  const T* at;
  int64_t s0, s1, s2;
  const T* row(int64_t i, int64_t j, int64_t k) const { return at + i * s0 + j * s1 + k * s2; }
};

// Lanes of columns from..from+n of a row; Inner 0: the input has one column for all.
template <int Inner, class T>
inline Lanes read(const T* row, int64_t from, int n) {
  return Inner ? lanes(row + from, n) : splat(float(row[0]));
}

}  // namespace pw

// y[d0, d1, d2, d3] = F::f(operands...); y's strides are those of its first three axes. Inner: 1 for each operand that has
// d3 columns, 0 for one that has one.
template <class F, int... Inner, class... T>
void pointwise(const Ctx& c, int tid, int64_t d0, int64_t d1, int64_t d2, int64_t d3, float* y, int64_t y0, int64_t y1,
               int64_t y2, pw::Operand<T>... operands) {
  const int64_t pieces = (d3 + pw::kPiece - 1) / pw::kPiece;
  const Share mine = share(d0 * d1 * d2 * pieces, tid, c.threads);
  for (int64_t unit = mine.first; unit < mine.last; ++unit) {
    const int64_t row = unit / pieces, first = unit % pieces * pw::kPiece;
    const int64_t last = first + pw::kPiece < d3 ? first + pw::kPiece : d3;
    const int64_t i = row / (d1 * d2), j = row / d2 % d1, k = row % d2;
    float* to = y + i * y0 + j * y1 + k * y2;
    const auto rows = std::make_tuple(operands.row(i, j, k)...);
    for (int64_t at = first; at < last; at += kLanes) {
      const int n = last - at < kLanes ? int(last - at) : kLanes;
      const Lanes v = std::apply([&](auto... r) { return F::f(pw::read<Inner>(r, at, n)...); }, rows);
      fn::store(to + at, v, n);
    }
  }
}

}  // namespace llmc
