// Scores and weighted values of a few rows in vectors: a score is one chain over the columns, a value one over the keys.
#pragma once
#include <algorithm>

#include "plugins/cpu/fp8.h"
#include "plugins/cpu/partitions.h"
#include "plugins/paged_attention/layout.h"

namespace llmc {

// scores[row][kPartition]: products, then weights. Tiles are functions of their own: inlined, g++ 12 keeps their sums in memory.
// Blocks lie anywhere in memory, so the hardware cannot foresee them, and
// with few rows memory takes longer than the arithmetic: while keys are read their values are fetched, and while values are
// read the next partition's keys.
template <int D, int DV, int STRIDE, class SPAN>
class VectorRows {
  using KV = typename SPAN::KV;
  static constexpr int BS = SPAN::BS;
  static constexpr int kFull = DV / kLanes, kRest = DV % kLanes;

 public:
  VectorRows(const SPAN& s, int kv_head) : s_(s), kv_head_(kv_head) {}

  // Products of q[rows][D] with the span's keys.
  void score(int rows, const float* q, float* scores) const {
    for_rows(rows, [&](auto count, int r) { score_rows<decltype(count)::value>(q + r * D, scores + r * kPartition, r == 0); });
  }
  // Sums of the span's values times weights, to to[row][STRIDE].
  void weigh(int rows, const float* weights, float* to) const {
    for_rows(rows, [&](auto count, int r) {
      value_rows<decltype(count)::value>(weights + r * kPartition, to + r * STRIDE, r == 0);
    });
  }

 private:
  const SPAN& s_;
  const int kv_head_;

  static constexpr bool fetches(int rows) { return rows <= 4; }
  static constexpr int lines(int numbers) { return (numbers * int(sizeof(KV)) + 63) / 64; }

  // Vectors beside R rows that the registers have room for.
  static constexpr int columns(int rows) {
    if (LLMC_WIDE) return rows > 4 ? 2 : rows > 1 ? 4 : 8;
    return rows > 2 ? 1 : rows > 1 ? 2 : 4;
  }

  template <int R, int N>
  static void clear(Lanes (&sums)[R][N]) {
    for (auto& row : sums)
      for (Lanes& sum : row) sum = splat(0);
  }
  template <int R, int N>
  static void store_rows(const Lanes (&sums)[R][N], float* to, int stride) {
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(to + r * stride + n * kLanes, sums[r][n]);
  }

  // acc[r][n] += row(r) * column(n), holding the fewer of the two in registers.
  template <int R, int N, class Row, class Column>
  static void multiply(Lanes (&acc)[R][N], Row row, Column column) {
    if constexpr (R <= 3) {
      Lanes x[R];
      for (int r = 0; r < R; ++r) x[r] = row(r);
      for (int n = 0; n < N; ++n) {
        const Lanes y = column(n);
        for (int r = 0; r < R; ++r) acc[r][n] = fma(x[r], y, acc[r][n]);
      }
    } else {
      Lanes y[N];
      for (int n = 0; n < N; ++n) y[n] = column(n);
      for (int r = 0; r < R; ++r) {
        const Lanes x = row(r);
        for (int n = 0; n < N; ++n) acc[r][n] = fma(x, y[n], acc[r][n]);
      }
    }
  }

  template <int R>
  void score_rows(const float* q, float* scores, bool first) const {
    constexpr int N = columns(R);
    int g = s_.first_group;
    for (; s_.end_group - g >= N; g += N) score_tile<R, N>(q, g, scores, first);
    for (; g < s_.end_group; ++g) score_tile<R, 1>(q, g, scores, first);
  }

  // Scores of R rows [R][D] and N groups of 16 keys.
  template <int R, int N>
  [[gnu::noinline]] void score_tile(const float* q, int group, float* scores, bool first) const {
    const KV *keys[N], *later[N], *values[N];
    for (int n = 0; n < N; ++n) {
      keys[n] = s_.keys(kv_head_, (group + n) * kLanes);
      const bool fetched = first && fetches(R) && group + n + N < s_.end_group;
      later[n] = fetched ? s_.keys(kv_head_, (group + n + N) * kLanes) : keys[n];
      values[n] = first ? s_.values(kv_head_, (group + n) * kLanes) : keys[n];
    }
    Lanes sums[R][N];
    clear(sums);
    constexpr int step = D % 4 == 0 && 4 * BS * sizeof(KV) <= 64 ? 4 : D % 2 == 0 ? 2 : 1;  // a line of the cache
    constexpr int kEach = (lines(kLanes * DV) * step + D - 1) / D;
    for (int d = 0; d < D; d += step) {
      for (int n = 0; fetches(R) && n < N; ++n) {
        fetch<_MM_HINT_T0>(later[n] + d * BS, 0);
        if (step * BS * sizeof(KV) > 64) fetch<_MM_HINT_T0>(later[n] + (d + step - 1) * BS, 0);
        for (int line = 0; line < kEach; ++line) fetch(values[n], d / step * kEach + line);
      }
      for (int e = d; e < d + step; ++e)
        multiply<R, N>(sums, [&](int r) { return splat(q[r * D + e]); }, [&](int n) { return load(keys[n] + e * BS); });
    }
    store_rows(sums, scores + group * kLanes, kPartition);
  }

  template <int R>
  void value_rows(const float* weights, float* to, bool first) const {
    constexpr int N = columns(R);
    int n = 0;
    for (; kFull - n >= N; n += N) value_tile<R, N, kLanes>(weights, n * kLanes, to, first);
    for (; n < kFull; ++n) value_tile<R, 1, kLanes>(weights, n * kLanes, to, first);
    if constexpr (kRest > 0) value_tile<R, 1, kRest>(weights, kFull * kLanes, to, first);
  }

  // Columns [column, column + 16 N) of R rows of weighted values; of the last vector only FILLED lanes exist.
  template <int R, int N, int FILLED>
  [[gnu::noinline]] void value_tile(const float* weights, int column, float* to, bool first_rows) const {
    Lanes sums[R][N];
    clear(sums);
    // The next partition's keys are fetched in every pass over the columns, an equal part in each: memory is idle in none.
    constexpr int most = columns(R), kPasses = kFull / most + kFull % most + (kRest > 0);
    constexpr int kPart = (lines(D * BS) + kPasses - 1) / kPasses, kEach = (kPart + BS - 1) / BS;
    const int part = (column / kLanes / most + column / kLanes % most) * kPart;
    for (int first = s_.first_group * kLanes; first < s_.end; first += BS) {
      const KV* values = s_.values(kv_head_, first) + column;
      const KV* next = fetches(R) && first_rows ? s_.next_keys(first) : nullptr;
      const int count = std::min(BS, s_.end - first), fetching = next ? (kPart + kEach - 1) / kEach : 0;
      const float* w = weights + first;
      for (int i = 0; i < count; ++i, values += DV, ++w) {
        for (int line = 0; i < fetching && line < kEach; ++line) fetch(next, part + i * kEach + line);
        multiply<R, N>(sums, [&](int r) { return splat(w[r * kPartition]); }, [&](int n) {
          return FILLED == kLanes ? load(values + n * kLanes) : load(values + n * kLanes, FILLED);
        });
      }
    }
    store_rows(sums, to + column, STRIDE);
  }
};

}  // namespace llmc
