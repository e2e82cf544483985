// A partition's work for a tile of queries in AMX's tiles, over a cache of bf16 or E4M3 that lies as tiles do (layout.h):
// queries and weights are rounded to bf16, sums are floats. One row goes through the same instructions as many, steps begin at
// multiples of 32 keys of the partition whatever the tile sees, and keys that it does not see count as zeros: a row's results
// do not depend on the others.
//
// Up to sixteen rows, a decode: what the thread reads next is fetched tile by tile beside the tiles that are multiplied, and
// tiles that cannot be multiplied where they lie are copied or widened one step ahead.
#pragma once
#include <algorithm>

#include "plugins/cpu/amx_tiles.h"
#include "plugins/cpu/fp8.h"
#include "plugins/cpu/partitions.h"
#include "plugins/paged_attention/layout.h"

#if LLMC_TILES

namespace llmc::amx {

// 2^x to 3e-6; 0 for -infinity. A polynomial of 2^r for r within 0..1, smallest relative error (fitted by least squares with
// iterated weights): the result is rounded to bf16.
inline Lanes power(Lanes x) {
  constexpr int to_floor = 9;
  const Lanes r = {_mm512_reduce_ps(x.v, to_floor)};  // x - floor(x)
  Lanes p = fma(splat(0.013534172f), r, splat(0.052011464f));
  p = fma(p, r, splat(0.24144274f));
  p = fma(p, r, splat(0.69300383f));
  p = fma(p, r, splat(1.0000026f));
  return {_mm512_scalef_ps(p.v, x.v)};  // p * 2^floor(x)
}

// What a thread needs for tiles of up to ROWS rows, partial results STRIDE numbers apart.
template <int ROWS, int D, int DV, int STRIDE, class SPAN>
class TileRowsOf {
  using KV = typename SPAN::KV;
  static constexpr int BS = SPAN::BS;
  static constexpr bool kInPlace = std::is_same_v<KV, bf16>;  // as the instructions want it
  static constexpr int kScores = kPartition + kLanes;  // from row to row: not a power of two, which a cache has few sets for
  static constexpr int kSteps = kPartition / kPiece;   // 32 keys each
  static constexpr int kAtOnce = 16;                   // tiles that are fetched before a thread's first unit begins
  using Next = typename SPAN::Fetching;

 public:
  void load_query(int rows, int r, const float* q) {
    for (int i = 0; i < D; i += kLanes) put_row(queries_, D / 2, rows, r, i, load(q + i));
  }

  // The partial results of all rows. seen(r): which keys row r sees, and how its products score.
  template <class Seen>
  void unit(const SPAN& s, int kv_head, int rows, const Seen& seen, float* to) {
    const int steps = (s.end_group + 1) / 2 - s.first_group / 2;
    if (rows <= kSide) return unit_of_few(s, kv_head, rows, steps, seen, to);
    fetched_ = false;
    for (int top = 0; top < rows; top += kBlockRows) {
      const int count = std::min(rows - top, kBlockRows);
      if (count > kSide)
        shapes_.set_piece(count);
      else
        shapes_.set_panel(count);
      score(s, kv_head, rows, top);
      if (top == 0) find_values(s, kv_head);
      for (int r = 0; r < count; ++r)
        weights(s, count, r, steps, seen(top + r), to + (top + r) * STRIDE + STRIDE - kLanes);
      weigh(s, count, steps, to + top * STRIDE);
    }
  }

 private:
  TileShapes shapes_;
  alignas(64) float queries_[ROWS * D / 2];
  alignas(64) float scores_[kBlockRows * kScores];
  alignas(64) float weights_[kBlockRows * kPartition / 2];
  const float *keys_at_[kPartition / kLanes], *values_at_[kSteps];  // tiles of a group's keys, of 32 keys' values
  alignas(64) float keys_[kInPlace ? kLanes : kPartition / 2 * D];
  alignas(64) float values_[kPartition / 2 * DV];
  alignas(64) float near_[2][4][kTileWords];  // tiles that are not multiplied where they lie, and those of the step behind
  bool fetched_ = false;                      // whether the unit was fetched while the last one was computed

  // Sums of `steps` products of both rows' tiles with two tiles each, second(step, 0 and 1), to to[row][stride].
  template <class Second>
  static void multiply(int steps, TileRows lower, TileRows upper, const Second& second, float* to, int stride) {
    const int bytes = stride * int(sizeof(float));
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; ++step) {
      _tile_loadd(4, lower.step(step * kSide), kTileBytes);
      _tile_loadd(5, upper.step(step * kSide), kTileBytes);
      _tile_loadd(6, second(step, 0), kTileBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, second(step, 1), kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + kSide, bytes);
    _tile_stored(2, to + kSide * stride, bytes);
    _tile_stored(3, to + kSide * stride + kSide, bytes);
    __asm__ volatile("" ::: "memory");
  }

  // The same of a few rows, with four tiles each, or two.
  template <int TILES, class Second>
  static void multiply_few(int steps, TileRows rows, const Second& second, float* to, int stride) {
    const int bytes = stride * int(sizeof(float));
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    if (TILES == 4) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step) {
      _tile_loadd(4, rows.step(step * kSide), kTileBytes);
      _tile_loadd(5, second(step, 0), kTileBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, second(step, 1), kTileBytes);
      _tile_dpbf16ps(1, 4, 6);
      if (TILES == 2) continue;
      _tile_loadd(7, second(step, 2), kTileBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, second(step, 3), kTileBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + kSide, bytes);
    if (TILES == 4) {
      _tile_stored(2, to + 2 * kSide, bytes);
      _tile_stored(3, to + 3 * kSide, bytes);
    }
    __asm__ volatile("" ::: "memory");
  }

  // Products of the rows from `top` on with all keys, to scores_. While the first rows' are computed the next keys are found.
  void score(const SPAN& s, int kv_head, int rows, int top) {
    const TileRows lower = tile_rows(queries_, D / 2, rows, top), upper = tile_rows(queries_, D / 2, rows, top + kSide);
    const int groups = upper.rows ? 2 : 4, first = s.first_group / groups * groups;
    if (top == 0) find_keys(s, kv_head, first, groups);
    for (int group = first; group < s.end_group; group += groups) {
      if (top == 0) find_keys(s, kv_head, group + groups, groups);
      const auto keys = [&](int step, int i) {  // of a group that is not there another stands in
        return keys_at_[std::clamp(group + i, s.first_group, s.end_group - 1)] + step * kTileWords;
      };
      if (upper.rows)
        multiply(D / kPiece, lower, upper, keys, scores_ + group * kLanes, kScores);
      else
        multiply_few<4>(D / kPiece, lower, keys, scores_ + group * kLanes, kScores);
    }
  }

  // ---- up to sixteen rows: memory takes longer than the arithmetic, and each key and value is wanted once ----

  template <class Seen>
  void unit_of_few(const SPAN& s, int kv_head, int rows, int steps, const Seen& seen, float* to) {
    shapes_.set_panel(rows);
    Next next(s.next, s.next_head);
    if (fetched_) {
      score_few(s, kv_head, rows, [&]() __attribute__((always_inline)) { next.tile(); });
    } else {
      Next own(s.blocks, kv_head);
      for (int i = 0; i < kAtOnce; ++i) own.tile();
      score_few(s, kv_head, rows, [&]() __attribute__((always_inline)) {
        own.tile();
        own.tile();
        next.tile();
      });
    }
    fetched_ = true;
    for (int r = 0; r < rows; ++r) weights(s, rows, r, steps, seen(r), to + r * STRIDE + STRIDE - kLanes);
    int at = 0;
    for (; at + 4 <= DV / kSide; at += 4) weigh_few<4>(s, kv_head, rows, steps, at, next, to);
    for (; at < DV / kSide; at += 2) weigh_few<2>(s, kv_head, rows, steps, at, next, to);
  }

  template <class Fetch>
  void score_few(const SPAN& s, int kv_head, int rows, const Fetch& fetch_tile) {
    constexpr int steps = D / kPiece, numbers = kTileWords * 2;
    const TileRows x = tile_rows(queries_, D / 2, rows, 0);
    const auto keys = [&](int group, int step) {  // of a group that is not there another stands in
      return s.keys(kv_head, std::clamp(group, s.first_group, s.end_group - 1) * kLanes) + step * numbers;
    };
    int piece = 0;
    for (int i = 0; !kInPlace && i < 4; ++i) bring_keys(keys(s.first_group / 4 * 4 + i, 0), near_[0][i]);
    for (int group = s.first_group / 4 * 4; group < s.end_group; group += 4) {
      const auto tile = [&](int step, int i) __attribute__((always_inline)) {
        fetch_tile();
        if constexpr (kInPlace) return reinterpret_cast<const float*>(keys(group + i, step));
        const int at = piece + step;
        if (step + 1 < steps)
          bring_keys(keys(group + i, step + 1), near_[(at + 1) % 2][i]);
        else if (group + 4 < s.end_group)
          bring_keys(keys(group + 4 + i, 0), near_[(at + 1) % 2][i]);
        return static_cast<const float*>(near_[at % 2][i]);
      };
      multiply_few<4>(steps, x, tile, scores_ + group * kLanes, kScores);
      piece += steps;
    }
  }

  // Sums of the values' columns of so many tiles from tile `at` on times weights, to to[row][STRIDE].
  template <int TILES>
  void weigh_few(const SPAN& s, int kv_head, int rows, int steps, int at, Next& next, float* to) {
    const TileRows x = tile_rows(weights_, steps * kSide, rows, 0);
    const int first = s.first_group / 2;
    const auto in_place = [&](int step) { return kInPlace && BS >= kPiece && (first + step + 1) * kPiece <= s.end; };
    const auto bring = [&](int step, int i) __attribute__((always_inline)) {
      if (!in_place(step)) bring_values(s, kv_head, first + step, at + i, near_[step % 2][i]);
    };
    for (int i = 0; i < TILES; ++i) bring(0, i);
    const auto tile = [&](int step, int i) __attribute__((always_inline)) {
      next.tile();
      if (step + 1 < steps) bring(step + 1, i);
      if (!in_place(step)) return static_cast<const float*>(near_[step % 2][i]);
      return reinterpret_cast<const float*>(s.values(kv_head, (first + step) * kPiece)) + (at + i) * kTileWords;
    };
    multiply_few<TILES>(steps, x, tile, to + at * kSide, STRIDE);
  }

  // A tile of keys; tile `column` of 32 keys' values, of which those that are not there are zeros. The fences: multiply_few is
  // in its loop, and the compiler does not know that tile loads read memory.
  static void bring_keys(const KV* from, float* to) {
    widen<kTileWords * 2>(from, to);
    __asm__ volatile("" ::: "memory");
  }
  static void bring_values(const SPAN& s, int kv_head, int step, int column, float* to) {
    for (int g = 2 * step; g < 2 * step + 2; ++g, to += kTileWords / 2) {
      const int count = g < s.first_group ? 0 : std::clamp(s.end - g * kLanes, 0, kLanes);
      copy_tile(count ? s.values(kv_head, g * kLanes) + column * kSide * std::min(BS, kPiece) : nullptr, count, to);
    }
    __asm__ volatile("" ::: "memory");
  }

  // ---- rows ----

  // Row r's products become weights, as the first operand of `steps` steps. Without softcap and slopes, and with a scale above
  // 0, the largest product is the largest score, and the scale is part of the exponent's.
  template <class Seen>
  [[gnu::noinline]] void weights(const SPAN& s, int rows, int r, int steps, const Seen& seen, float* state) {
    using Score = decltype(seen.score);
    float* const x = scores_ + r * kScores;
    const int first = s.first_group / 2 * 2;
    if (first < s.first_group) store(x + first * kLanes, splat(kNone));
    if (s.end_group % 2) store(x + s.end_group * kLanes, splat(kNone));
    const bool empty = seen.first >= seen.last;
    const bool linear = Score::kLinear && seen.score.factor > 0;
    const float factor = linear ? seen.score.factor : 1, top = largest_score(s, seen, x, linear), most = empty ? 0 : top;
    const Lanes times = splat(factor * 1.44269504f), shift = splat(-(most * (factor * 1.44269504f)));
    Lanes even = splat(0), odd = splat(0);
    float* to = weights_ + r / kSide * kSide * steps * kSide + r % kSide * kSide;
    const int next = kSide * std::min(rows - r / kSide * kSide, kSide);
    const float* from = x + first * kLanes;
    for (int step = 0; step < steps; ++step, from += kPiece, to += next) {
      const Lanes low = power(fma(load(from), times, shift)), high = power(fma(load(from + kLanes), times, shift));
      even = even + low;
      odd = odd + high;
      _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
    }
    state[0] = empty ? kNone : most * factor;
    state[1] = sum(even + odd);
  }

  // Products that are not seen become kNone; where a score is more than a product times a factor, products become scores.
  template <class Seen>
  [[gnu::noinline]] static float largest_score(const SPAN& s, const Seen& seen, float* x, bool linear) {
    const Lanes from = splat(float(seen.first)), to = splat(float(seen.last));
    Lanes top[4] = {splat(kNone), splat(kNone), splat(kNone), splat(kNone)};
    const auto part = [&](int g) {
      Lanes score = load(x + g * kLanes);
      if (!linear) score = seen.score(score, g * kLanes);
      const Lanes index = iota() + splat(float(g * kLanes));
      score = select((index >= from) & (index < to), score, splat(kNone));
      store(x + g * kLanes, score);
      top[0] = max(top[0], score);
    };
    int g = s.first_group;
    if (linear) {
      const int whole = std::min((seen.first + kLanes - 1) / kLanes, s.end_group), end = seen.last / kLanes;
      for (; g < whole; ++g) part(g);
      for (; g + 4 <= end; g += 4)
        for (int i = 0; i < 4; ++i) top[i] = max(top[i], load(x + (g + i) * kLanes));
      for (; g < end; ++g) top[1] = max(top[1], load(x + g * kLanes));
    }
    for (; g < s.end_group; ++g) part(g);
    return largest(max(max(top[0], top[1]), max(top[2], top[3])));
  }

  // Sums of values times weights, to to[row][STRIDE].
  void weigh(const SPAN& s, int rows, int steps, float* to) const {
    const TileRows lower = tile_rows(weights_, steps * kSide, rows, 0);
    const TileRows upper = tile_rows(weights_, steps * kSide, rows, kSide);
    const auto from = [values = values_at_ + s.first_group / 2](int at) {
      return [values, at](int step, int i) { return values[step] + (at + i) * kTileWords; };
    };
    int at = 0;
    for (; !upper.rows && at + 4 <= DV / kSide; at += 4)
      multiply_few<4>(steps, lower, from(at), to + at * kSide, STRIDE);
    for (; !upper.rows && at < DV / kSide; at += 2) multiply_few<2>(steps, lower, from(at), to + at * kSide, STRIDE);
    for (; at < DV / kSide; at += 2) multiply(steps, lower, upper, from(at), to + at * kSide, STRIDE);
  }

  // So many groups' keys: where they lie, or widened.
  void find_keys(const SPAN& s, int kv_head, int first, int groups) {
    for (int g = std::max(first, s.first_group); g < std::min(first + groups, s.end_group); ++g) {
      const KV* from = s.keys(kv_head, g * kLanes);
      if constexpr (kInPlace) {
        keys_at_[g] = reinterpret_cast<const float*>(from);
      } else {
        float* const to = keys_ + g * (kLanes / 2 * D);
        keys_at_[g] = to;
        widen<kLanes * D>(from, to);
      }
    }
  }

  // The values of every 32 keys: where they lie, or, where a block has only 16 of them, some are not to be read or are to be
  // widened, copied.
  void find_values(const SPAN& s, int kv_head) {
    for (int step = s.first_group / 2; step < (s.end_group + 1) / 2; ++step) {
      const int key = step * kPiece;
      if (kInPlace && BS >= kPiece && key + kPiece <= s.end) {
        values_at_[step] = reinterpret_cast<const float*>(s.values(kv_head, key));
        continue;
      }
      float* const to = values_ + step * (kPiece / 2 * DV);
      values_at_[step] = to;
      for (int g = 2 * step; g < 2 * step + 2; ++g) {
        const int count = g < s.first_group ? 0 : std::clamp(s.end - g * kLanes, 0, kLanes);
        const KV* from = count ? s.values(kv_head, g * kLanes) : nullptr;
        copy_group(from, count, to + g % 2 * kTileWords / 2);
      }
    }
  }

  // Values of up to sixteen keys, zeros for the others.
  static void copy_group(const KV* from, int keys, float* to) {
    constexpr int run = std::min(BS, kPiece);
    for (int column = 0; column < DV; column += kSide, to += kTileWords) copy_tile(from + column * run, keys, to);
  }
  // The same of sixteen columns: half a tile.
  static void copy_tile(const KV* from, int keys, float* to) {
    if (keys == kLanes) return widen<kTileWords>(from, to);
    for (int row = 0; row < kLanes / 2; row += 2) {
      if (2 * row < keys) widen<64>(from + row * kPiece, to + row * kSide);
      for (int i = row; i < row + 2; ++i) {
        const int seen = std::clamp(keys - 2 * i, 0, 2);
        if (seen == 2) continue;
        const __m512i pairs = _mm512_load_si512(to + i * kSide);
        _mm512_store_si512(to + i * kSide, seen ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF)) : _mm512_setzero_si512());
      }
    }
  }
};

}  // namespace llmc::amx

#endif
