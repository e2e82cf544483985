// E4M3 as the paged cache holds it, and the scales that keys and values were divided by when they were written.
//
// A byte loads as its value / 256: shifted into a half-precision number, whose exponents are biased by 8 more, it needs no
// multiplication. Scales are applied to results, 256 with them, so loops over the cache only load. Powers of two round
// nothing, and no number of E4M3 / 256 is denormal in float.
#pragma once
#include "plugins/cpu/lanes.h"

namespace llmc {

struct fp8 {
  uint8_t bits;
};

// What a loaded number must be multiplied by.
template <class T>
inline constexpr float kLoaded = 1;
template <>
inline constexpr float kLoaded<fp8> = 256;

// Sixteen bytes as halves of the same digits: s eeee mmm becomes s 0eeee mmm0000000. Only NaN (eeee mmm all ones) carries
// into the highest exponent bit when 1 is added to its last digit: with that bit set a half is NaN.
inline __m256i as_halves(__m128i bytes) {
  const __m256i spread = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign twice
  const __m256i half = _mm256_and_si256(spread, _mm256_set1_epi16(int16_t(0xBFFF)));
  const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x0080));
  return _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

#if LLMC_WIDE
inline Lanes load(const fp8* p) {
  return {_mm512_cvtph_ps(as_halves(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Lanes load(const fp8* p, int n) {
  return {_mm512_cvtph_ps(as_halves(_mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p)))};
}
#else
inline Lanes load(const fp8* p) {
  const __m256i halves = as_halves(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
#endif

#if LLMC_WIDE
// 32 E4M3 as bf16: the digits moved into place and the exponent biased anew; those below 2^-6, multiples m of 2^-9, have
// one significant digit at least in bf16 and come from a table by m. NaN comes out as 480.
alignas(64) constexpr uint16_t kBelow[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
inline __m512i as_bf16(__m256i bytes) {
  const __m512i wide = _mm512_cvtepi8_epi16(bytes);
  const __m512i digits = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07F0));
  const __m512i normal = _mm512_add_epi16(digits, _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  const __m512i size = _mm512_mask_permutexvar_epi16(normal, small, wide, _mm512_load_si512(kBelow));
  return _mm512_or_si512(size, _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0x8000))));
}
#endif

#if LLMC_TILES
// Sixty-four E4M3 as bf16: the upper bytes of all, the lower bytes of all. Each bit of them is a bit of the number, or that
// bit turned over: s eeee mmm becomes s eeee+120 mmm0000, and e3 decides all of eeee+120's upper bits. A matrix of GF(2),
// its rows from the last to the first.
struct Bf16Bytes {
  __m512i upper, lower;
};
inline Bf16Bytes normal_bytes(__m512i x) {
  return {_mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020404040404080), 0x3C),
          _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x0000000001020408), 0)};
}
// The same of any number: those below 2^-6 by kBelow, NaN stays NaN.
inline Bf16Bytes all_bytes(__m512i x) {
  alignas(64) static constexpr auto below = [] {
    struct Table {
      uint8_t upper[64], lower[64];
    } table{};
    for (int i = 0; i < 64; ++i) table.upper[i] = uint8_t(kBelow[i % 16] >> 8), table.lower[i] = uint8_t(kBelow[i % 16]);
    return table;
  }();
  Bf16Bytes y = normal_bytes(x);
  const __m512i size = _mm512_and_si512(x, _mm512_set1_epi8(0x7F));
  const __mmask64 small = _mm512_testn_epi8_mask(x, _mm512_set1_epi8(0x78));
  const __mmask64 none = _mm512_cmpge_epu8_mask(size, _mm512_set1_epi8(0x7F));
  y.upper = _mm512_mask_shuffle_epi8(y.upper, small, _mm512_load_si512(below.upper), size);
  y.lower = _mm512_mask_shuffle_epi8(y.lower, small, _mm512_load_si512(below.lower), size);
  y.upper = _mm512_or_si512(y.upper, _mm512_and_si512(x, _mm512_set1_epi8(char(0x80))));
  return {_mm512_mask_blend_epi8(none, y.upper, _mm512_set1_epi8(0x7F)),
          _mm512_mask_blend_epi8(none, y.lower, _mm512_set1_epi8(char(0xC0)))};
}

// COUNT numbers of the cache, a multiple of 64, as bf16. Bytes meet within 16 bytes of a vector: eight of each half go there.
// Few E4M3 are below 2^-6.
template <int COUNT, class F>
inline void widen(const fp8* p, void* to, const F& bytes) {
  alignas(64) static constexpr int64_t order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (int i = 0; i < COUNT; i += 64) {
    const Bf16Bytes y = bytes(_mm512_permutexvar_epi64(_mm512_load_si512(order), _mm512_loadu_si512(p + i)));
    _mm512_store_si512(static_cast<bf16*>(to) + i, _mm512_unpacklo_epi8(y.lower, y.upper));
    _mm512_store_si512(static_cast<bf16*>(to) + i + 32, _mm512_unpackhi_epi8(y.lower, y.upper));
  }
}
template <int COUNT>
inline void widen(const fp8* p, void* to) {
  __m512i most = _mm512_setzero_si512();
  widen<COUNT>(p, to, [&](__m512i x) {
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi8(0x7F));
    most = _mm512_max_epu8(most, _mm512_sub_epi8(size, _mm512_set1_epi8(8)));
    return normal_bytes(x);
  });
  if (_mm512_cmpge_epu8_mask(most, _mm512_set1_epi8(0x77))) [[unlikely]]
    widen<COUNT>(p, to, all_bytes);
}
template <int COUNT>
inline void widen(const bf16* p, void* to) {
  for (int i = 0; i < COUNT; i += 32) _mm512_store_si512(static_cast<bf16*>(to) + i, _mm512_loadu_si512(p + i));
}
#endif

// Round to nearest even; beyond 448 saturated; NaN stays NaN. Below 2^-6 E4M3 holds multiples of 2^-9, which adding
// 1.5 * 2^14 rounds to.
inline void store_as(float x, fp8* to) {
  const float y = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
  uint32_t bits, small;
  std::memcpy(&bits, &y, 4);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF;
  float size;
  std::memcpy(&size, &magnitude, 4);
  size += 24576.0f;
  std::memcpy(&small, &size, 4);
  const uint32_t normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;  // biased by 127, 7 is wanted
  const uint32_t digits = magnitude < 0x3C800000 ? small & 0xF : normal - (120 << 3);
  to->bits = uint8_t(sign | (magnitude > 0x7F800000 ? 0x7F : digits));
}

// One scale a KV head, of keys and of values; and for a cache that holds them as they are.
template <int KH>
struct HeadScales {
  float keys[KH], values[KH];
  float key(int head) const { return keys[head]; }
  float value(int head) const { return values[head]; }
};
struct Unscaled {
  static constexpr float key(int) { return 1; }
  static constexpr float value(int) { return 1; }
};

}  // namespace llmc
