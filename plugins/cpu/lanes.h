// Sixteen float lanes, held in one 512-bit register or in two of 256 bits. Kernels whose result must not depend on the
// ISA level (attention, sampler) are written on these: the same operations on the same lanes in the same order.
// Compile with -ffp-contract=off: only multiply-adds that are written as fused may be fused.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include <cstring>

namespace llmc {

constexpr int kLanes = 16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LLMC_WIDE 1
#else
#define LLMC_WIDE 0
#endif
#if LLMC_WIDE && defined(__AVX512BF16__)
#define LLMC_BF16 1
#else
#define LLMC_BF16 0
#endif
#if LLMC_BF16 && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define LLMC_TILES 1
#else
#define LLMC_TILES 0
#endif

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
// Round to nearest even; NaN stays NaN.
inline void store_as(float x, float* to) { *to = x; }
inline void store_as(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = uint16_t(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if LLMC_WIDE

struct Lanes {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const bf16* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline Lanes load(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline Lanes load(const bf16* p, int n) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p)), 16))};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline __m256 low(Lanes a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high(Lanes a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where one side is NaN the second operand is the result.
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n within -126..127.
inline Lanes power_of_two(Lanes n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline Mask operator<(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask operator>=(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask operator&(Mask a, Mask b) { return {__mmask16(a.m & b.m)}; }
inline Lanes select(Mask m, Lanes yes, Lanes no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
inline uint32_t bits(Mask m) { return m.m; }
// The 16 lanes as doubles, each added to its own of 16 sums.
struct DoubleLanes {
  __m512d lo = _mm512_setzero_pd(), hi = _mm512_setzero_pd();
  void add(Lanes a) {
    lo = _mm512_add_pd(lo, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
    hi = _mm512_add_pd(hi, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
  }
  void store(double* p) const {
    _mm512_storeu_pd(p, lo);
    _mm512_storeu_pd(p + 8, hi);
  }
};

#else

struct Lanes {
  __m256 lo, hi;
};
struct Mask {
  __m256 lo, hi;
};
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline Lanes load(const bf16* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
template <class T>
inline Lanes load(const T* p, int n) {
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256 low(Lanes a) { return a.lo; }
inline __m256 high(Lanes a) { return a.hi; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Lanes round_even(Lanes a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes power_of_two(Lanes n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
inline Mask operator<(Lanes a, Lanes b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline Mask operator>=(Lanes a, Lanes b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
inline Lanes select(Mask m, Lanes yes, Lanes no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
inline uint32_t bits(Mask m) { return uint32_t(_mm256_movemask_ps(m.lo)) | uint32_t(_mm256_movemask_ps(m.hi)) << 8; }
struct DoubleLanes {
  __m256d part[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
  void add(Lanes a) {
    part[0] = _mm256_add_pd(part[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.lo)));
    part[1] = _mm256_add_pd(part[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1)));
    part[2] = _mm256_add_pd(part[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi)));
    part[3] = _mm256_add_pd(part[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1)));
  }
  void store(double* p) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, part[i]);
  }
};

#endif

// The lanes in one fixed tree: halves onto each other, 8, 4, 2, 1.
template <class T, class Op>
inline T tree(const T* lanes, Op op) {
  T x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = lanes[i];
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  return x[0];
}
// The same of eight lanes, in registers.
inline float sum(__m256 eight) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(__m256 eight) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float sum(Lanes a) { return sum(_mm256_add_ps(low(a), high(a))); }
inline float largest(Lanes a) { return largest(_mm256_max_ps(low(a), high(a))); }
inline double sum(const DoubleLanes& a) {
  double x[kLanes];
  a.store(x);
  return tree(x, [](double p, double q) { return p + q; });
}
inline Lanes iota() {
  static const float x[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(x);
}

// e^x to about 1 ulp; 0 below -87.33654, where the result would not be a normal number; e^88 above 88; exp(0) is 1.
// Polynomial of Cephes' expf (Moshier), with fused multiply-adds; plugins/sampler/reference.py repeats it bit for bit.
inline Lanes exp(Lanes x) {
  const Lanes lowest = splat(-87.33654f);
  const Lanes y = min(splat(88.0f), max(lowest, x));
  const Lanes n = round_even(y * splat(1.44269504088896341f));
  Lanes r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return select(x < lowest, splat(0.0f), p * power_of_two(n));
}

// tanh to about 1e-7 absolute.
inline Lanes tanh(Lanes x) {
  const Lanes e = exp(min(splat(10.0f), max(splat(-10.0f), x)) * splat(2.0f));
  return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}

}  // namespace llmc
