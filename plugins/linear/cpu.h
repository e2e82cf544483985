// linear on the cpu target: see cpu.py for what the arguments are. Three loops: one row straight from the packed bytes, a
// few rows likewise in tiles, many rows against floats that their first tile decodes. All give the same bits (tiles.h).
// On targets with instructions for them, products are of bf16, in pairs (bf16_dot.h); AMX's tiles, of bf16 or INT8, stand
// instead of the loops.
//
// Threads divide panels (a few rows) or panels times chunks of rows (many: who has done his helps the others); each output
// is computed by one thread.
#pragma once
#include <algorithm>

#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"
#include "plugins/linear/amx.h"
#include "plugins/linear/products.h"
#include "plugins/linear/quantize.h"
#include "plugins/linear/tiles.h"

namespace llmc {
namespace lin {

// Up to here rows are multiplied straight from the packed bytes; beyond, unpacking once is cheaper than decoding again.
constexpr int kMaxPackedRows = LLMC_PACKED_ROWS;
constexpr int kMaxChunkTiles = LLMC_CHUNK_ROWS / kMaxTile;
constexpr int kThreadFloats = (256 + 512) * kPanel;  // THREAD_FLOATS in cpu.py: a piece of a block, a chunk's sums
static_assert(kBlock * kPiece + kMaxChunkTiles * kMaxTile * kPanel <= kThreadFloats);

struct Linear {  // activations, on results
  static Lanes act(Lanes x) { return x; }
};
struct Relu {
  static Lanes act(Lanes x) { return fn::relu(x); }
};
struct Silu {
  static Lanes act(Lanes x) { return fn::silu(x); }
};
struct Gelu {
  static Lanes act(Lanes x) { return fn::gelu(x); }
};
struct GeluTanh {
  static Lanes act(Lanes x) { return fn::gelu_tanh(x); }
};

// n things in runs whose sizes differ by at most one: the first of run i.
constexpr int run_start(int n, int runs, int i) { return n / runs * i + std::min(i, n % runs); }

// Rows in tiles of at most `most`.
struct Tiles {
  int rows, count;
  Tiles(int64_t n, int most) : rows(int(n)), count((rows + most - 1) / most) {}
  int first(int tile) const { return run_start(rows, count, tile); }
  int size(int tile) const { return first(tile + 1) - first(tile); }
};

// From sums of a panel to y: scales, bias, activation, gate times up. Factors are those of 64 outputs, 0 behind N.
template <class Sums, class Act, bool Gated, bool Scaled, bool Bias>
struct Finish {
  alignas(64) float scale[kPanel], bias[kPanel];
  int first, width;  // columns of y: the panel's first, and how many exist

  Finish(int panel, int n, const float* w_scale, const float* b) {
    const int side = Gated ? kPanel / 2 : kPanel, columns = Gated ? n / 2 : n;
    first = panel * side;
    width = std::min(side, columns - first);
    for (int i = 0; i < kPanel; ++i) {
      const int column = first + i % side;
      const int at = i < side ? column : columns + column;
      if (Scaled) scale[i] = column < columns ? w_scale[at] : 0;
      if (Bias) bias[i] = column < columns ? b[at] : 0;
    }
  }

  Lanes result(const float* acc, int at, float x_scale) const {
    Lanes v = Sums::value(acc, at);
    if (Scaled) v = v * (splat(x_scale) * load(scale + at));
    return Bias ? v + load(bias + at) : v;
  }

  // One row; `half` as in packed_tile.
  void operator()(const float* acc, float x_scale, float* y, int half) const {
    for (int group = 0; group < (Gated ? 2 : 4); ++group) {
      const int at = group * kLanes, left = std::min(width - at, kLanes);
      if ((half >= 0 && group % 2 != half) || left <= 0) continue;
      Lanes v = Act::act(result(acc, at, x_scale));
      if (Gated) v = v * result(acc, at + kPanel / 2, x_scale);
      fn::store(y + first + at, v, left);
    }
  }
};

// Some tiles of prepared rows x, and the sums of their rows.
struct Chunk {
  const Tiles& tiles;
  int from, to;
  const float* x;
  float* acc;
  int rows() const { return tiles.first(to) - tiles.first(from); }
};

// How k columns of a weight are multiplied with prepared rows: where a row's next begins, and many rows against a panel that
// is decoded once.
template <class F, class X>
struct Columns {
  int k;
  X prepare;

  // Floats of a prepared row.
  int width() const {
    if constexpr (F::kGrouped)
      return prepare.width(k);
    else
      return F::steps(k);
  }
  typename F::Weight panel(typename F::Weight w, int64_t p) const {
    if constexpr (F::kGrouped)
      return w.panel(p, k);
    else
      return w + p * F::steps(k) * F::kRow;
  }

  // The sums of the chunk; `floats` is room for a piece of a block.
  void many(typename F::Weight panel, float* floats, const Chunk& chunk) const {
    if constexpr (F::kGrouped)
      by_groups(panel, floats, chunk);
    else
      by_blocks(panel, floats, chunk);
    settle<F>(chunk.acc, chunk.rows(), std::make_index_sequence<kVecs>());
  }

  void by_blocks(const typename F::T* panel, float* floats, const Chunk& chunk) const {
    const int steps = F::steps(k);
    for (int at = 0, count; at < steps; at += count, panel += int64_t(count) * F::kRow) {
      count = std::min(kBlock, steps - at);
      multiply(panel, floats, at, count, chunk, [&](auto rows, auto weights, const float* x, float* acc, int) {
        block_tile<decltype(rows)::value, typename F::Sums>(weights, count, x, acc, at == 0);
      });
    }
  }

  void by_groups(typename F::Weight panel, float* floats, const Chunk& chunk) const {
    alignas(64) float scale[kPanel];
    for (int k0 = 0, group = 0, count; k0 < k; k0 += count, ++group) {
      count = group_size(k0, k, panel.start);
      unpack_scale<F>(panel.scale + group * kPanel, scale, std::make_index_sequence<kVecs>());
      const auto *bytes = panel.bytes + int64_t(k0) * F::kRow, *zero = panel.zero + group * F::kRow;
      multiply(bytes, floats, k0 + group, count, chunk, [&](auto rows, auto weights, const float* x, float* acc, int at) {
        group_tile<decltype(rows)::value, typename F::Sums>(weights, count, x, acc, k0 == 0, zero, scale + at);
      });
    }
  }

  // Calls tile(rows, weights, x, sums, the piece's first output) for every piece of `count` rows of a panel and every tile
  // of the chunk; x from step `at` on.
  template <class Tile>
  void multiply(const typename F::T* w, float* floats, int at, int count, const Chunk& chunk, const Tile& tile) const {
    const char* ahead = reinterpret_cast<const char*>(w + int64_t(count) * F::kRow);
    const int64_t ahead_step = int64_t(count) * F::kRow * sizeof(*w) / kPieces;
    unrolled<kPieces>([&](auto piece) {
      constexpr int p = decltype(piece)::value, column = piece_vector(p, 0) * kWidth;
      for (int t = chunk.from; t < chunk.to; ++t) {
        const int first = chunk.tiles.first(t), size = chunk.tiles.size(t);
        const float* x = chunk.x + int64_t(first) * width() + int64_t(at) * size;
        float* acc = chunk.acc + (first - chunk.tiles.first(chunk.from)) * kPanel + column;
        with_rows<kMaxTile>(size, [&](auto rows) {
          if (t == chunk.from)
            tile(rows, Unpacking<F, p>{w, floats, ahead + p * ahead_step}, x, acc, column);
          else
            tile(rows, Unpacked{floats}, x, acc, column);
        });
      }
    });
  }
};

// What of linear<...> differs by kind, not by size, so that one copy of the loops serves all layers of a kind.
template <class F, class X, class Act, bool Gated, bool Bias>
struct Kernel : Columns<F, X> {
  using Columns<F, X>::k, Columns<F, X>::prepare, Columns<F, X>::width;
  template <class Sums>
  using DoneOf = Finish<Sums, Act, Gated, X::kScaled, Bias>;
  using Done = DoneOf<typename F::Sums>;
  const Ctx& c;
  int tid, n;
  const float* x;
  int64_t x_stride;
  typename F::Weight w;
  const float *w_scale, *bias;
  float* y;
  int64_t y_stride;

  int panels() const { return (n + kPanel - 1) / kPanel; }
  static float factor(float scale) {
    if constexpr (X::kScaled)
      return scale * X::kRest;
    else
      return scale;
  }
  typename F::Weight panel(int p) const { return Columns<F, X>::panel(w, p); }

  // Every thread prepares the row for itself: cheaper than a meeting.
  void one_row() const {
    const float* row = x;
    float scale = 1;
    if (!std::is_same_v<X, Plain>) {
      float* own = reinterpret_cast<float*>(c.scratch(tid));
      scale = factor(prepare(x, k, own, 1));
      row = own;
    }
    halves([&](int p, int half) {
      alignas(64) float acc[kPanel];
      packed_tile<F, 1>(panel(p), F::steps(k), row, acc, half);
      Done(p, n, w_scale, bias)(acc, scale, y, half);
    });
  }

  // Calls body(panel, half) for this thread's panels: a thread's share may begin or end with half a panel.
  template <class Body>
  void halves(const Body& body) const {
    const Share mine = share(2 * panels(), tid, c.threads);
    for (int64_t h = mine.first; h < mine.last; ++h) {
      const bool whole = h % 2 == 0 && h + 1 < mine.last;
      body(int(h / 2), whole ? -1 : int(h % 2));
      h += whole;
    }
  }

  // All threads together: x to tiles in the shared scratch, followed by each row's factor.
  const float* tiled(const Tiles& tiles) const {
    float* to = reinterpret_cast<float*>(c.scratch());
    float* scales = to + int64_t(tiles.rows) * width();
    const Share mine = share(tiles.rows, tid, c.threads);
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int first = tiles.first(tile), size = tiles.size(tile);
      for (int r = 0; r < size; ++r)
        if (first + r >= mine.first && first + r < mine.last)
          scales[first + r] = factor(prepare(x + (first + r) * x_stride, k, to + int64_t(first) * width() + r, size));
    }
    c.barrier(tid);
    return to;
  }

  void few_rows(int64_t rows) const {
    const Tiles tiles(rows, kMaxPackedTile);
    const float* packed_x = tiled(tiles);
    const float* scales = packed_x + rows * width();
    halves([&](int p, int half) {
      const Done done(p, n, w_scale, bias);
      alignas(64) float acc[kMaxPackedTile * kPanel];
      for (int tile = 0; tile < tiles.count; ++tile) {
        const int first = tiles.first(tile), size = tiles.size(tile);
        with_rows<kMaxPackedTile>(size, [&](auto r) {
          packed_tile<F, decltype(r)::value>(panel(p), F::steps(k), packed_x + int64_t(first) * width(), acc, half);
        });
        for (int r = 0; r < size; ++r) done(acc + r * kPanel, scales[first + r], y + (first + r) * y_stride, half);
      }
    });
  }

  void many_rows(int64_t rows) const {
    const Tiles tiles(rows, kMaxTile);
    const float* packed_x = tiled(tiles);
    const float* scales = packed_x + rows * width();
    // Chunks keep a thread's sums in its cache; twice as many where panels alone would divide the work unevenly.
    int chunks = (tiles.count + kMaxChunkTiles - 1) / kMaxChunkTiles;
    while (c.threads > 1 && panels() * chunks < 16 * c.threads && chunks * 8 <= tiles.count) chunks *= 2;
    float* floats = reinterpret_cast<float*>(c.scratch(tid));
    float* acc = floats + kRows<F> * kPiece;
    for (int64_t unit; (unit = c.take(int64_t(panels()) * chunks, tid)) >= 0;) {
      const int p = int(unit / chunks), chunk = int(unit % chunks);
      const int from = run_start(tiles.count, chunks, chunk), to = run_start(tiles.count, chunks, chunk + 1);
      this->many(panel(p), floats, {tiles, from, to, packed_x, acc});
      const Done done(p, n, w_scale, bias);
      const int top = tiles.first(from);
      for (int r = top; r < tiles.first(to); ++r) done(acc + (r - top) * kPanel, scales[r], y + r * y_stride, -1);
    }
  }

  template <int64_t Min, int64_t Max>
  void run(int64_t rows) const {
    if constexpr (Min <= 1) {
      if (rows <= 1) return rows ? one_row() : void();
    }
    if constexpr (Min <= kMaxPackedRows && Max > 1) {
      if (rows <= kMaxPackedRows) return few_rows(rows);
    }
    if constexpr (Max > kMaxPackedRows) many_rows(rows);
  }
};

// Runs the kernel: in tiles where its format says so.
template <int64_t Min, int64_t Max, class F, class Kernel>
void multiply(const Kernel& kernel, int64_t rows) {
#if LLMC_TILES
  // Beside a single row, of half as many words as columns, with INT4 up to two steps more, and its factor.
  static_assert(kBlock * kPiece + kTileSums + 2 * kSide + 1 <= kThreadFloats / 2);
  if constexpr (kInTiles<F>)
    TileKernel<Kernel, F>{kernel}.run(int(rows));
  else
#endif
    kernel.template run<Min, Max>(rows);
}

}  // namespace lin

// y[rows, N] (N/2 when gated) from x[rows, K]; rows is within Min..Max. With AllReduce the sum over ranks of N columns.
template <int K, int N, int64_t Min, int64_t Max, class F, class X, class Act, bool Gated, bool Bias, bool AllReduce>
void linear(const Ctx& c, int tid, int64_t rows, const float* x, int64_t x_stride, X prepare, typename F::Weight w,
            const float* w_scale, const float* bias, float* y, int64_t y_stride) {
  using Products = lin::Products<K, F, X>;
  using Format = typename Products::Format;
  using Input = typename Products::Input;
  const Input input = Products::input(prepare);
  if constexpr (!AllReduce) {
    lin::multiply<Min, Max, Format>(lin::Kernel<Format, Input, Act, Gated, Bias>{
        {K, input}, c, tid, N, x, x_stride, w, w_scale, bias, y, y_stride}, rows);
  } else {
    float* partial = c.comm->slot(c.comm->rank);
    lin::multiply<Min, Max, Format>(lin::Kernel<Format, Input, Act, Gated, false>{
        {K, input}, c, tid, N, x, x_stride, w, w_scale, nullptr, partial, N}, rows);
    rank_all_reduce(*c.comm, tid, c.threads, [&] { c.barrier(tid); }, y, rows, N, Bias ? bias : nullptr);
  }
}

}  // namespace llmc
