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
// 64 numbers of the cache as bf16, two vectors. Few E4M3 are below 2^-6; NaN stays NaN.
inline void widen(const fp8* p, void* to) {
  const __m512i bytes = _mm512_loadu_si512(p), size = _mm512_and_si512(bytes, _mm512_set1_epi8(0x7F));
  const __m512i sign = _mm512_set1_epi16(int16_t(0x8000)), digits = _mm512_set1_epi16(0x07F0);
  const bool rare = _mm512_cmpge_epu8_mask(_mm512_sub_epi8(size, _mm512_set1_epi8(8)), _mm512_set1_epi8(0x77));
  for (int half = 0; half < 2; ++half) {
    const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + half);
    __m512i x;
    if (rare) [[unlikely]] {
      const __m512i wide = _mm512_and_si512(_mm512_cvtepi8_epi16(own), _mm512_set1_epi16(0x7F));
      x = _mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(wide, _mm512_set1_epi16(0x7F)), as_bf16(own),
                                  _mm512_set1_epi16(0x7FC0));
    } else {
      const __m512i wide = _mm512_cvtepi8_epi16(own);
      const __m512i biased = _mm512_add_epi16(_mm512_and_si512(_mm512_slli_epi16(wide, 4), digits), _mm512_set1_epi16(120 << 7));
      x = _mm512_or_si512(biased, _mm512_and_si512(wide, sign));
    }
    _mm512_store_si512(static_cast<__m512i*>(to) + half, x);
  }
}
inline void widen(const bf16* p, void* to) {
  for (int half = 0; half < 2; ++half)
    _mm512_store_si512(static_cast<__m512i*>(to) + half, _mm512_loadu_si512(p + 32 * half));
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
