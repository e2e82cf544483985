// INT8 weights and inputs: whole numbers, multiplied and summed exactly in 32 bits, a scale a row of each applied once at the
// end. So an output does not depend on the order of its sum, and no number saturates: a product is at most 127 * 128, and
// `infer` admits at most 2^17 of them.
//
// A row of a panel holds two k: 64 outputs side by side, each a pair of bytes (a zero behind an odd K). Widened to 16 bits
// they meet a pair of x in one instruction (vpmaddwd, or vpdpwssd where the ISA level has VNNI), whose 32-bit sum of two
// products is exact: unlike vpmaddubsw's, whose 16 bits saturate. x is laid out as pairs of 16 bits, one in a float's place.
#pragma once
#include <limits>

#include "plugins/cpu/amx_tiles.h"
#include "plugins/linear/formats.h"
#include "plugins/linear/quantize.h"

namespace llmc::lin {

constexpr float kInt8Max = 127.0f;

struct WholeSums {
#if LLMC_WIDE
  static Vec add(Vec weight, Vec x, Vec sum) {
    const __m512i w = _mm512_castps_si512(weight), v = _mm512_castps_si512(x), s = _mm512_castps_si512(sum);
#ifdef __AVX512VNNI__
    return _mm512_castsi512_ps(_mm512_dpwssd_epi32(s, w, v));
#else
    return _mm512_castsi512_ps(_mm512_add_epi32(s, _mm512_madd_epi16(w, v)));
#endif
  }
  static Lanes value(const float* acc, int at) {
    return {_mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_loadu_ps(acc + at)))};
  }
#else
  static Vec add(Vec weight, Vec x, Vec sum) {
    const __m256i w = _mm256_castps_si256(weight), v = _mm256_castps_si256(x), s = _mm256_castps_si256(sum);
    return _mm256_castsi256_ps(_mm256_add_epi32(s, _mm256_madd_epi16(w, v)));
  }
  static Lanes value(const float* acc, int at) {
    const auto floats = [](const float* p) { return _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_loadu_ps(p))); };
    return {floats(acc + at), floats(acc + at + 8)};
  }
#endif
};

struct Int8 : InOrder {
  using T = int8_t;
  using Weight = const T*;
  using Sums = WholeSums;
  static constexpr bool kGrouped = false;
  static constexpr int kRow = 2 * kPanel;
  static constexpr int steps(int k) { return (k + 1) / 2; }
  template <int J>
  static Vec decode(const T* row) {
#if LLMC_WIDE
    const auto* bytes = reinterpret_cast<const __m256i*>(row) + J;
    return _mm512_castsi512_ps(_mm512_cvtepi8_epi16(_mm256_load_si256(bytes)));
#else
    const auto* bytes = reinterpret_cast<const __m128i*>(row) + J;
    return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_load_si128(bytes)));
#endif
  }
};

// The same bytes, two rows at a time, for tiles: words of four k.
struct Int8Quads {
  using T = int8_t;
  using Weight = const T*;
  using Sums = WholeSums;
  static constexpr bool kGrouped = false;
  static constexpr int kRow = 2 * Int8::kRow;
  static constexpr int steps(int k) { return k / 4; }
};

// x / scale rounded to nearest even, within -127..127, as 32-bit integers to q[kWidth].
inline void round_int8(Vec x, Vec scale, int32_t* q) {
#if LLMC_WIDE
  const Vec y = _mm512_max_ps(vset(-kInt8Max), _mm512_min_ps(vset(kInt8Max), _mm512_div_ps(x, scale)));
  _mm512_store_si512(q, _mm512_cvtps_epi32(y));
#else
  const Vec y = _mm256_max_ps(vset(-kInt8Max), _mm256_min_ps(vset(kInt8Max), _mm256_div_ps(x, scale)));
  _mm256_store_si256(reinterpret_cast<__m256i*>(q), _mm256_cvtps_epi32(y));
#endif
}

// x as INT8, first times a factor a column where there are factors. The scale is Scale's, of a row's largest magnitude; of a
// row that is not finite it is NaN, and so are the row's results.
template <class Scale>
struct Int8Input {
  static constexpr bool kScaled = true;
  static constexpr float kRest = 1.0f;
  const float* factors;  // or nullptr
  Scale scale_of;

  Vec part(const float* x, int i, int n) const {
    const Vec v = part_of(x, i, n);
    return factors ? vmul(v, part_of(factors, i, n)) : v;
  }

  float scale(const float* x, int n) const {
    const float most = largest_magnitude(n, [&](int i) { return part(x, i, n); });
    return most <= FLT_MAX ? scale_of(most) : std::numeric_limits<float>::quiet_NaN();
  }

#if LLMC_TILES
  // Row r of tiles (plugins/cpu/amx_tiles.h): four columns a word.
  float tile_row(const float* x, int n, float* to, int width, int rows, int64_t r) const {
    const float own = scale(x, n);
    for (int i = 0; i < n; i += kWidth) {
      alignas(64) int32_t q[kWidth];
      round_int8(part(x, i, n), vset(own), q);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(amx::row_words(to, width, rows, r, i / 4)),
                       _mm512_cvtepi32_epi8(_mm512_load_si512(q)));
    }
    return own;
  }
#endif

  float operator()(const float* x, int n, float* to, int step) const {
    const float own = scale(x, n);
    for (int i = 0; i < n; i += kWidth) {
      alignas(64) int32_t q[kWidth];
      round_int8(part(x, i, n), vset(own), q);
      for (int l = 0; l < kWidth && i + l < n; l += 2) {
        const uint32_t pair = (uint32_t(q[l]) & 0xffff) | uint32_t(q[l + 1]) << 16;
        std::memcpy(to + int64_t(i + l) / 2 * step, &pair, 4);
      }
    }
    return own;
  }
};

// The largest magnitude / 127; 1 where that is no float above zero.
struct Int8PerToken {
  float operator()(float most) const { return most / kInt8Max > 0 ? most / kInt8Max : 1.0f; }
};

// One scale for every row, from calibration.
struct Int8Static {
  float scale;
  float operator()(float) const { return scale; }
};

}  // namespace llmc::lin
