// What a linear reads of x: itself, or x quantized to E4M3, as floats ready for the multiply. Tiles are interleaved.
// `kScaled` kinds go with E4M3 (or INT8) weights, whose products need factors afterwards: what a kind returns, times kRest.
#pragma once
#include <algorithm>
#include <cfloat>

#include "plugins/cpu/lanes.h"
#include "plugins/linear/formats.h"

namespace llmc::lin {

// A quantized x times 2^118 and an E4M3 weight's bits (the weight times 2^-120) multiply to the product / 4: 448 * 2^118
// is still a float, and the smallest product is 2^-20. The factor 4 goes into the scale; powers of two round nothing.
constexpr float kXFactor = 0x1p118f;
constexpr float kXFactorRest = 4.0f;
constexpr float kFp8Max = 448.0f;

#if LLMC_WIDE
inline Vec vset(float x) { return _mm512_set1_ps(x); }
inline Vec vabs(Vec x) { return _mm512_abs_ps(x); }
inline Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
// The larger bits of each lane: of numbers that are not negative the larger one, and NaN above all.
inline Vec vmax_bits(Vec a, Vec b) {
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
#else
inline Vec vset(float x) { return _mm256_set1_ps(x); }
inline Vec vabs(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Vec vmul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec vmax_bits(Vec a, Vec b) {
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
#endif

// E4M3 of x / scale as a float, times kXFactor: saturated at 448, rounded to nearest even, NaN stays NaN. From 2^-6 up four
// significant bits are kept; below, multiples of 2^-9, which adding 1.5 * 2^14 rounds to.
inline Vec quantize(Vec x, Vec scale) {
#if LLMC_WIDE
  Vec y = _mm512_div_ps(x, scale);
  y = _mm512_max_ps(vset(-kFp8Max), _mm512_min_ps(vset(kFp8Max), y));
  const __m512i bits = _mm512_castps_si512(y);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
  Vec r = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xFFF00000))));
  const Vec small = _mm512_sub_ps(_mm512_add_ps(y, vset(24576.0f)), vset(24576.0f));
  r = _mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(vabs(y), vset(0x1p-6f), _CMP_NGE_UQ), small);
  return _mm512_mul_ps(r, vset(kXFactor));
#else
  Vec y = _mm256_div_ps(x, scale);
  y = _mm256_max_ps(vset(-kFp8Max), _mm256_min_ps(vset(kFp8Max), y));
  const __m256i bits = _mm256_castps_si256(y);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd);
  Vec r = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xFFF00000))));
  const Vec small = _mm256_sub_ps(_mm256_add_ps(y, vset(24576.0f)), vset(24576.0f));
  r = _mm256_blendv_ps(r, small, _mm256_cmp_ps(vabs(y), vset(0x1p-6f), _CMP_NGE_UQ));
  return _mm256_mul_ps(r, vset(kXFactor));
#endif
}

inline Vec load_part(const float* p, int n) {
  alignas(64) float part[kWidth] = {};
  for (int i = 0; i < n; ++i) part[i] = p[i];
  return vload(part);
}

// Numbers i.. of a row of n, zeros behind it.
inline Vec part_of(const float* x, int i, int n) { return i + kWidth <= n ? vload(x + i) : load_part(x + i, n - i); }

// The bits of the largest magnitude of n numbers, of which part(i) gives those from the i-th on; NaN is larger than
// infinity. No order matters.
template <class Part>
float largest_magnitude(int n, const Part& part) {
  Vec most = vzero();
  for (int i = 0; i < n; i += kWidth) most = vmax_bits(most, vabs(part(i)));
  alignas(64) uint32_t bits[kWidth];
  vstore(reinterpret_cast<float*>(bits), most);
  const uint32_t largest = *std::max_element(bits, bits + kWidth);
  float value;
  std::memcpy(&value, &largest, 4);
  return value;
}
inline float largest_magnitude(const float* x, int n) {
  return largest_magnitude(n, [=](int i) { return part_of(x, i, n); });
}

// Writes x[0..n) to to[0], to[step], to[2 * step], ... and returns what a result must be multiplied by.
struct Plain {
  static constexpr bool kScaled = false;
  float operator()(const float* x, int n, float* to, int step) const {
    for (int i = 0; i < n; ++i) to[int64_t(i) * step] = x[i];
    return 1;
  }
};

inline void quantize_row(const float* x, int n, float scale, float* to, int step) {
  const Vec s = vset(scale);
  for (int i = 0; i < n; i += kWidth) {
    const int left = n - i < kWidth ? n - i : kWidth;
    const Vec q = quantize(part_of(x, i, n), s);
    if (step == 1 && left == kWidth) {
      vstore(to + i, q);
    } else {
      alignas(64) float out[kWidth];
      vstore(out, q);
      for (int l = 0; l < left; ++l) to[int64_t(i + l) * step] = out[l];
    }
  }
}

// One scale for every row, from calibration.
struct Static {
  static constexpr bool kScaled = true;
  static constexpr float kRest = kXFactorRest;
  float scale;
  float scale_of(const float*, int) const { return scale; }
  float operator()(const float* x, int n, float* to, int step) const {
    quantize_row(x, n, scale, to, step);
    return scale;
  }
};

// Each row's own scale: its largest magnitude / 448; 1 for a row of zeros.
struct PerToken {
  static constexpr bool kScaled = true;
  static constexpr float kRest = kXFactorRest;
  float scale_of(const float* x, int n) const {
    const float most = largest_magnitude(x, n);
    return most == 0 ? 1.0f : most / kFp8Max;
  }
  float operator()(const float* x, int n, float* to, int step) const {
    const float scale = scale_of(x, n);
    quantize_row(x, n, scale, to, step);
    return scale;
  }
};

inline float power_of_two(int exponent) {  // of a normal float
  const uint32_t bits = uint32_t(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// x itself, beside E4M3 weights: times a power of two that makes up for theirs, chosen by the row so that neither its
// largest value overflows nor what matters beside that one underflows. Powers of two round nothing.
struct Exact {
  static constexpr bool kScaled = true;
  static constexpr float kRest = kXFactorRest;
  float operator()(const float* x, int n, float* to, int step) const {
    const float most = largest_magnitude(x, n);
    uint32_t bits;
    std::memcpy(&bits, &most, 4);
    const int exponent = most <= FLT_MAX ? std::max(-6, std::min(227 - int(bits >> 23), 127)) : 0;
    const float up = power_of_two(exponent);
    int i = 0;
    for (; step == 1 && i + kWidth <= n; i += kWidth) vstore(to + i, vmul(vload(x + i), vset(up)));
    for (; i < n; ++i) to[int64_t(i) * step] = x[i] * up;
    return power_of_two(118 - exponent);
  }
};

}  // namespace llmc::lin
