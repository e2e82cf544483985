// Products in AMX's tiles: sixteen rows of x times sixteen outputs, 32 columns of bf16 or 64 of INT8 at a time. Comes in: x and
// the second operand as words, pairs of bf16 or four INT8 in a float's place. Goes out: sums, floats or whole numbers.
//
// Of bf16, tdpbf16ps adds the products of a tile's even columns in order, those of its odd ones likewise, both from zero, then
// the two sums, and that to the output: another order than vdpbf16ps's. A row's sums do not depend on the others. Subnormals
// are zeros. Products and order: Intel's manual, TDPBF16PS. Of INT8 sums are exact in any order.
//
// x lies as tiles do: sixteen words of each of sixteen rows, then the next sixteen words. The second operand likewise: a row
// for each word of x, a word for each output. Tiles that lie in one run are loaded twice as fast as others.
#pragma once
#include "plugins/cpu/lanes.h"

#include <algorithm>

namespace llmc::amx {

constexpr int kSide = 16;       // rows of a tile, and words of a row: operands or sums
constexpr int kBlockRows = 32;  // rows of x that meet a piece at once, in four tiles of sums
constexpr int kTileBytes = 64;  // of a tile's row
constexpr int kTileWords = kSide * kSide;
constexpr int kTileSums = 4 * kTileWords;  // of sixteen rows and 64 outputs: a tile after the other
constexpr int kPiece = 2 * kSide;          // outputs whose sums meet a run of steps at once

#if LLMC_TILES

// What a thread's tile registers are shaped for.
class TileShapes {
 public:
  // Sums of up to sixteen rows and a panel in 0-3, their x in 4, weights in 5-7.
  void set_panel(int rows) { set(rows, rows, kSide); }
  // Sums of rows 0..15 and a piece in 0 and 1, of the other rows in 2 and 3, their x in 4 and 5, weights in 6 and 7.
  void set_piece(int rows) {
    const int upper = std::max(rows - kSide, 1);
    set(std::min(rows, kSide), upper, upper);
  }
  ~TileShapes() {
    if (shape_) _tile_release();  // the system saves less of a thread whose tiles are free
  }

 private:
  struct alignas(64) Config {  // Intel's manual, palette 1
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
  int shape_ = 0;

  void set(int lower, int upper, int fifth) {
    const int shape = lower | upper << 8 | fifth << 16;
    if (shape == shape_) return;
    shape_ = shape;
    Config config;
    for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(lower);
    for (int tile : {2, 3}) config.rows[tile] = uint8_t(upper);
    config.rows[5] = uint8_t(fifth);
    for (int tile : {6, 7}) config.rows[tile] = kSide;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64;
    __asm__ volatile("" ::"r"(&config) : "memory");  // g++ 12 believes that only the first eight bytes are read
    _tile_loadconfig(&config);
  }
};

// Some rows of x, at most sixteen, from some step on: a tile for every sixteen words.
struct TileRows {
  const float* x;
  int rows;
  const float* step(int at) const { return x + at * rows; }
};

// Of x[rows], `width` words a row: the rows from r on, r a multiple of 16, from step `at` on; none where there are none.
inline TileRows tile_rows(const float* x, int width, int rows, int64_t r, int at = 0) {
  const int count = int(std::clamp<int64_t>(rows - r, 0, kSide));
  return {x + r * width + int64_t(at) * count, count};
}

// Where the words of row r from `at` on go, up to the next multiple of sixteen.
inline float* row_words(float* x, int width, int rows, int64_t r, int at) {
  const int64_t first = r / kSide * kSide, count = std::min<int64_t>(rows - first, kSide);
  return x + first * width + r % kSide * kSide + at / kSide * kSide * count + at % kSide;
}

// Sixteen columns of row r from `column` on, rounded to bf16 to nearest even, as eight words.
inline void put_row(float* x, int width, int rows, int64_t r, int column, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row_words(x, width, rows, r, column / 2)),
                      (__m256i)_mm512_cvtneps_pbh(values.v));
}

// The second operand's words of sixteen outputs: of each, sixteen bits of a, then of b.
inline __m512i pairs(__m256i a, __m256i b) {
  alignas(64) static constexpr uint16_t index[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = _mm512_inserti32x8(_mm512_castsi256_si512(a), b, 1);
  return _mm512_permutexvar_epi16(_mm512_load_si512(index), both);
}

// What is multiplied. The instructions want the numbers of tiles as they stand in the source.
struct Bf16Words {
  static constexpr bool kWhole = false;
};
struct Int8Words {
  static constexpr bool kWhole = true;
};
#define LLMC_TILE_PRODUCT(WORDS, SUM, X, WEIGHTS) \
  if constexpr (WORDS::kWhole)                    \
    _tile_dpbssd(SUM, X, WEIGHTS);                \
  else                                            \
    _tile_dpbf16ps(SUM, X, WEIGHTS)

// Of sixteen rows and a panel: a step of its four sums, to zero, and to memory. The fences: the compiler does not know that
// tile loads read memory.
template <class Words>
[[gnu::always_inline]] inline void panel_products(const float* x, const float* weights) {
  __asm__ volatile("" ::: "memory");
  _tile_loadd(4, x, kTileBytes);
  _tile_loadd(5, weights, kTileBytes);
  _tile_loadd(6, weights + kTileWords, kTileBytes);
  LLMC_TILE_PRODUCT(Words, 0, 4, 5);
  _tile_loadd(7, weights + 2 * kTileWords, kTileBytes);
  LLMC_TILE_PRODUCT(Words, 1, 4, 6);
  _tile_loadd(5, weights + 3 * kTileWords, kTileBytes);
  LLMC_TILE_PRODUCT(Words, 2, 4, 7);
  LLMC_TILE_PRODUCT(Words, 3, 4, 5);
  __asm__ volatile("" ::: "memory");
}
[[gnu::always_inline]] inline void zero_panel() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
[[gnu::always_inline]] inline void store_panel(float* acc) {
  _tile_stored(0, acc, kTileBytes);
  _tile_stored(1, acc + kTileWords, kTileBytes);
  _tile_stored(2, acc + 2 * kTileWords, kTileBytes);
  _tile_stored(3, acc + 3 * kTileWords, kTileBytes);
  __asm__ volatile("" ::: "memory");
}

// acc at one piece += x * weights for the rows of `lower` and, kTileSums behind, those of `upper`; `count` steps, a multiple
// of 16; from zero where `first`.
template <class Words>
[[gnu::noinline]] void tile_block(TileShapes& shapes, const float* weights, int count, TileRows lower, TileRows upper,
                                         float* acc, bool first) {
  const bool both = upper.rows > 0;
  float* below = acc + kTileSums;
  shapes.set_piece(lower.rows + upper.rows);
  __asm__ volatile("" ::: "memory");
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, acc, kTileBytes);
    _tile_loadd(1, acc + kTileWords, kTileBytes);
    if (both) {
      _tile_loadd(2, below, kTileBytes);
      _tile_loadd(3, below + kTileWords, kTileBytes);
    }
  }
  for (int step = 0; step < count; step += kSide) {
    _tile_loadd(4, lower.step(step), kTileBytes);
    _tile_loadd(6, weights + step * kPiece, kTileBytes);
    _tile_loadd(7, weights + step * kPiece + kTileWords, kTileBytes);
    LLMC_TILE_PRODUCT(Words, 0, 4, 6);
    LLMC_TILE_PRODUCT(Words, 1, 4, 7);
    if (both) {
      _tile_loadd(5, upper.step(step), kTileBytes);
      LLMC_TILE_PRODUCT(Words, 2, 5, 6);
      LLMC_TILE_PRODUCT(Words, 3, 5, 7);
    }
  }
  _tile_stored(0, acc, kTileBytes);
  _tile_stored(1, acc + kTileWords, kTileBytes);
  if (both) {
    _tile_stored(2, below, kTileBytes);
    _tile_stored(3, below + kTileWords, kTileBytes);
  }
  __asm__ volatile("" ::: "memory");
}

#endif

}  // namespace llmc::amx
