// Products of bf16, on targets whose instructions multiply them in pairs (AVX512-BF16, AMX): x is rounded to bf16, E4M3
// weights are decoded to bf16, which holds them exactly, and their scales are applied to the sums, in float.
//
// The weights are the bytes that every ISA level reads (formats.h): rows k and k + 1 of a panel become pairs of bf16 while
// they are decoded, so that word i of a vector belongs to output i. x is laid out as pairs, one in a float's place.
//
// An output is one chain over pairs in order; of a pair k + 1 is added before k, each with a fused multiply-add to nearest
// even, and subnormal operands and results are zeros: what vdpbf16ps does, whatever MXCSR says. AMX adds in another order
// (amx.h). Layers with an odd K are multiplied in float, as on x86-64-v4.
#pragma once
#include <type_traits>

#include "plugins/cpu/amx_tiles.h"
#include "plugins/cpu/fp8.h"
#include "plugins/linear/formats.h"
#include "plugins/linear/quantize.h"

namespace llmc::lin {

#if LLMC_BF16

struct PairSums {
  static Vec add(Vec weight, Vec x, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x); }
  static Lanes value(const float* acc, int at) { return load(acc + at); }
};

// For vpermt2w: of words from two vectors, one of rows k and one of rows k + 1, the pairs of 16 outputs.
struct PairIndex {
  alignas(64) uint16_t at[32];
};
template <class WordOfOutput>
constexpr PairIndex pair_index(const WordOfOutput& word) {
  PairIndex index{};
  for (int output = 0; output < 16; ++output) {
    index.at[2 * output] = uint16_t(word(output));
    index.at[2 * output + 1] = uint16_t(32 + word(output));
  }
  return index;
}
inline Vec pairs(__m512i first, __m512i second, const PairIndex& index) {
  return _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, _mm512_load_si512(index.at), second));
}

// Vectors J and J + 2 are the lower and the upper 16 of a group of 32 outputs: they share most of their decoding (tiles.h).
template <class Element>
struct Pairs {
  using T = Element;
  using Weight = const T*;
  using Sums = PairSums;
  static constexpr bool kGrouped = false, kInOrder = false;
  static constexpr int kRow = 2 * kPanel;
  static constexpr int steps(int k) { return k / 2; }
  static constexpr int in_part(int parts, int j) { return j / 2 * parts / 2; }
  template <int J>
  static void put(Vec v, float* to, int stride) {
    vstore(to + J % 2 * stride + J / 2 * kWidth, v);
  }
  template <int J>
  static Vec take(const float* from, int stride) {
    return vload(from + J % 2 * stride + J / 2 * kWidth);
  }
};

struct Bf16Pairs : Pairs<bf16> {
  template <int J>
  static Vec decode(const T* row) {
    static constexpr PairIndex index = pair_index([](int output) { return J / 2 * 16 + output; });
    const T* group = row + J % 2 * 32;
    return pairs(_mm512_loadu_si512(group), _mm512_loadu_si512(group + kPanel), index);
  }
};

struct Fp8Pairs : Pairs<uint8_t> {
  template <int J>
  static Vec decode(const T* row) {
    // Byte 4 * i + j of a group of 32 is output 8 * j + i (Fp8).
    static constexpr PairIndex index = pair_index([](int o) { return 4 * (o % 8) + J / 2 * 2 + o / 8; });
    const auto* group = reinterpret_cast<const __m256i*>(row) + J % 2;
    return pairs(as_bf16(_mm256_load_si256(group)), as_bf16(_mm256_load_si256(group + 2)), index);
  }
};

// x, or what X makes of it, rounded to bf16 to nearest even; two columns in a float's place.
template <class X>
struct PairInput {
  static constexpr bool kScaled = X::kScaled;
  static constexpr bool kQuantized = std::is_same_v<X, Static> || std::is_same_v<X, PerToken>;
  static constexpr float kRest = 1.0f;
  X input;

  float operator()(const float* x, int n, float* to, int step) const {
    return each(x, n, [=](int i, Vec v) {
      alignas(32) uint32_t words[kWidth / 2];
      _mm256_store_si256(reinterpret_cast<__m256i*>(words), (__m256i)_mm512_cvtneps_pbh(v));
      for (int l = 0; l < kWidth / 2 && i / 2 + l < n / 2; ++l) std::memcpy(to + int64_t(i / 2 + l) * step, words + l, 4);
    });
  }

#if LLMC_TILES
  // Row r of tiles (plugins/cpu/amx_tiles.h).
  float tile_row(const float* x, int n, float* to, int width, int rows, int64_t r) const {
    return each(x, n, [=](int i, Vec v) { amx::put_row(to, width, rows, r, i, {v}); });
  }
#endif

 private:
  // Calls put(column, sixteen of them), zeros behind the row; returns the row's scale.
  template <class Put>
  float each(const float* x, int n, const Put& put) const {
    float scale = 1;
    if constexpr (kQuantized) scale = input.scale_of(x, n);
    for (int i = 0; i < n; i += kWidth) {
      Vec v = part_of(x, i, n);
      if constexpr (kQuantized) v = vmul(quantize(v, vset(scale)), vset(1 / kXFactor));
      put(i, v);
    }
    return scale;
  }
};

#endif

}  // namespace llmc::lin
