// The inner loops of linear: a tile of rows times a panel of weights. Every output is one chain of fused multiply-adds over
// k from 0 up, whatever the tile, so that results do not depend on how rows are grouped or which loop ran.
//
// x of a tile of R rows is interleaved: x[k * R + r].
#pragma once
#include <utility>

#include "plugins/linear/formats.h"

namespace llmc::lin {

// Rows of the largest tile, on unpacked weights and on packed ones, which need registers to decode in.
constexpr int kMaxTile = LLMC_WIDE ? 12 : 6;
constexpr int kMaxPackedTile = LLMC_WIDE ? 12 : 4;
// k that are unpacked at once, and the width of the pieces: a piece [kBlock][kPiece] stays in the L1 cache. Tactics, which
// targets describe, come as macros (profiles/tactics.py).
constexpr int kBlock = LLMC_BLOCK;
constexpr int kAhead = LLMC_PREFETCH_BYTES;  // prefetches across the end of a page, where hardware stops

// In how many parts a tile of R rows takes a panel, so that accumulators stay in registers (32 wide, 16 narrow).
constexpr int parts_for(int rows) { return LLMC_WIDE ? (rows <= 6 ? 1 : 2) : rows <= 1 ? 1 : rows <= 3 ? 2 : 4; }

template <class F, int R, int Parts, int Part, size_t... J>
__attribute__((noinline)) void packed_part(const typename F::T* w, int k_count, const float* x, float* acc,
                                           std::index_sequence<J...>) {
  Vec sum[kVecs][R];
  ((F::in_part(Parts, J) == Part ? [&] { for (int r = 0; r < R; ++r) sum[J][r] = vzero(); }() : void()), ...);
  for (int k = 0; k < k_count; ++k, w += kPanel, x += R) {
    if constexpr (Part == 0)
      for (size_t line = 0; line < sizeof(*w); ++line) __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * line);
    const auto one = [&](auto index) {
      constexpr int j = decltype(index)::value;
      if constexpr (F::in_part(Parts, j) == Part) {
        const Vec value = F::template decode<j>(w);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sum[j][r] = vfma(value, vsplat(x + r), sum[j][r]);
      }
    };
    (one(std::integral_constant<int, J>()), ...);
  }
  const auto put = [&](auto index) {
    constexpr int j = decltype(index)::value;
    if constexpr (F::in_part(Parts, j) == Part)
      for (int r = 0; r < R; ++r) F::template put<j>(sum[j][r], acc + r * kPanel, kPiece);
  };
  (put(std::integral_constant<int, J>()), ...);
}

// acc[R][64] = x * panel from the packed bytes, all of k. `half` 0 or 1: only that part of 2; -1: all.
template <class F, int R>
void packed_tile(const typename F::T* w, int k_count, const float* x, float* acc, int half) {
  constexpr auto vecs = std::make_index_sequence<kVecs>();
  constexpr int parts = parts_for(R);
  if constexpr (parts == 1) {
    if (half < 0) return packed_part<F, R, 1, 0>(w, k_count, x, acc, vecs);
  }
  if constexpr (parts < 4) {
    if (half != 1) packed_part<F, R, 2, 0>(w, k_count, x, acc, vecs);
    if (half != 0) packed_part<F, R, 2, 1>(w, k_count, x, acc, vecs);
  } else {
    if (half != 1) packed_part<F, R, 4, 0>(w, k_count, x, acc, vecs);
    if (half != 1) packed_part<F, R, 4, 1>(w, k_count, x, acc, vecs);
    if (half != 0) packed_part<F, R, 4, 2>(w, k_count, x, acc, vecs);
    if (half != 0) packed_part<F, R, 4, 3>(w, k_count, x, acc, vecs);
  }
}

// k_count rows of a panel to floats: pieces [64 / kPiece][kBlock][kPiece], outputs in order.
template <class F, size_t... J>
void unpack(const typename F::T* w, int k_count, float* pieces, std::index_sequence<J...>) {
  for (int k = 0; k < k_count; ++k, w += kPanel) {
    for (size_t line = 0; line < sizeof(*w); ++line) __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * line);
    (F::template put<J>(F::template decode<J>(w), pieces + k * kPiece, kBlock * kPiece), ...);
  }
}

// acc[R][64] at one piece += x * piece, k_count of k; from zero where `first`.
template <int R>
__attribute__((noinline)) void unpacked_tile(const float* piece, int k_count, const float* x, float* acc, bool first) {
  Vec a[R], b[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    a[r] = first ? vzero() : vload(acc + r * kPanel);
    b[r] = first ? vzero() : vload(acc + r * kPanel + kWidth);
  }
  for (int k = 0; k < k_count; ++k, piece += kPiece, x += R) {
    const Vec v = vload(piece), w = vload(piece + kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec s = vsplat(x + r);
      a[r] = vfma(v, s, a[r]);
      b[r] = vfma(w, s, b[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    vstore(acc + r * kPanel, a[r]);
    vstore(acc + r * kPanel + kWidth, b[r]);
  }
}

// Calls f.template operator()<R>() for R = rows, 1..Max.
template <int Max, class Fn>
inline void with_rows(int rows, const Fn& f) {
  if constexpr (Max > 1) {
    if (rows != Max) return with_rows<Max - 1>(rows, f);
  }
  f(std::integral_constant<int, Max>());
}

}  // namespace llmc::lin
