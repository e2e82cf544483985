// INT4 weights in AMX's tiles of bf16 (plugins/cpu/amx_tiles.h), from the bytes that every ISA level reads (int4.h): q - zero
// is a whole number within -15..15, which bf16 holds exactly; x is rounded to bf16. A group's sum is that of its tiles in
// order, from zero; then the scale, once, and groups are added in order, in float.
//
// x lies by groups, each filled up with zeros to whole steps of 32 columns, which meet zero points.
// Two rows of weights are one vector. Of its bytes the lower nibbles, then the upper ones become differences, which are
// looked up in a table of all 31.
#pragma once
#include "plugins/cpu/amx_tiles.h"
#include "plugins/linear/tiles.h"

#if LLMC_TILES

namespace llmc::lin {

constexpr int kStepColumns = 2 * amx::kSide;
constexpr int kGroupWords = kGroup / 2;  // of a whole group's x

// Words of a prepared x that `columns` of a group take.
constexpr int group_words(int columns) { return (columns + kStepColumns - 1) / kStepColumns * amx::kSide; }

struct Int4Pairs : Int4 {
  static constexpr int kRow = 2 * Int4::kRow;
};

// What a linear with such a weight reads of x.
struct GroupedPairs {
  static constexpr bool kScaled = false;
  int start;

  int width(int n) const {
    int words = 0;
    for (int k = 0, count; k < n; k += count) count = group_size(k, n, start), words += group_words(count);
    return words;
  }

  // Row r of tiles.
  float tile_row(const float* x, int n, float* to, int width, int rows, int64_t r) const {
    for (int k = 0, at = 0, count; k < n; k += count) {
      count = group_size(k, n, start);
      for (const int end = at + group_words(count), from = at; at < end; at += kWidth / 2)
        amx::put_row(to, width, rows, r, 2 * at, {part_of(x + k, 2 * (at - from), count)});
    }
    return 1;
  }
};

// Where the halves of two rows' 32-bit words go: side by side, the lower ones of all words first.
struct HalfIndex {
  alignas(64) uint16_t at[32];
};
constexpr HalfIndex half_index() {
  HalfIndex index{};
  for (int i = 0; i < 32; ++i) index.at[i] = uint16_t(i % 2 * 16 + i / 2 % 8 * 2 + i / 16);
  return index;
}

// 0..15, then -16..-1, as bf16.
alignas(64) inline constexpr uint16_t kInt4Numbers[32] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160,
    0x4170, 0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80};

// A group's numbers as pairs of bf16. Vector v is outputs 8v..8v+7 of both groups of 32: nibble v of a half of a word.
class Int4Decoder {
 public:
  explicit Int4Decoder(const uint8_t* zero) {
    const __m512i both = halves(_mm512_broadcast_i32x8(_mm256_load_si256(reinterpret_cast<const __m256i*>(zero))));
    even_ = low_nibbles(both), odd_ = low_nibbles(_mm512_srli_epi16(both, 4));
  }

  // Vectors 2 * Piece and 2 * Piece + 1 of rows k and k + 1, which `halves` has arranged.
  template <int Piece>
  [[gnu::always_inline]] void decode(__m512i halves, Vec& low, Vec& high) const {
    low = numbers<Piece>(_mm512_sub_epi8(low_nibbles(halves), even_));
    high = numbers<Piece>(_mm512_sub_epi8(low_nibbles(_mm512_srli_epi16(halves, 4)), odd_));
  }

  static __m512i halves(__m512i rows) {
    static constexpr HalfIndex index = half_index();
    return _mm512_permutexvar_epi16(_mm512_load_si512(index.at), rows);
  }

 private:
  __m512i even_, odd_;  // zero points, a byte each

  static __m512i low_nibbles(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  // The index is the lowest five bits of each half: a difference in two's complement.
  template <int Piece>
  [[gnu::always_inline]] static Vec numbers(__m512i differences) {
    if (Piece) differences = _mm512_srli_epi16(differences, 8);
    return (Vec)_mm512_permutexvar_epi16(differences, _mm512_load_si512(kInt4Numbers));
  }
};

// The next two rows of a group of which `left` are left: zeros behind them.
template <bool Whole>
[[gnu::always_inline]] inline __m512i two_rows(const uint8_t* w, int left) {
  if (Whole || left > 1) return _mm512_loadu_si512(w);
  if (left < 1) return _mm512_setzero_si512();
  return _mm512_inserti32x8(_mm512_setzero_si512(), _mm256_load_si256(reinterpret_cast<const __m256i*>(w)), 0);
}

// Sixteen pairs of rows, of which `left` rows belong to the group, to four tiles.
template <bool Whole>
[[gnu::always_inline]] inline void decode_step(const Int4Decoder& decoder, const uint8_t* w, int left, float* to) {
  for (int row = 0; row < amx::kSide; ++row, w += Int4Pairs::kRow, left -= 2, to += amx::kSide) {
    prefetch<Int4Pairs>(w);
    const __m512i halves = Int4Decoder::halves(two_rows<Whole>(w, left));
    unrolled<kPieces>([&](auto piece) {
      Vec low, high;
      decoder.decode<decltype(piece)::value>(halves, low, high);
      vstore(to + 2 * piece * amx::kTileWords, low);
      vstore(to + (2 * piece + 1) * amx::kTileWords, high);
    });
  }
}

// A group's scales of vector v.
inline Vec vector_scale(const uint16_t* scale, int v) {
  const auto* eight = reinterpret_cast<const __m128i*>(scale) + v;
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128(eight)), _mm_load_si128(eight + 4), 1));
}

// acc (+)= scale * sums for some rows and vectors, a tile each.
template <int Vectors>
[[gnu::always_inline]] inline void add_scaled(const float* sums, const uint16_t* scale, int first_vector, int rows, float* acc,
                                              bool first) {
  Vec scales[Vectors];
  unrolled<Vectors>([&](auto v) { scales[v] = vector_scale(scale, first_vector + v); });
  for (int r = 0; r < rows; ++r)
    unrolled<Vectors>([&](auto v) {
      float* to = acc + v * amx::kTileWords + r * amx::kSide;
      vstore(to, vfma(vload(sums + v * amx::kTileWords + r * amx::kSide), scales[v], first ? vzero() : vload(to)));
    });
}

// acc = x * panel for up to sixteen rows, as `tile_panel` does (amx.h): a step is multiplied while the next is decoded.
[[gnu::noinline]] inline void int4_panel(amx::TileShapes& shapes, Int4Weight w, int k, amx::TileRows x, float* floats,
                                         float* acc) {
  constexpr int half = 4 * amx::kTileWords;
  alignas(64) float sums[amx::kTileSums];
  const uint16_t* scale = w.scale;
  bool ended = false;  // by the step that was multiplied last: its sums are read after the next one is decoded
  int step = 0;
  const auto multiply = [&] {
    if (step) amx::panel_products<amx::Bf16Words>(x.step(step - amx::kSide), floats + step / amx::kSide % 2 * half);
  };
  const auto end_group = [&] {
    if (!ended) return;
    amx::store_panel(sums);
    add_scaled<kVecs>(sums, scale, 0, x.rows, acc, scale == w.scale);
    scale += kPanel;
    amx::zero_panel();
  };
  shapes.set_panel(x.rows);
  amx::zero_panel();
  const uint8_t *bytes = w.bytes, *zero = w.zero;
  for (int at = 0, count; at < k; at += count, zero += Int4::kRow) {
    count = group_size(at, k, w.start);
    const Int4Decoder decoder(zero);
    for (int done = 0; done < count; done += kStepColumns, step += amx::kSide) {
      float* to = floats + (step / amx::kSide + 1) % 2 * half;
      const uint8_t* from = bytes + int64_t(at + done) * Int4::kRow;
      if (count - done >= kStepColumns)
        decode_step<true>(decoder, from, kStepColumns, to);
      else
        decode_step<false>(decoder, from, count - done, to);
      end_group();
      multiply();
      ended = at && !done;
    }
  }
  end_group();
  multiply();
  ended = true;
  end_group();
}

// A piece of a group's `count` rows to pairs of tiles, sixteen words each. What the thread reads next is fetched meanwhile.
template <int Piece>
[[gnu::noinline]] inline void decode_group(const uint8_t* w, int count, const uint8_t* zero, const char* ahead, float* floats) {
  constexpr int ahead_bytes = Int4Pairs::kRow / kPieces;
  const Int4Decoder decoder(zero);
  const auto decode = [&](auto whole, int left) {
    for (int row = 0; row < amx::kSide; ++row, w += Int4Pairs::kRow, left -= 2, floats += amx::kSide, ahead += ahead_bytes) {
      Vec low, high;
      decoder.decode<Piece>(Int4Decoder::halves(two_rows<decltype(whole)::value>(w, left)), low, high);
      vstore(floats, low);
      vstore(floats + amx::kTileWords, high);
      _mm_prefetch(ahead, _MM_HINT_T1);
    }
    floats += amx::kTileWords;
  };
  int left = count;
  for (; left >= kStepColumns; left -= kStepColumns) decode(std::true_type(), left);
  if (left > 0) decode(std::false_type(), left);
}

// Sums of all rows = x * panel, some groups at a time.
inline void int4_rows(amx::TileShapes& shapes, Int4Weight w, int k, float* floats, const float* x, int width, int rows,
                      float* acc) {
  if (rows <= amx::kSide) return int4_panel(shapes, w, k, amx::tile_rows(x, width, rows, 0), floats, acc);
  constexpr int most = kBlock / kGroupWords;
  alignas(64) float sums[2 * amx::kTileSums];
  int words[most];
  for (int at = 0, word = 0, group = 0; at < k; group += most) {
    const int from = at, first = word;
    int groups = 0;
    unrolled<kPieces>([&](auto piece) {
      constexpr int p = decltype(piece)::value;
      at = from, groups = 0;
      for (float* to = floats; groups < most && at < k; ++groups) {
        const int count = group_size(at, k, w.start);
        words[groups] = group_words(count);
        const uint8_t* bytes = w.bytes + int64_t(at) * Int4::kRow;
        const char* ahead = reinterpret_cast<const char*>(bytes) + (most * kGroup + p * kGroup / 2) * Int4::kRow;
        decode_group<p>(bytes, count, w.zero + (group + groups) * Int4::kRow, ahead, to);
        to += words[groups] * amx::kPiece;
        at += count;
      }
      for (int r = 0; r < rows; r += amx::kBlockRows) {
        float* to = acc + r / amx::kSide * amx::kTileSums + 2 * p * amx::kTileWords;
        word = first;
        const float* weights = floats;
        for (int g = 0; g < groups; word += words[g], weights += words[g] * amx::kPiece, ++g) {
          const auto lower = amx::tile_rows(x, width, rows, r, word);
          const auto upper = amx::tile_rows(x, width, rows, r + amx::kSide, word);
          amx::tile_block<amx::Bf16Words>(shapes, weights, words[g], lower, upper, sums, true);
          const uint16_t* scale = w.scale + (group + g) * kPanel;
          add_scaled<2>(sums, scale, 2 * p, lower.rows, to, group + g == 0);
          add_scaled<2>(sums + amx::kTileSums, scale, 2 * p, upper.rows, to + amx::kTileSums, group + g == 0);
        }
      }
    });
  }
}

}  // namespace llmc::lin

#endif
