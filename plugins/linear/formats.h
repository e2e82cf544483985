// How weights lie in a panel and become floats. A panel holds 64 outputs: for each k, 64 values side by side, zeros where
// N ends. Both ISA levels read the same bytes; the order in which vectors hold the outputs is this file's secret.
//
//   Format::decode<J>(row)             the J-th vector of a panel's row k, J < kVecs, for Fp8 times 2^-120
//   Format::put<J>(v, to, stride)      that vector's lanes to their outputs: n goes to to[n / kPiece * stride + n % kPiece]
//   Format::take<J>(from, stride)      the vector that `put` has put there
//   Format::kInOrder                   whether vector J is simply outputs J * kWidth and on
//   Format::in_part(parts, J)          which of `parts` equal parts of the panel the vector belongs to
//   Format::Weight                     what a linear is given: a pointer, or with scales of groups more (int4.h)
//   Format::kRow                       elements T from one row of a panel to the next
//   Format::steps(k)                   rows of a panel, and words of a prepared x, that k columns take: k, but for Int8
//   Format::Sums                       how a product is added to a sum, and what a sum is as floats
//
// Part p of 2 is the outputs 16p..16p+15 and 32+16p..32+16p+15; part p of 4 likewise with 8. So a part of a gated panel
// (32 gate outputs, then their 32 up outputs) has gates and ups that belong together.
#pragma once
#include <immintrin.h>

#include "plugins/cpu/lanes.h"

namespace llmc::lin {

constexpr int kPanel = 64;

#if LLMC_WIDE
using Vec = __m512;
constexpr int kWidth = 16;
inline Vec vzero() { return _mm512_setzero_ps(); }
inline Vec vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec vsplat(const float* p) { return _mm512_set1_ps(*p); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#else
using Vec = __m256;
constexpr int kWidth = 8;
inline Vec vzero() { return _mm256_setzero_ps(); }
inline Vec vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec vsplat(const float* p) { return _mm256_broadcast_ss(p); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#endif

constexpr int kVecs = kPanel / kWidth;
constexpr int kPiece = 2 * kWidth;

// Sums of floats: one chain of fused multiply-adds each.
struct FloatSums {
  static Vec add(Vec weight, Vec x, Vec sum) { return vfma(weight, x, sum); }
  static Lanes value(const float* acc, int at) { return load(acc + at); }
};

// Every weight is a number by itself.
template <class Element>
struct Single {
  using T = Element;
  using Weight = const T*;
  using Sums = FloatSums;
  static constexpr bool kGrouped = false;
  static constexpr int kRow = kPanel;
  static constexpr int steps(int k) { return k; }
};

// Vectors in the order of outputs.
struct InOrder {
  static constexpr bool kInOrder = true;
  static constexpr int in_part(int parts, int j) { return j * kWidth % (kPanel / 2) / (kPanel / 2 / parts); }
  template <int J>
  static void put(Vec v, float* to, int stride) {
    vstore(to + J / 2 * stride + J % 2 * kWidth, v);
  }
  template <int J>
  static Vec take(const float* from, int stride) {
    return vload(from + J / 2 * stride + J % 2 * kWidth);
  }
};

struct Fp32 : InOrder, Single<float> {
  template <int J>
  static Vec decode(const T* row) { return vload(row + J * kWidth); }
};

struct Bf16 : InOrder, Single<bf16> {
  template <int J>
  static Vec decode(const T* row) {
#if LLMC_WIDE
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + J * kWidth));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + J * kWidth));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#endif
  }
};

// E4M3 by shift and mask: the byte's sign, exponent and mantissa land on a float's, whose value is E4M3 * 2^-120. Subnormals
// come out right because float subnormals do: neither FTZ nor DAZ may be set. In a group of 32 bytes, byte 4*i+j is output
// 8*j+i, so that word operations give eight outputs that belong together. The bytes of NaN (0x7f, 0xff) would come out as
// 480: a build refuses weights that are no numbers.
//
// Bytes 1 and 3 of a word are moved together by one shift of its halves, bytes 0 and 2 likewise after they have been moved
// up: 9 operations for 4 vectors, where shifting each byte alone takes 11 (the compiler shares what decode<J>s have in common).
struct Fp8 : Single<uint8_t> {
  static constexpr int kMask = int(0x87F00000);
  static constexpr bool kInOrder = !LLMC_WIDE;
#if LLMC_WIDE
  // Vector j is outputs 8j..8j+7 of both groups.
  static constexpr int in_part(int parts, int j) { return j * parts / 4; }
  template <int J>
  static Vec decode(const T* row) {
    __m512i v = _mm512_load_si512(row);
    if (J % 2 == 0) v = _mm512_slli_epi16(v, 8);
    v = _mm512_srai_epi16(v, 4);
    if (J < 2) v = _mm512_slli_epi32(v, 16);
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(kMask)));
  }
  template <int J>
  static void put(Vec v, float* to, int stride) {
    _mm256_storeu_ps(to + 8 * J, _mm512_castps512_ps256(v));
    _mm256_storeu_ps(to + stride + 8 * J, _mm512_extractf32x8_ps(v, 1));
  }
  template <int J>
  static Vec take(const float* from, int stride) {
    const Vec low = _mm512_castps256_ps512(_mm256_loadu_ps(from + 8 * J));
    return _mm512_insertf32x8(low, _mm256_loadu_ps(from + stride + 8 * J), 1);
  }
#else
  static constexpr int in_part(int parts, int j) { return InOrder::in_part(parts, j); }
  template <int J>
  static Vec decode(const T* row) {
    __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(row + J / 4 * 32));
    if (J % 2 == 0) v = _mm256_slli_epi16(v, 8);
    v = _mm256_srai_epi16(v, 4);
    if (J % 4 < 2) v = _mm256_slli_epi32(v, 16);
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(kMask)));
  }
  template <int J>
  static void put(Vec v, float* to, int stride) {
    InOrder::put<J>(v, to, stride);
  }
  template <int J>
  static Vec take(const float* from, int stride) {
    return InOrder::take<J>(from, stride);
  }
#endif
};

}  // namespace llmc::lin
