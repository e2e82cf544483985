// INT4 weights in groups of 128 along k, each with a scale (f16) and a zero point (4 bits) an output: (q - zero) * scale.
//
// The sum of a group is taken over whole numbers: its zero points are one more row of the panel, which multiplies minus the
// sum of the group's x; then the scale, once, and groups are added in order. So an output costs a mask, a conversion and a
// multiply-add a weight, and reads 0.52 bytes of it. x is therefore laid out by groups, each followed by minus its sum.
//
// A row of a panel is 32 bytes: nibble j of 32-bit word i is output 8j + i. A nibble is masked where it stands, so that a
// vector is 16^(j % 4) times too large, which its scale makes up for; powers of two round nothing.
#pragma once
#include "plugins/linear/formats.h"
#include "plugins/linear/quantize.h"

namespace llmc::lin {

constexpr int kGroup = 128;

// Columns of the group that column k of `count` lies in, from k on. A shard of a weight that was cut in the middle of a group
// has `start` columns of its first group elsewhere.
inline int group_size(int k, int count, int start) {
  const int size = kGroup - (k + start) % kGroup, left = count - k;
  return size < left ? size : left;
}

// A whole weight, as `linear` is given it, or one panel of it.
struct Int4Weight {
  const uint8_t* bytes;   // [panels, K, 32]
  const uint16_t* scale;  // [panels, groups, 64], f16
  const uint8_t* zero;    // [panels, groups, 32]
  int start;

  int groups(int k) const { return (k + start + kGroup - 1) / kGroup; }
  Int4Weight panel(int p, int k) const {
    const int64_t row = int64_t(p) * groups(k);
    return {bytes + int64_t(p) * k * (kPanel / 2), scale + row * kPanel, zero + row * (kPanel / 2), start};
  }
};

struct Int4 : InOrder {
  using T = uint8_t;
  using Weight = Int4Weight;
  using Sums = FloatSums;
  static constexpr bool kGrouped = true;
  static constexpr int kRow = kPanel / 2;
  static constexpr int steps(int k) { return k; }
#if LLMC_WIDE
  // Vector J is nibble 2J of the eight words, then nibble 2J + 1.
  template <int J>
  static Vec decode(const T* row) {
    constexpr int low = 15 << 8 * (J % 2), high = low << 4;
    __m512i v = _mm512_broadcast_i32x8(_mm256_load_si256(reinterpret_cast<const __m256i*>(row)));
    if (J >= 2) v = _mm512_srli_epi32(v, 16);
    const __m512i mask = _mm512_inserti32x8(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
    return _mm512_cvtepi32_ps(_mm512_and_si512(v, mask));
  }
  template <int J>
  static Vec scale(const uint16_t* row) {
    constexpr float low = 1.0f / (1 << 8 * (J % 2)), high = low / 16;
    const Vec rest = _mm512_insertf32x8(_mm512_set1_ps(low), _mm256_set1_ps(high), 1);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row) + J)), rest);
  }
#else
  template <int J>
  static Vec decode(const T* row) {
    __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(row));
    if (J >= 4) v = _mm256_srli_epi32(v, 16);
    return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(15 << 4 * (J % 4))));
  }
  template <int J>
  static Vec scale(const uint16_t* row) {
    constexpr float rest = 1.0f / (1 << 4 * (J % 4));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row) + J)), vset(rest));
  }
#endif
};

// What a linear with an INT4 weight reads of x: each group of it, then minus the group's sum. The sum is that of 16 partial
// sums, of every 16th column each, in one tree.
struct Grouped {
  static constexpr bool kScaled = false;
  int start;
  int width(int n) const { return n + (n + start + kGroup - 1) / kGroup; }
  float operator()(const float* x, int n, float* to, int step) const {
    for (int k = 0; k < n;) {
      const int count = group_size(k, n, start);
      float parts[kLanes] = {};
      for (int i = 0; i < count; ++i) parts[i % kLanes] += x[k + i];
      for (int i = 0; i < count; ++i) to[int64_t(i) * step] = x[k + i];
      to[int64_t(count) * step] = -tree(parts, [](float p, float q) { return p + q; });
      to += int64_t(count + 1) * step;
      k += count;
    }
    return 1;
  }
};

}  // namespace llmc::lin
