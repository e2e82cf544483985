// What generated row programs (cpu.py) are made of: each function works on one row in a thread's own memory. All numbers
// are floats there, integers too (exact up to 2^24), truth values are 0 and 1. Arrays have kLanes numbers to spare.
#pragma once
#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"
#include "plugins/reduce/cpu.h"

namespace llmc {
namespace rw {

inline Lanes as_bool(Lanes a) { return fn::ne(a, splat(0)); }
inline Lanes as_f32(Lanes a) { return a; }
inline Lanes as_i32(Lanes a) {  // towards zero
  return fn::by_lane(a, [](double v) { return std::trunc(v); });
}

template <int N, class T>
inline void fetch(const T* from, float* to) {
  for (int i = 0; i < N; ++i) to[i] = float(from[i]);
}
template <int N>
inline void keep(const float* from, float* to) { std::memcpy(to, from, N * sizeof(float)); }
template <int N>
inline void keep(const float* from, int32_t* to) {
  for (int i = 0; i < N; ++i) to[i] = int32_t(from[i]);
}

// Lanes of an operand's row; Inner 0: it has one column for all.
template <int Inner>
inline Lanes read(const float* row, int at) { return Inner ? load(row + at) : splat(row[0]); }

// y[D0, D1, D2] = f(a, b, c): the formula of row a, b at column c.
template <int D0, int D1, int D2, class Formula>
inline void map(float* y, const Formula& f) {
  for (int a = 0; a < D0; ++a)
    for (int b = 0; b < D1; ++b)
      for (int c = 0; c < D2; c += kLanes) fn::store(y + (a * D1 + b) * D2 + c, f(a, b, c), D2 - c < kLanes ? D2 - c : kLanes);
}

template <int Rows, int N, class Kind>
inline void reduce(const float* x, float* y) {
  for (int row = 0; row < Rows; ++row) y[row] = red::row<N, Kind>(x + row * N);
}

// Where the K best of N stand, best first, of equals the first; NaN is larger than everything.
template <int Rows, int N, int K, bool Largest>
inline void topk(const float* x, float* y) {
  const auto better = [](float a, float b) {
    return Largest ? a > b || (a != a && b == b) : a < b || (b != b && a == a);
  };
  for (int row = 0; row < Rows; ++row, x += N, y += K) {
    float best[K];
    int count = 0;
    for (int i = 0; i < N; ++i) {
      if (count == K && !better(x[i], best[K - 1])) continue;
      int at = count < K ? count++ : K - 1;
      for (; at > 0 && better(x[i], best[at - 1]); --at) best[at] = best[at - 1], y[at] = y[at - 1];
      best[at] = x[i], y[at] = float(i);
    }
  }
}

template <int Rows, int N, int M>
inline void gather(const float* x, const float* index, float* y) {
  for (int row = 0; row < Rows; ++row)
    for (int i = 0; i < M; ++i) y[row * M + i] = x[row * N + int(index[row * M + i])];
}

// `step` 0: the source is one number.
template <int Rows, int N, int M, int Step>
inline void scatter(const float* x, const float* index, const float* source, float* y) {
  std::memcpy(y, x, Rows * N * sizeof(float));
  for (int row = 0; row < Rows; ++row)
    for (int i = 0; i < M; ++i) y[row * N + int(index[row * M + i])] = source[(row * M + i) * Step];
}

// Entries Start, Start + Step, ... of the middle axis.
template <int Before, int N, int After, int Start, int Count, int Step>
inline void slice(const float* x, float* y) {
  for (int a = 0; a < Before; ++a)
    for (int i = 0; i < Count; ++i)
      std::memcpy(y + (a * Count + i) * After, x + (a * N + Start + i * Step) * After, After * sizeof(float));
}

// Columns At..At+N of y[Rows, Width].
template <int Rows, int N, int Width, int At>
inline void place(const float* x, float* y) {
  for (int row = 0; row < Rows; ++row) std::memcpy(y + row * Width + At, x + row * N, N * sizeof(float));
}

}  // namespace rw

// All rows of a generated program. Rows are divided among threads.
template <class Program, class... Args>
void rowwise(const Ctx& c, int tid, int64_t rows, Args... args) {
  const Share mine = share(rows, tid, c.threads);
  Program::run(mine.first, mine.last, args...);
}

}  // namespace llmc
