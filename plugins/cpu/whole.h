// Sixteen whole numbers of 32 bits, as lanes.h holds sixteen floats: what the sampler counts and adds with. Sums of whole
// numbers are the same in any order.
#pragma once
#include <array>

#include "plugins/cpu/lanes.h"

namespace llmc {

#if LLMC_WIDE

struct Whole {
  __m512i v;
};
inline Whole every(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Whole load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, Whole a) { _mm512_storeu_si512(p, a.v); }
inline Whole operator+(Whole a, Whole b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Mask operator>(Whole a, Whole b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
inline Mask equal(Whole a, Whole b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
// The lanes that the mask names; 0 in the others.
inline Whole keep(Mask m, Whole a) { return {_mm512_maskz_mov_epi32(m.m, a.v)}; }
inline Whole left(Whole a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
inline Whole bits_of(Lanes a) { return {_mm512_castps_si512(a.v)}; }
inline Lanes from_bits(Whole a) { return {_mm512_castsi512_ps(a.v)}; }
inline Whole nearest(Lanes a) { return {_mm512_cvtps_epi32(a.v)}; }  // halves to even
inline Mask operator|(Mask a, Mask b) { return {__mmask16(a.m | b.m)}; }
// Where either is NaN.
inline Mask unordered(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask no_lane() { return {0}; }

// The lanes that the mask names, moved together at `to`: all 16 there are written, so many count as are returned.
inline int compress(int32_t* to, Mask m, Whole a) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(m.m, a.v));
  return __builtin_popcount(m.m);
}

// Sums of lanes that are not negative. Pairs are added as one number of 64 bits, and their upper halves once more:
// from both the sum of the lower halves follows.
class WholeSum {
 public:
  void add(Whole a) {
    pairs_ = _mm512_add_epi64(pairs_, a.v);
    upper_ = _mm512_add_epi64(upper_, _mm512_srli_epi64(a.v, 32));
  }
  uint64_t total() const { return added(pairs_) - (added(upper_) << 32) + added(upper_); }

 private:
  __m512i pairs_ = _mm512_setzero_si512(), upper_ = _mm512_setzero_si512();

  static uint64_t added(__m512i a) {
    uint64_t x[8];
    _mm512_storeu_si512(x, a);
    return (x[0] + x[1]) + (x[2] + x[3]) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
};

#else

struct Whole {
  __m256i lo, hi;
};
inline Whole every(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Whole load(const int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store(int32_t* p, Whole a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, a.hi);
}
inline Whole operator+(Whole a, Whole b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Mask mask_of(__m256i lo, __m256i hi) { return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)}; }
inline Mask operator>(Whole a, Whole b) { return mask_of(_mm256_cmpgt_epi32(a.lo, b.lo), _mm256_cmpgt_epi32(a.hi, b.hi)); }
inline Mask equal(Whole a, Whole b) { return mask_of(_mm256_cmpeq_epi32(a.lo, b.lo), _mm256_cmpeq_epi32(a.hi, b.hi)); }
inline Whole keep(Mask m, Whole a) {
  return {_mm256_and_si256(_mm256_castps_si256(m.lo), a.lo), _mm256_and_si256(_mm256_castps_si256(m.hi), a.hi)};
}
inline Whole left(Whole a, int n) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
inline Whole bits_of(Lanes a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Lanes from_bits(Whole a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Whole nearest(Lanes a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
inline Mask unordered(Lanes a, Lanes b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q)};
}
inline Mask no_lane() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

// For each mask of eight lanes the places of those that it names, a byte each.
constexpr std::array<uint64_t, 256> places_of_masks() {
  std::array<uint64_t, 256> table{};
  for (int mask = 0; mask < 256; ++mask)
    for (int lane = 0, at = 0; lane < 8; ++lane)
      if (mask >> lane & 1) table[mask] |= uint64_t(lane) << 8 * at++;
  return table;
}
inline void compress(int32_t* to, uint32_t mask, __m256i a) {
  static constexpr auto table = places_of_masks();
  const __m256i places = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(table[mask])));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(a, places));
}
inline int compress(int32_t* to, Mask m, Whole a) {
  const auto low = uint32_t(_mm256_movemask_ps(m.lo)), high = uint32_t(_mm256_movemask_ps(m.hi));
  compress(to, low, a.lo);
  compress(to + __builtin_popcount(low), high, a.hi);
  return __builtin_popcount(low) + __builtin_popcount(high);
}

class WholeSum {
 public:
  void add(Whole a) {
    pairs_ = _mm256_add_epi64(_mm256_add_epi64(pairs_, a.lo), a.hi);
    upper_ = _mm256_add_epi64(_mm256_add_epi64(upper_, _mm256_srli_epi64(a.lo, 32)), _mm256_srli_epi64(a.hi, 32));
  }
  uint64_t total() const { return added(pairs_) - (added(upper_) << 32) + added(upper_); }

 private:
  __m256i pairs_ = _mm256_setzero_si256(), upper_ = _mm256_setzero_si256();

  static uint64_t added(__m256i a) {
    uint64_t x[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), a);
    return (x[0] + x[1]) + (x[2] + x[3]);
  }
};

#endif

// Sixteen numbers from p[i], with `fill` where i + lane >= n.
inline Whole load_at(const int32_t* p, int i, int n, int32_t fill) {
  if (i + kLanes <= n) return load(p + i);
  int32_t part[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) part[lane] = i + lane < n ? p[i + lane] : fill;
  return load(part);
}

inline void store_at(int32_t* p, int i, int n, Whole a) {
  if (i + kLanes <= n) return store(p + i, a);
  int32_t part[kLanes];
  store(part, a);
  std::memcpy(p + i, part, (n - i) * sizeof *part);
}

// As compress, where no more than `room` numbers fit at `to`.
inline int compress(int32_t* to, int room, Mask m, Whole a) {
  if (room >= kLanes) return compress(to, m, a);
  int32_t part[kLanes];
  const int count = compress(part, m, a);
  std::memcpy(to, part, count * sizeof *part);
  return count;
}

}  // namespace llmc
