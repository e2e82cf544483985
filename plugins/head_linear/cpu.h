// head_linear on the cpu target: see cpu.py for what the arguments are. Every head multiplies its columns by its own panels
// with linear's inner loops, so that an output is one chain of fused multiply-adds over k, however rows are grouped.
//
// Threads divide the panels of all heads (halves of them for a few rows); each output is computed by one thread.
#pragma once
#include <algorithm>

#include "plugins/linear/cpu.h"

namespace llmc {
namespace heads {

using namespace lin;

template <int K, int N, class F>
struct Kernel {
  static constexpr int kPanels = (N + kPanel - 1) / kPanel;
  const Ctx& c;
  int tid, heads, rows;
  const typename F::T* w;
  const float* packed_x;  // by head: rows in tiles
  float* y;

  const typename F::T* panel(int h, int p) const { return w + (int64_t(h) * kPanels + p) * kPanel * K; }
  const float* tile_at(int h, int first) const { return packed_x + (int64_t(h) * rows + first) * K; }

  void put(int h, int p, int half, int first, int count, const float* acc) const {
    const int left = std::min(kPanel, N - p * kPanel);
    for (int r = 0; r < count; ++r)
      for (int at = 0; at < left; at += kLanes)
        if (half < 0 || at / kLanes % 2 == half)
          fn::store(y + (int64_t(first + r) * heads + h) * N + p * kPanel + at, load(acc + r * kPanel + at),
                    std::min(left - at, kLanes));
  }

  void few(const Tiles& tiles, int h, int p, int half) const {
    alignas(64) float acc[kMaxPackedTile * kPanel];
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int first = tiles.first(tile), size = tiles.size(tile);
      with_rows<kMaxPackedTile>(size, [&](auto r) {
        packed_tile<F, decltype(r)::value>(panel(h, p), K, tile_at(h, first), acc, half);
      });
      put(h, p, half, first, size, acc);
    }
  }

  void many(const Tiles& tiles, int h, int p) const {
    float *floats = reinterpret_cast<float*>(c.scratch(tid)), *acc = floats + kRows<F> * lin::kPiece;
    for (int from = 0; from < tiles.count; from += kMaxChunkTiles) {
      const Chunk chunk{tiles, from, std::min(from + kMaxChunkTiles, tiles.count), tile_at(h, 0), acc};
      Columns<F, Plain>{K, {}}.many(panel(h, p), floats, chunk);
      put(h, p, -1, tiles.first(from), chunk.rows(), acc);
    }
  }

  void run(const Tiles& tiles) const {
    if (rows > kMaxPackedRows) {
      const Share mine = share(int64_t(heads) * kPanels, tid, c.threads);
      for (int64_t u = mine.first; u < mine.last; ++u) many(tiles, int(u / kPanels), int(u % kPanels));
      return;
    }
    const Share mine = share(2 * int64_t(heads) * kPanels, tid, c.threads);
    for (int64_t u = mine.first; u < mine.last; ++u) {
      const bool whole = u % 2 == 0 && u + 1 < mine.last;
      few(tiles, int(u / 2 / kPanels), int(u / 2 % kPanels), whole ? -1 : int(u % 2));
      u += whole;
    }
  }
};

// All threads together: K columns of each head of each row to tiles of the head.
template <int K>
void pack(const Ctx& c, int tid, const Tiles& tiles, int heads, const float* x, int64_t x_stride, int width, float* to) {
  const Share mine = share(int64_t(heads) * tiles.count, tid, c.threads);
  for (int64_t u = mine.first; u < mine.last; ++u) {
    const int h = int(u / tiles.count), tile = int(u % tiles.count);
    const int first = tiles.first(tile), size = tiles.size(tile);
    float* at = to + (int64_t(h) * tiles.rows + first) * K;
    for (int r = 0; r < size; ++r) {
      const float* row = x + (first + r) * x_stride + int64_t(h) * width;
      for (int k = 0; k < K; ++k) at[int64_t(k) * size + r] = row[k];
    }
  }
}

}  // namespace heads

// y[rows, H * N] from x[rows, H * width]: each head's columns start..start+K times its w[N, K].
template <int H, int N, int K, class F>
void head_linear(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, int width, int start,
                 const typename F::T* w, float* y) {
  float* packed = reinterpret_cast<float*>(c.scratch());
  const lin::Tiles tiles(rows, rows > lin::kMaxPackedRows ? lin::kMaxTile : lin::kMaxPackedTile);
  heads::pack<K>(c, tid, tiles, H, x + start, x_stride, width, packed);
  c.barrier(tid);
  heads::Kernel<K, N, F>{c, tid, H, int(rows), w, packed, y}.run(tiles);
}

}  // namespace llmc
