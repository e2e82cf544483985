// AVX-512 F, BW, DQ, VL, VNNI and BF16 for a machine that has AVX2: the intrinsics that kernels use, each written down
// by what Intel's Intrinsics Guide says it does. Comes first in a translation unit compiled for x86-64-v3
// (`emulate` in compiled.py). Kernels are in namespace llmc, where these hide the compiler's own of the same names; the
// macros by which kernels find out what they may use are set as the real flags would set them.
//
// Whatever is not here does not compile: the compiler's own cannot be used without the instruction set.
#pragma once
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#ifdef EMULATE_AVX512VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATE_AVX512BF16
#define __AVX512BF16__ 1
#endif

// Calls, not inlined: kernels unroll them by hundreds, which would take minutes to compile.
#define EMULATED [[gnu::noinline]] inline

namespace llmc {

// Sixteen floats or 32-bit numbers, 32 of 16 bits, as arrays.
template <class T>
struct Elements {
  static constexpr int kCount = 64 / sizeof(T);
  T at[kCount];
};
template <class T, class V>
inline Elements<T> elements(V v) {
  static_assert(sizeof v == 64);
  Elements<T> e;
  std::memcpy(&e, &v, 64);
  return e;
}
template <class V, class T>
inline V vector_of(const Elements<T>& e) {
  V v;
  std::memcpy(&v, &e, 64);
  return v;
}
// The vector whose element i is f(i).
template <class V, class T, class F>
inline V each(const F& f) {
  Elements<T> e;
  for (int i = 0; i < e.kCount; ++i) e.at[i] = f(i);
  return vector_of<V>(e);
}
// The same of operands.
template <class T, class V, class F>
inline V map(V a, const F& f) {
  const auto x = elements<T>(a);
  return each<V, T>([&](int i) { return f(x.at[i]); });
}
template <class T, class V, class F>
inline V map(V a, V b, const F& f) {
  const auto x = elements<T>(a), y = elements<T>(b);
  return each<V, T>([&](int i) { return f(x.at[i], y.at[i]); });
}

template <class Half, class V>
inline Half half_of(V v, int i) {
  Half h;
  std::memcpy(&h, reinterpret_cast<const char*>(&v) + 32 * i, 32);
  return h;
}
template <class V, class Half>
inline V halves_of(Half low, Half high) {
  V v;
  std::memcpy(&v, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
  return v;
}
// An unaligned address is a fault for the instructions that say so.
inline void must_be_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64) __builtin_trap();
}

// ---- moving

EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
EMULATED __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return half_of<__m256>(a, 0); }
EMULATED __m512 _mm512_castps256_ps512(__m256 a) { return halves_of<__m512>(a, _mm256_set1_ps(NAN)); }  // high: anything
EMULATED __m512i _mm512_castsi256_si512(__m256i a) { return halves_of<__m512i>(a, _mm256_set1_epi8(-1)); }  // likewise
EMULATED __m512 _mm512_setzero_ps() { return each<__m512, float>([](int) { return 0.0f; }); }
EMULATED __m512i _mm512_setzero_si512() { return each<__m512i, int32_t>([](int) { return 0; }); }
EMULATED __m512d _mm512_setzero_pd() { return each<__m512d, double>([](int) { return 0.0; }); }
EMULATED __m512 _mm512_set1_ps(float x) { return each<__m512, float>([=](int) { return x; }); }
EMULATED __m512i _mm512_set1_epi32(int x) { return each<__m512i, int32_t>([=](int) { return x; }); }
EMULATED __m512i _mm512_set1_epi8(char x) { return each<__m512i, int8_t>([=](int) { return int8_t(x); }); }
EMULATED __m512i _mm512_set1_epi16(short x) { return each<__m512i, int16_t>([=](int) { return x; }); }
template <class V>
inline V load64(const void* p) {
  V v;
  std::memcpy(&v, p, 64);
  return v;
}
EMULATED __m512 _mm512_loadu_ps(const void* p) { return load64<__m512>(p); }
EMULATED __m512i _mm512_loadu_si512(const void* p) { return load64<__m512i>(p); }
EMULATED __m512i _mm512_load_si512(const void* p) {
  must_be_aligned(p);
  return load64<__m512i>(p);
}
EMULATED void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, 64); }
EMULATED void _mm512_storeu_pd(void* p, __m512d a) { std::memcpy(p, &a, 64); }
EMULATED void _mm512_storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, 64); }
EMULATED void _mm512_store_si512(void* p, __m512i a) {
  must_be_aligned(p);
  std::memcpy(p, &a, 64);
}
// Masked loads read only what the mask names.
EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void* p) {
  const auto* x = static_cast<const float*>(p);
  return each<__m512, float>([=](int i) { return m >> i & 1 ? x[i] : 0.0f; });
}
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 m, const void* p) {
  uint16_t x[16] = {};
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) std::memcpy(x + i, static_cast<const uint16_t*>(p) + i, 2);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
}
EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 m, const void* p) {
  uint8_t x[16] = {};
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) x[i] = static_cast<const uint8_t*>(p)[i];
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
}
EMULATED __m512i _mm512_broadcast_i32x8(__m256i a) { return halves_of<__m512i>(a, a); }
EMULATED __m256 _mm512_extractf32x8_ps(__m512 a, int i) { return half_of<__m256>(a, i & 1); }
EMULATED __m512 _mm512_insertf32x8(__m512 a, __m256 b, int i) {
  return i & 1 ? halves_of<__m512>(half_of<__m256>(a, 0), b) : halves_of<__m512>(b, half_of<__m256>(a, 1));
}
EMULATED __m512i _mm512_inserti32x8(__m512i a, __m256i b, int i) {
  return i & 1 ? halves_of<__m512i>(half_of<__m256i>(a, 0), b) : halves_of<__m512i>(b, half_of<__m256i>(a, 1));
}
EMULATED __m512 _mm512_mask_blend_ps(__mmask16 m, __m512 a, __m512 b) {
  const auto x = elements<float>(a), y = elements<float>(b);
  return each<__m512, float>([&](int i) { return m >> i & 1 ? y.at[i] : x.at[i]; });
}
EMULATED __m512i _mm512_maskz_mov_epi32(__mmask16 m, __m512i a) {
  const auto x = elements<int32_t>(a);
  return each<__m512i, int32_t>([&](int i) { return m >> i & 1 ? x.at[i] : 0; });
}
EMULATED __m512i _mm512_maskz_compress_epi32(__mmask16 m, __m512i a) {
  const auto x = elements<int32_t>(a);
  Elements<int32_t> together{};
  for (int i = 0, at = 0; i < 16; ++i)
    if (m >> i & 1) together.at[at++] = x.at[i];
  return vector_of<__m512i>(together);
}
EMULATED __m512 _mm512_mask_mov_ps(__m512 a, __mmask16 m, __m512 b) { return llmc::_mm512_mask_blend_ps(m, a, b); }

// ---- floats

EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x + y; }); }
EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x - y; }); }
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x * y; }); }
EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x / y; }); }
EMULATED __m512d _mm512_add_pd(__m512d a, __m512d b) { return map<double>(a, b, [](double x, double y) { return x + y; }); }
// Where one is NaN, or both are zeros, the second operand is the result.
EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x < y ? x : y; }); }
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return map<float>(a, b, [](float x, float y) { return x > y ? x : y; }); }
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const auto x = elements<float>(a), y = elements<float>(b), z = elements<float>(c);
  return each<__m512, float>([&](int i) { return std::fma(x.at[i], y.at[i], z.at[i]); });
}
EMULATED __m512 _mm512_sqrt_ps(__m512 a) { return map<float>(a, [](float x) { return __builtin_sqrtf(x); }); }
EMULATED __m512 _mm512_roundscale_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  return map<float>(a, [](float x) { return std::nearbyint(x); });
}
// x - floor(x), and x * 2^floor(y).
EMULATED __m512 _mm512_reduce_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) __builtin_trap();
  return map<float>(a, [](float x) { return std::isinf(x) ? 0.0f : x - std::floor(x); });
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return map<float>(a, b, [](float x, float y) {
    const float n = std::floor(y);
    if (n != n || x != x) return x + n;
    if (std::isinf(n)) return n > 0 ? x * n : x * 0.0f;
    return std::scalbn(x, int(std::fmax(-1000.0f, std::fmin(1000.0f, n))));
  });
}
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  const auto x = elements<float>(a), y = elements<float>(b);
  int mask = 0;
  for (int i = 0; i < 16; ++i) {
    const float p = x.at[i], q = y.at[i];
    bool yes = false;
    switch (how) {
      case _CMP_LT_OQ: yes = p < q; break;
      case _CMP_GE_OQ: yes = p >= q; break;
      case _CMP_NGE_UQ: yes = !(p >= q); break;
      case _CMP_UNORD_Q: yes = p != p || q != q; break;
      default: __builtin_trap();
    }
    mask |= int(yes) << i;
  }
  return __mmask16(mask);
}

// ---- bits

template <class F>
EMULATED __m512 bits(__m512 a, __m512 b, const F& f) {
  return (__m512)map<uint32_t>((__m512i)a, (__m512i)b, f);
}
EMULATED __m512 _mm512_and_ps(__m512 a, __m512 b) { return bits(a, b, [](uint32_t x, uint32_t y) { return x & y; }); }
EMULATED __m512 _mm512_or_ps(__m512 a, __m512 b) { return bits(a, b, [](uint32_t x, uint32_t y) { return x | y; }); }
EMULATED __m512 _mm512_andnot_ps(__m512 a, __m512 b) { return bits(a, b, [](uint32_t x, uint32_t y) { return ~x & y; }); }
EMULATED __m512 _mm512_abs_ps(__m512 a) { return bits(a, a, [](uint32_t x, uint32_t) { return x & 0x7FFFFFFF; }); }
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result = a ^ a;
  for (int row = 0; row < 8; ++row)  // a's bit is the highest of a row's number
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return result;
}
EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned n) { return map<uint32_t>(a, [=](uint32_t x) { return x << n; }); }
EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned n) { return map<uint32_t>(a, [=](uint32_t x) { return x >> n; }); }
EMULATED __m512i _mm512_slli_epi16(__m512i a, unsigned n) {
  return map<uint16_t>(a, [=](uint16_t x) { return uint16_t(x << n); });
}
EMULATED __m512i _mm512_srai_epi16(__m512i a, unsigned n) {
  return map<int16_t>(a, [=](int16_t x) { return int16_t(x >> n); });
}

EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
  return map<uint16_t>(a, [=](uint16_t x) { return uint16_t(x >> n); });
}

// ---- whole numbers

EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; });
}
EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return map<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return uint16_t(x + y); });
}
EMULATED __m512i _mm512_add_epi64(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x + y; });
}
EMULATED __m512i _mm512_srli_epi64(__m512i a, unsigned n) { return map<uint64_t>(a, [=](uint64_t x) { return x >> n; }); }
template <class F>
inline __mmask16 compared(__m512i a, __m512i b, const F& f) {
  const auto x = elements<int32_t>(a), y = elements<int32_t>(b);
  int mask = 0;
  for (int i = 0; i < 16; ++i) mask |= int(f(x.at[i], y.at[i])) << i;
  return __mmask16(mask);
}
EMULATED __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
  return compared(a, b, [](int32_t x, int32_t y) { return x > y; });
}
EMULATED __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
  return compared(a, b, [](int32_t x, int32_t y) { return x == y; });
}
EMULATED __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  return map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
}
// c + the sum of two products of 16-bit numbers, in 32 bits.
EMULATED __m512i _mm512_dpwssd_epi32(__m512i c, __m512i a, __m512i b) {
  const auto x = elements<int16_t>(a), y = elements<int16_t>(b);
  const auto z = elements<uint32_t>(c);
  return each<__m512i, uint32_t>([&](int i) {
    return z.at[i] + uint32_t(x.at[2 * i] * y.at[2 * i]) + uint32_t(x.at[2 * i + 1] * y.at[2 * i + 1]);
  });
}
EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return llmc::_mm512_dpwssd_epi32(llmc::_mm512_setzero_si512(), a, b);
}

// ---- conversions

template <class To, class V, class From, class Half>
inline V widened(Half a) {
  From x[64 / sizeof(To)];
  static_assert(sizeof x == sizeof a);
  std::memcpy(x, &a, sizeof x);
  return each<V, To>([&](int i) { return To(x[i]); });
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) { return widened<uint32_t, __m512i, uint16_t>(a); }
EMULATED __m512i _mm512_cvtepi8_epi16(__m256i a) { return widened<int16_t, __m512i, int8_t>(a); }
EMULATED __m512d _mm512_cvtps_pd(__m256 a) { return widened<double, __m512d, float>(a); }
EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
  const auto x = elements<int32_t>(a);
  return each<__m512, float>([&](int i) { return float(x.at[i]); });
}
// To nearest even; what 32 bits do not hold becomes 0x80000000, as of the scalar instruction.
EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  const auto x = elements<float>(a);
  return each<__m512i, int32_t>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x.at[i])); });
}
EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  return halves_of<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}

// ---- words and bf16

EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const auto x = elements<int32_t>(a);
  int8_t to[16];
  for (int i = 0; i < 16; ++i) to[i] = int8_t(x.at[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(to));
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  const auto x = elements<uint16_t>(a), i = elements<uint16_t>(index);
  return each<__m512i, uint16_t>([&](int l) { return x.at[i.at[l] & 31]; });
}
EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  return map<uint16_t>(index, [&](uint16_t i) { return (i & 32 ? y : x).at[i & 31]; });
}
EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i a, __mmask32 m, __m512i index, __m512i b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b), i = elements<uint16_t>(index);
  return each<__m512i, uint16_t>([&](int l) { return m >> l & 1 ? y.at[i.at[l] & 31] : x.at[l]; });
}
EMULATED __m512i _mm512_mask_shuffle_epi8(__m512i a, __mmask64 m, __m512i b, __m512i index) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b), i = elements<uint8_t>(index);
  return each<__m512i, uint8_t>([&](int l) {
    if (!(m >> l & 1)) return x.at[l];
    return i.at[l] & 0x80 ? uint8_t(0) : y.at[(l & ~15) | (i.at[l] & 15)];
  });
}
EMULATED __mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b);
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t((x.at[i] & y.at[i]) == 0) << i;
  return mask;
}
EMULATED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t((x.at[i] & y.at[i]) == 0) << i;
  return mask;
}

EMULATED __mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b);
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t(x.at[i] >= y.at[i]) << i;
  return mask;
}
EMULATED __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t(x.at[i] == y.at[i]) << i;
  return mask;
}
EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 m, __m512i a, __m512i b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  return each<__m512i, uint16_t>([&](int i) { return m >> i & 1 ? y.at[i] : x.at[i]; });
}
EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return map<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return uint8_t(x - y); });
}

// Subnormal operands and results are zeros of their sign; rounding is to nearest even.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
inline float fused(float a, float b, float c) { return flushed(std::fma(flushed(a), flushed(b), flushed(c))); }
inline float of_bf16(uint16_t digits) {
  const uint32_t word = uint32_t(digits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
EMULATED __m512 _mm512_dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  const auto x = elements<uint16_t>(a), y = elements<uint16_t>(b);
  const auto sum = elements<float>(c);
  return each<__m512, float>([&](int i) {
    const float odd = fused(of_bf16(x.at[2 * i + 1]), of_bf16(y.at[2 * i + 1]), sum.at[i]);
    return fused(of_bf16(x.at[2 * i]), of_bf16(y.at[2 * i]), odd);
  });
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) {
  const auto x = elements<float>(a);
  uint16_t to[16];
  for (int i = 0; i < 16; ++i) {
    const float value = flushed(x.at[i]);
    uint32_t word;
    std::memcpy(&word, &value, 4);
    to[i] = uint16_t(value != value ? word >> 16 | 0x40 : (word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
  return (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(to));
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  return (__m512bh)halves_of<__m512i>((__m256i)_mm512_cvtneps_pbh(b), (__m256i)_mm512_cvtneps_pbh(a));
}

}  // namespace llmc
