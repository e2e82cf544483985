// Products of bf16 in AMX's tiles: sixteen rows of x times sixteen outputs, 32 columns at a time, for every number of rows.
//
// tdpbf16ps adds the products of a tile's even columns in order, those of its odd ones likewise, both from zero, then the
// two sums, and that to the output: another order than vdpbf16ps's, so one row goes through the same instruction as many,
// and a row's results do not depend on the others. Subnormals are zeros. Products and order: Intel's manual, TDPBF16PS.
//
// x lies row by row, as pairs; weights are decoded a piece of 32 outputs at a time (tiles.h), which is how the second
// operand wants them: a row for each pair of columns, a word for each output.
#pragma once
#include <algorithm>

#include "plugins/linear/bf16_dot.h"
#include "plugins/linear/tiles.h"

#if LLMC_TILES

namespace llmc::lin {

constexpr int kTileRows = 16;   // of x, and steps (pairs of columns) of a weight
constexpr int kBlockRows = 32;  // rows of x that meet a piece at once, in four tiles of sums
static_assert(kPiece == 2 * kTileRows && kBlock % kTileRows == 0);

// What a thread's tile registers are shaped for: 0-3 sums, 4 and 5 rows of x, 6 and 7 weights.
class TileShapes {
 public:
  // Rows 0..15 are in tiles 0, 1 and 4, the others in 2, 3 and 5.
  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    Config config;
    const int low = std::min(rows, kTileRows), high = std::max(rows - kTileRows, 1);
    for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(low);
    for (int tile : {2, 3, 5}) config.rows[tile] = uint8_t(high);
    for (int tile : {6, 7}) config.rows[tile] = kTileRows;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64;
    _tile_loadconfig(&config);
  }
  ~TileShapes() {
    if (rows_) _tile_release();  // the system saves less of a thread whose tiles are free
  }

 private:
  struct alignas(64) Config {  // Intel's manual, palette 1
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
  int rows_ = 0;
};

// acc[rows][64] at one piece += x * weights for at most kBlockRows rows of `width` words, `count` steps, a multiple of 16;
// from zero where `first`. The fences: the compiler does not know that tile loads read memory.
[[gnu::noinline]] inline void tile_block(TileShapes& shapes, const float* weights, int count, const float* x, int width,
                                         int rows, float* acc, bool first) {
  constexpr int acc_bytes = kPanel * sizeof(float), weights_bytes = kPiece * sizeof(float);
  const int x_bytes = width * int(sizeof(float));
  const bool both = rows > kTileRows;
  float* lower = acc + kTileRows * kPanel;
  shapes.set(rows);
  __asm__ volatile("" ::: "memory");
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, acc, acc_bytes);
    _tile_loadd(1, acc + kTileRows, acc_bytes);
    if (both) {
      _tile_loadd(2, lower, acc_bytes);
      _tile_loadd(3, lower + kTileRows, acc_bytes);
    }
  }
  for (int step = 0; step < count; step += kTileRows) {
    _tile_loadd(4, x + step, x_bytes);
    _tile_loadd(6, weights + step * kPiece, weights_bytes);
    _tile_loadd(7, weights + step * kPiece + kTileRows, weights_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, x + int64_t(kTileRows) * width + step, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, acc_bytes);
  _tile_stored(1, acc + kTileRows, acc_bytes);
  if (both) {
    _tile_stored(2, lower, acc_bytes);
    _tile_stored(3, lower + kTileRows, acc_bytes);
  }
  __asm__ volatile("" ::: "memory");
}

// linear's kernel (cpu.h) with tiles. Threads divide panels times chunks of rows, as for many rows there.
template <class Kernel, class F>
struct TileKernel : Kernel {
  static constexpr int kChunk = LLMC_CHUNK_ROWS / kBlockRows * kBlockRows;

  // Row by row in the shared scratch, followed by each row's factor. One row every thread prepares for itself, in its own.
  const float* prepared(int rows, float* own) const {
    const int width = this->width();
    float* to = rows > 1 ? reinterpret_cast<float*>(this->c.scratch()) : own;
    const Share mine = rows > 1 ? share(rows, this->tid, this->c.threads) : Share{0, 1};
    for (int64_t r = mine.first; r < mine.last; ++r)
      to[int64_t(rows) * width + r] =
          Kernel::factor(this->prepare(this->x + r * this->x_stride, this->k, to + r * width, 1));
    if (rows > 1) this->c.barrier(this->tid);
    return to;
  }

  void run(int rows) const {
    if (!rows) return;
    float* floats = reinterpret_cast<float*>(this->c.scratch(this->tid));
    float* acc = floats + kBlock * kPiece;
    const float* packed_x = prepared(rows, acc + kPanel);
    const float* scales = packed_x + int64_t(rows) * this->width();
    const int blocks = (rows + kBlockRows - 1) / kBlockRows, panels = this->panels();
    int chunks = (rows + kChunk - 1) / kChunk;
    while (this->c.threads > 1 && panels * chunks < 16 * this->c.threads && chunks * 2 <= blocks) chunks *= 2;
    const Share mine = share(int64_t(panels) * chunks, this->tid, this->c.threads);
    TileShapes shapes;
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int p = int(unit / chunks), chunk = int(unit % chunks);
      const int from = int(int64_t(blocks) * chunk / chunks) * kBlockRows;
      const int to = std::min(rows, int(int64_t(blocks) * (chunk + 1) / chunks) * kBlockRows);
      multiply(shapes, this->panel(p), floats, packed_x + int64_t(from) * this->width(), to - from, acc);
      const typename Kernel::Done done(p, this->n, this->w_scale, this->bias);
      for (int r = from; r < to; ++r) done(acc + (r - from) * kPanel, scales[r], this->y + r * this->y_stride, -1);
    }
  }

  // acc[rows][64] = x * panel.
  void multiply(TileShapes& shapes, typename F::Weight panel, float* floats, const float* x, int rows, float* acc) const {
    const int width = this->width();
    for (int at = 0, count; at < width; at += count, panel += int64_t(count) * F::kRow) {
      count = std::min(kBlock, width - at);
      unrolled<kPieces>([&](auto piece) {
        decode<decltype(piece)::value>(panel, count, floats);
        for (int r = 0; r < rows; r += kBlockRows)
          tile_block(shapes, floats, count, x + int64_t(r) * width + at, width, std::min(rows - r, kBlockRows),
                     acc + r * kPanel + piece * kPiece, at == 0);
      });
    }
  }

  // `count` steps of a piece to floats.
  template <int Piece>
  static void decode(typename F::Weight w, int count, float* floats) {
    const char* ahead = reinterpret_cast<const char*>(w + int64_t(count) * F::kRow);
    Unpacking<F, Piece> weights{w, floats, ahead + Piece * int64_t(count) * F::kRow * sizeof(*w) / kPieces};
    Vec low, high;
    for (int step = 0; step < count; ++step) weights.next(low, high);
  }
};

}  // namespace llmc::lin

#endif
