// grouped_linear on the cpu target: see cpu.py for what the arguments are. Rows are sorted by expert; each expert that has
// any multiplies them by its panels with linear's inner loops, so that an output is one chain over k, as there.
//
// Threads divide panels: each takes the same outputs of every expert, so that they read equally many bytes however the
// tokens are routed, and a token's results are added by one thread, by ascending expert. No expert without rows is read.
#pragma once
#include <algorithm>

#include "plugins/linear/cpu.h"

namespace llmc {
namespace grp {

using namespace lin;

// Up to here all rows are multiplied straight from the packed bytes, and threads may share a panel by halves.
constexpr int kFewPairs = 64;

// A pair is a token and one of its slots, token * slots + slot. Writes all pairs in the order of their experts, within one
// in their own, to order[pairs]; expert e has those from first[e] to first[e + 1].
inline void sort_pairs(const int32_t* index, int pairs, int experts, int32_t* first, int32_t* order) {
  std::fill(first, first + experts + 1, 0);
  for (int i = 0; i < pairs; ++i) ++first[index[i] + 1];
  for (int e = 0; e < experts; ++e) first[e + 1] += first[e];
  for (int i = 0; i < pairs; ++i) order[first[index[i]]++] = i;
  for (int e = experts; e > 0; --e) first[e] = first[e - 1];
  first[0] = 0;
}

template <class F, class X, class Formula, bool Gated, bool Bias, bool Combine>
struct Kernel : Columns<F, X> {
  using Columns<F, X>::k, Columns<F, X>::prepare, Columns<F, X>::width;
  const Ctx& c;
  int tid, n, experts, slots;
  const float* x;
  int64_t x_token, x_slot;
  const int32_t* index;
  typename F::Weight w;
  const float *w_scale, *bias, *weights;
  float* y;
  int pairs = 0;
  int32_t *first = nullptr, *order = nullptr;
  const float *packed_x = nullptr, *scales = nullptr;

  int columns() const { return Gated ? n / 2 : n; }
  int panels() const { return (n + kPanel - 1) / kPanel; }
  float* own() const { return reinterpret_cast<float*>(c.scratch(tid)); }
  typename F::Weight panel(int e, int p) const { return Columns<F, X>::panel(w, int64_t(e) * panels() + p); }
  int rows(int e) const { return first[e + 1] - first[e]; }
  // Rows of an expert that are few are multiplied straight from the packed bytes, as linear does.
  bool few(int e) const { return pairs <= kFewPairs || rows(e) <= kMaxPackedRows; }
  Tiles tiles(int e) const { return Tiles(rows(e), few(e) ? kMaxPackedTile : kMaxTile); }

  void run(int64_t tokens) {
    pairs = int(tokens) * slots;
    first = reinterpret_cast<int32_t*>(own() + kThreadFloats);
    order = first + experts + 1;
    sort_pairs(index, pairs, experts, first, order);
    pack();
    c.barrier(tid);
    if (pairs <= kFewPairs)
      work(share(2 * panels(), tid, c.threads), tokens, 2);
    else
      work(share(panels(), tid, c.threads), tokens, 1);
  }

  // All threads together: x to tiles in the shared scratch, expert by expert, followed by each row's factor.
  void pack() {
    float* to = reinterpret_cast<float*>(c.scratch());
    float* factors = to + int64_t(pairs) * width();
    const Share mine = share(pairs, tid, c.threads);
    for (int e = 0; e < experts; ++e) {
      if (first[e + 1] <= mine.first || first[e] >= mine.last) continue;
      const Tiles all = tiles(e);
      for (int tile = 0; tile < all.count; ++tile) {
        const int top = first[e] + all.first(tile), size = all.size(tile);
        for (int r = 0; r < size; ++r) {
          if (top + r < mine.first || top + r >= mine.last) continue;
          const int pair = order[top + r];
          const float* row = x + pair / slots * x_token + pair % slots * x_slot;
          const float scale = prepare(row, k, to + int64_t(top) * width() + r, size);
          if constexpr (X::kScaled)
            factors[top + r] = scale * X::kRest;
          else
            factors[top + r] = scale;
        }
      }
    }
    packed_x = to, scales = factors;
  }

  // This thread's units: panels, or halves of them.
  void work(Share mine, int64_t tokens, int parts) const {
    if (Combine) each_unit(mine, parts, [&](int p, int half) { clear(p, half, tokens); });
    for (int e = 0; e < experts; ++e) {
      if (!rows(e)) continue;
      each_unit(mine, parts, [&](int p, int half) { few(e) ? multiply_few(e, p, half) : multiply_many(e, p); });
    }
  }

  template <class Body>
  static void each_unit(Share mine, int parts, const Body& body) {
    for (int64_t u = mine.first; u < mine.last; ++u) {
      const bool whole = parts == 1 || (u % 2 == 0 && u + 1 < mine.last);
      body(int(u / parts), whole ? -1 : int(u % 2));
      u += whole && parts == 2;
    }
  }

  void multiply_few(int e, int p, int half) const {
    const Tiles all = tiles(e);
    alignas(64) float acc[kMaxPackedTile * kPanel];
    for (int tile = 0; tile < all.count; ++tile) {
      const int top = first[e] + all.first(tile), size = all.size(tile);
      with_rows<kMaxPackedTile>(size, [&](auto r) {
        packed_tile<F, decltype(r)::value>(panel(e, p), F::steps(k), packed_x + int64_t(top) * width(), acc, half);
      });
      finish(e, p, half, top, size, acc);
    }
  }

  void multiply_many(int e, int p) const {
    const Tiles all = tiles(e);
    float *floats = own(), *acc = floats + kRows<F> * lin::kPiece;
    const float* rows_at = packed_x + int64_t(first[e]) * width();
    for (int from = 0; from < all.count; from += kMaxChunkTiles) {
      const int to = std::min(from + kMaxChunkTiles, all.count), top = all.first(from);
      this->many(panel(e, p), floats, {all, from, to, rows_at, acc});
      finish(e, p, -1, first[e] + top, all.first(to) - top, acc);
    }
  }

  // Calls body(column of y, where that stands in the panel, how many) for sixteen outputs of a panel or half at a time.
  template <class Body>
  void groups(int p, int half, const Body& body) const {
    const int side = Gated ? kPanel / 2 : kPanel, left = std::min(side, columns() - p * side);
    for (int at = 0; at < left; at += kLanes)
      if (half < 0 || at / kLanes % 2 == half) body(p * side + at, at, std::min(left - at, kLanes));
  }

  void clear(int p, int half, int64_t tokens) const {
    for (int64_t t = 0; t < tokens; ++t)
      groups(p, half, [&](int column, int, int count) { fn::store(y + t * n + column, splat(0), count); });
  }

  // From the sums of rows top..top+count of an expert to y: scales, bias, formula; then into the row's own place, or times
  // its weight onto the token's sum.
  void finish(int e, int p, int half, int top, int count, const float* acc) const {
    for (int r = 0; r < count; ++r) {
      const int pair = order[top + r];
      const float* sums = acc + r * kPanel;
      groups(p, half, [&](int column, int at, int width) {
        const Lanes value = result(e, column, sums, at, scales[top + r], width);
        if constexpr (Combine) {
          float* to = y + int64_t(pair / slots) * n + column;
          fn::store(to, load(to, width) + splat(weights[pair]) * Formula::f(value), width);
        } else if constexpr (Gated) {
          const Lanes up = result(e, columns() + column, sums, kPanel / 2 + at, scales[top + r], width);
          fn::store(y + int64_t(pair) * columns() + column, Formula::f(value, up), width);
        } else {
          fn::store(y + int64_t(pair) * columns() + column, Formula::f(value), width);
        }
      });
    }
  }

  Lanes result(int e, int output, const float* sums, int place, float x_scale, int width) const {
    Lanes v = F::Sums::value(sums, place);
    const int64_t at = int64_t(e) * n + output;
    if (X::kScaled) v = v * (splat(x_scale) * load(w_scale + at, width));
    return Bias ? v + load(bias + at, width) : v;
  }
};

}  // namespace grp

// y[tokens, Slots, N] (N/2 when gated), or y[tokens, N] combined, from x and index[tokens, Slots]; see `Kernel`.
template <int K, int N, int E, int Slots, class F, class X, class Formula, bool Gated, bool Bias, bool Combine,
          bool AllReduce>
void grouped_linear(const Ctx& c, int tid, int64_t tokens, const float* x, int64_t x_token, int64_t x_slot,
                    const int32_t* index, X prepare, typename F::Weight w, const float* w_scale, const float* bias,
                    const float* weights, float* y) {
  float* to = AllReduce ? c.comm->slot(c.comm->rank) : y;
  grp::Kernel<F, X, Formula, Gated, Bias, Combine>{
      {K, prepare}, c, tid, N, E, Slots, x, x_token, x_slot, index, w, w_scale, bias, weights, to}
      .run(tokens);
  if constexpr (AllReduce) rank_all_reduce(*c.comm, tid, c.threads, [&] { c.barrier(tid); }, y, tokens, N);
}

}  // namespace llmc
