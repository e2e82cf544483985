// linear in AMX's tiles (plugins/cpu/amx_tiles.h), for every number of rows: one row goes through the same instruction as
// many, so its results do not depend on the others. Weights are decoded a piece of 32 outputs at a time (tiles.h). INT4, whose
// groups have scales: int4_tiles.h.
#pragma once
#include <algorithm>

#include "plugins/cpu/amx_tiles.h"
#include "plugins/linear/products.h"
#include "plugins/linear/tiles.h"

#if LLMC_TILES

namespace llmc::lin {

using namespace amx;

static_assert(lin::kPiece == amx::kPiece && kBlock % kSide == 0);

// How weights of a format become a tile's words, two vectors of a piece at a time, and where outputs are among the sums.
template <class F>
struct TileWeights;

template <>
struct TileWeights<InTiles<Bf16Pairs>> {
  using Words = Bf16Words;
  template <int Piece>
  static void decode(const bf16* row, Vec& low, Vec& high) {
    low = Bf16Pairs::decode<piece_vector(Piece, 0)>(row);
    high = Bf16Pairs::decode<piece_vector(Piece, 1)>(row);
  }
  static Lanes value(const float* acc, int at) { return load(acc + at / kWidth * kTileWords); }
};

// Sixteen outputs where vector j of sums is outputs 8j..8j+7 of both groups of 32.
inline Lanes by_eights(const float* acc, int at) {
  const int group = at / 32, vector = at % 32 / 8;
  const float* from = acc + vector * kTileWords + group * 8;
  const __m512 sums = _mm512_castps256_ps512(_mm256_loadu_ps(from));
  return {_mm512_insertf32x8(sums, _mm256_loadu_ps(from + kTileWords), 1)};
}

// For vpshufb: bytes `first` and first + 1 of every 32-bit word, twice.
struct ByteIndex {
  alignas(64) uint8_t at[64];
};
constexpr ByteIndex byte_index(int first) {
  ByteIndex index{};
  for (int i = 0; i < 64; ++i) index.at[i] = uint8_t(i % 16 / 4 * 4 + first + i % 2);
  return index;
}

// Of 32-bit words of rows k and k + 1, the pairs of bytes that stand in the lower (piece 0) or the upper half are put side
// by side; then even bytes and odd ones become bf16 where they stand. So vector j holds outputs 8j..8j+7 of both groups of
// 32 (Fp8), and nothing is moved but by one byte shuffle a vector.
//
// Shifted to its place with its sign behind it, E4M3's exponent is biased by 7; bf16's, by 127, has room for 128 more above
// it: one operation masks and biases, and numbers come out 2^8 times as large, which `value` makes up for.
template <>
struct TileWeights<InTiles<Fp8Pairs>> {
  using Words = Bf16Words;
  static constexpr ByteIndex kLower = byte_index(0), kUpper = byte_index(2);

  template <int Piece>
  static void decode(const uint8_t* row, Vec& low, Vec& high) {
    const __m512i first = _mm512_load_si512(row), second = _mm512_load_si512(row + kPanel);
    __m512i z;
    if constexpr (Piece == 0)
      z = _mm512_mask_shuffle_epi8(first, 0xCCCCCCCCCCCCCCCC, second, _mm512_load_si512(kLower.at));
    else
      z = _mm512_mask_shuffle_epi8(second, 0x3333333333333333, first, _mm512_load_si512(kUpper.at));
    __m512i even = biased(_mm512_slli_epi16(z, 8)), odd = biased(z);
    // One weight in some thousands is below 2^-6.
    if (_mm512_testn_epi8_mask(z, _mm512_set1_epi8(0x78))) [[unlikely]] {
      even = with_small(even, _mm512_slli_epi16(z, 8));
      odd = with_small(odd, z);
    }
    low = (Vec)even;
    high = (Vec)odd;
  }
  static Lanes value(const float* acc, int at) { return by_eights(acc, at) * splat(1.0f / 256); }

 private:
  // The upper bytes of words: (digits & mask) | bias.
  static __m512i biased(__m512i words) {
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(words, 4), _mm512_set1_epi16(int16_t(0x87F0)),
                                     _mm512_set1_epi16(0x4000), 0xEA);
  }
  // Those below 2^-6 are multiples m of 2^-9: m / 2 comes from a table, by the last digits.
  [[gnu::noinline]] static __m512i with_small(__m512i numbers, __m512i words) {
    alignas(64) static constexpr uint16_t halves[32] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4020, 0x4040, 0x4060};
    const __mmask32 small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    const __m512i size =
        _mm512_mask_permutexvar_epi16(numbers, small, _mm512_srli_epi16(words, 8), _mm512_load_si512(halves));
    return _mm512_or_si512(size, _mm512_and_si512(words, _mm512_set1_epi16(int16_t(0x8000))));
  }
};

template <>
struct TileWeights<InTiles<Int4Pairs>> {
  static Lanes value(const float* acc, int at) { return by_eights(acc, at); }
};

// Four k of an output, of which two rows of a panel have two each.
template <>
struct TileWeights<InTiles<Int8Quads>> {
  using Words = Int8Words;
  template <int Piece>
  static void decode(const int8_t* row, Vec& low, Vec& high) {
    low = (Vec)words(row + 2 * Piece * 32);
    high = (Vec)words(row + (2 * Piece + 1) * 32);
  }
  static Lanes value(const float* acc, int at) {
    return {_mm512_cvtepi32_ps(_mm512_loadu_si512(acc + at / kWidth * kTileWords))};
  }

 private:
  static __m512i words(const int8_t* two) {
    const auto* first = reinterpret_cast<const __m256i*>(two);
    return amx::pairs(_mm256_load_si256(first), _mm256_load_si256(first + Int8::kRow / 32));
  }
};

// acc = x * panel for up to sixteen rows, `steps` a multiple of 16: while one run of sixteen steps is multiplied the next is
// decoded, into the other half of `floats` (8 tiles), for a tile is loaded from the cache, not from what is being stored.
template <class F>
[[gnu::noinline]] void tile_panel(TileShapes& shapes, typename F::Weight w, int steps, TileRows x, float* floats, float* acc) {
  using Words = typename TileWeights<F>::Words;
  constexpr int half = 4 * kTileWords;
  shapes.set_panel(x.rows);
  const auto multiply = [&](int step) { panel_products<Words>(x.step(step), floats + step / kSide % 2 * half); };
  zero_panel();
  for (int step = 0; step < steps; step += kSide) {
    float* to = floats + step / kSide % 2 * half;
    for (int row = 0; row < kSide; ++row, w += F::kRow, to += kSide) {
      prefetch<F>(w);
      unrolled<kPieces>([&](auto piece) {
        Vec low, high;
        TileWeights<F>::template decode<decltype(piece)::value>(w, low, high);
        vstore(to + 2 * piece * kTileWords, low);
        vstore(to + (2 * piece + 1) * kTileWords, high);
      });
    }
    if (step) multiply(step - kSide);
  }
  multiply(steps - kSide);
  store_panel(acc);
}

// linear's kernel (cpu.h) with tiles. Threads divide panels times chunks of rows, and help each other, as for many
// rows there.
template <class Kernel, class F>
struct TileKernel : Kernel {
  static constexpr int kChunk = LLMC_CHUNK_ROWS / kBlockRows * kBlockRows;

  // In the shared scratch, followed by each row's factor. One row every thread prepares for itself, in its own.
  const float* prepared(int rows, float* own) const {
    const int width = this->width();
    float* to = rows > 1 ? reinterpret_cast<float*>(this->c.scratch()) : own;
    const Share mine = rows > 1 ? share(rows, this->tid, this->c.threads) : Share{0, 1};
    for (int64_t r = mine.first; r < mine.last; ++r)
      to[int64_t(rows) * width + r] =
          Kernel::factor(this->prepare.tile_row(this->x + r * this->x_stride, this->k, to, width, rows, r));
    if (rows > 1) this->c.barrier(this->tid);
    return to;
  }

  void run(int rows) const {
    if (!rows) return;
    float* floats = reinterpret_cast<float*>(this->c.scratch(this->tid));
    float* acc = floats + kBlock * kPiece;
    const float* packed_x = prepared(rows, acc + kTileSums);
    const float* scales = packed_x + int64_t(rows) * this->width();
    const int blocks = (rows + kBlockRows - 1) / kBlockRows, panels = this->panels();
    int chunks = (rows + kChunk - 1) / kChunk;
    // Work for every thread; and so many pieces that they end together, where a piece has 128 rows to decode weights for.
    const int threads = this->c.threads > 1 ? this->c.threads : 0;
    while (panels * chunks < threads && chunks * 2 <= blocks) chunks *= 2;
    while (panels * chunks < 8 * threads && chunks * 8 <= blocks) chunks *= 2;
    TileShapes shapes;
    for (int64_t unit; (unit = this->c.take(int64_t(panels) * chunks, this->tid)) >= 0;) {
      const int p = int(unit / chunks), chunk = int(unit % chunks);
      const int from = int(int64_t(blocks) * chunk / chunks) * kBlockRows;
      const int to = std::min(rows, int(int64_t(blocks) * (chunk + 1) / chunks) * kBlockRows);
      multiply(shapes, this->panel(p), floats, packed_x + int64_t(from) * this->width(), to - from, acc);
      const typename Kernel::template DoneOf<TileWeights<F>> done(p, this->n, this->w_scale, this->bias);
      for (int r = 0; r < to - from; ++r)
        done(acc + r / kSide * kTileSums + r % kSide * kSide, scales[from + r], this->y + (from + r) * this->y_stride, -1);
    }
  }

  // Sums of all rows = x * panel.
  void multiply(TileShapes& shapes, typename F::Weight panel, float* floats, const float* x, int rows, float* acc) const {
    if constexpr (F::kGrouped)
      int4_rows(shapes, panel, this->k, floats, x, this->width(), rows, acc);
    else
      by_blocks(shapes, panel, floats, x, rows, acc);
  }

  // In blocks of k that are equally long.
  void by_blocks(TileShapes& shapes, typename F::Weight panel, float* floats, const float* x, int rows, float* acc) const {
    const int width = this->width(), blocks = (width + kBlock - 1) / kBlock;
    if (rows <= kSide) return tile_panel<F>(shapes, panel, width, tile_rows(x, width, rows, 0), floats, acc);
    const int most = ((width + blocks - 1) / blocks + kSide - 1) / kSide * kSide;
    for (int at = 0, count; at < width; at += count, panel += int64_t(count) * F::kRow) {
      count = std::min(most, width - at);
      unrolled<kPieces>([&](auto piece) {
        decode<decltype(piece)::value>(panel, count, floats);
        for (int r = 0; r < rows; r += kBlockRows)
          tile_block<typename TileWeights<F>::Words>(
              shapes, floats, count, tile_rows(x, width, rows, r, at), tile_rows(x, width, rows, r + kSide, at),
                     acc + r / kSide * kTileSums + piece * 2 * kTileWords, at == 0);
      });
    }
  }

  // `count` steps of a piece to pairs of tiles, sixteen steps each: tiles that lie in one run are loaded twice as fast. What
  // the thread reads next is fetched meanwhile, as in `Unpacking`.
  template <int Piece>
  [[gnu::noinline]] static void decode(typename F::Weight w, int count, float* floats) {
    constexpr int ahead_bytes = F::kRow * sizeof(*w) / kPieces;
    const char* ahead = reinterpret_cast<const char*>(w + int64_t(count) * F::kRow) + Piece * int64_t(count) * ahead_bytes;
    for (int step = 0; step < count; step += kSide, floats += kTileWords)
      for (int row = 0; row < kSide; ++row, w += F::kRow, floats += kSide, ahead += ahead_bytes) {
        Vec low, high;
        TileWeights<F>::template decode<Piece>(w, low, high);
        vstore(floats, low);
        vstore(floats + kTileWords, high);
        _mm_prefetch(ahead, _MM_HINT_T1);
      }
  }
};

}  // namespace llmc::lin

#endif
