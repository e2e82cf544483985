// A tile's work on one partition in AMX's tiles, over a cache of bf16: queries and weights are rounded to bf16, sums are
// floats. The partition's keys, then its values, become second operands, a piece of 32 keys or columns at a time, for all
// rows of the tile. Steps begin at multiples of 32 keys of the partition, whatever the tile sees, and keys that it does not
// see count as zeros: a row's results do not depend on the others.
#pragma once
#include "plugins/cpu/amx_tiles.h"
#include "plugins/cpu/partitions.h"

#if LLMC_TILES

namespace llmc::amx {

// The order of tiles in vectors: numbers rounded to bf16; in a run of 32 the products of even numbers and those of odd ones
// are summed apart, from zero, then both are added.
struct PairOrder {
  // Subnormals count as zeros meanwhile, as in tiles.
  class Rounding {
   public:
    Rounding() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // FTZ, DAZ
    ~Rounding() { _mm_setcsr(before_); }

   private:
    const unsigned before_;
  };

  // Numbers that are a multiple of 16, rounded.
  static void copy(const float* from, int count, float* to) {
    for (int i = 0; i < count; i += kLanes) {
      const __m256i words = (__m256i)_mm512_cvtneps_pbh(load(from + i).v);
      store(to + i, {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))});
    }
  }

  template <int R, int N>
  struct Sums {
    Lanes total[R][N], part[2][R][N];

    Sums() {
      clear();
      for (auto& row : total)
        for (auto& sum : row) sum = splat(0);
    }
    // Those that number i is added to.
    Lanes (&at(int i))[R][N] { return part[i % 2]; }
    // Called behind number `count` - 1; with 0 behind the last.
    void close(int count) {
      if (count % kPiece) return;
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) total[r][n] = total[r][n] + (part[0][r][n] + part[1][r][n]);
      clear();
    }

   private:
    void clear() {
      for (auto& sums : part)
        for (auto& row : sums)
          for (auto& sum : row) sum = splat(0);
    }
  };
};

// What a thread needs beside a tile of ROWS rows: D columns of a key, of which a partition has kPartition.
template <int ROWS, int D>
class TiledRows {
  static_assert(D % kPiece == 0 && ROWS <= kBlockRows);

 public:
  // The products of all queries with the keys of the groups of 16 from `first` to `end`, to scores[row][kPartition].
  // key(group): a group's first key, with BS numbers from one column to the next.
  template <int BS, class Key>
  void score(int rows, int first, int end, const Key& key, float* scores) {
    const auto decode = [&](int group) {
      for (int g = std::max(group, first); g < std::min(group + 2, end); ++g) {
        const bf16* from = key(g);
        float* to = operand_ + group / 2 % 2 * kKeys + g % 2 * kTileWords;
        for (int step = 0; step < D / 2; step += kSide, to += kTileWords)
          for (int i = 0; i < kSide; ++i, from += 2 * BS, to += kSide) put(to, pairs(half(from), half(from + BS)));
      }
    };
    const int start = first / 2 * 2;
    decode(start);
    for (int group = start; group < end; group += 2) {
      if (group + 2 < end) decode(group + 2);  // while this one is multiplied
      multiply(operand_ + group / 2 % 2 * kKeys, D / 2, queries_, rows);
      for (int g = std::max(group, first); g < std::min(group + 2, end); ++g)
        take(rows, g % 2, scores + g * kLanes, kPartition);
    }
  }

  // Sums of values times weights[row][kPartition] of the keys from 16 * first to `end`, `columns` of them, to
  // to[row][stride]. value(group): that of a group's first key, those of the others DV numbers apart each.
  template <int DV, class Value>
  void weigh(int rows, int first, int end, const Value& value, const float* weights, float* to, int stride) {
    const int start = first / 2 * 2, groups = (end + kLanes - 1) / kLanes, steps = (groups - start + 1) / 2 * kSide;
    load_weights(rows, first, start, groups, steps, weights);
    for (int column = 0; column < DV; column += kPiece) {
      for (int group = start; group < start + steps / 8; ++group) {
        const int count = group < first ? 0 : std::clamp(end - group * kLanes, 0, kLanes);
        const bf16* from = count ? value(group) + column : nullptr;
        float* tile = operand_ + (group - start) / 2 * 2 * kTileWords + (group - start) % 2 * 8 * kSide;
        for (int key = 0; key < kLanes; key += 2, tile += kSide) {
          static constexpr bf16 none[kPiece] = {};
          const bf16* one = key < count ? from + key * DV : none;
          const bf16* two = key + 1 < count ? from + (key + 1) * DV : none;
          put(tile, pairs(half(one), half(two)));
          put(tile + kTileWords, pairs(half(one + kSide), half(two + kSide)));
        }
      }
      multiply(operand_, steps, weights_, rows);
      take(rows, 0, to + column, stride);
      take(rows, 1, to + column + kSide, stride);
    }
  }

  void load_query(int rows, int r, const float* q) {
    for (int i = 0; i < D; i += kLanes) put_row(queries_, D / 2, rows, r, i, load(q + i));
  }

 private:
  static constexpr int kKeys = D / 2 * kPiece, kValues = kPartition / 2 * kPiece;  // words of operands
  TileShapes shapes_;
  alignas(64) float queries_[ROWS * D / 2];
  alignas(64) float weights_[ROWS * kPartition / 2];
  alignas(64) float sums_[2 * kTileSums];
  alignas(64) float operand_[std::max(2 * kKeys, kValues)];

  static __m256i half(const bf16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void put(float* tile, __m512i words) { _mm512_store_si512(tile, words); }

  void multiply(const float* operand, int steps, const float* x, int rows) {
    tile_block<Bf16Words>(shapes_, operand, steps, tile_rows(x, steps, rows, 0), tile_rows(x, steps, rows, kSide), sums_, true);
  }

  // The sums of one of the two tiles, to to[row][stride].
  void take(int rows, int tile, float* to, int stride) const {
    for (int top = 0; top < rows; top += kSide) {
      const float* sums = sums_ + top / kSide * kTileSums + tile * kTileWords;
      for (int r = top; r < std::min(rows, top + kSide); ++r, sums += kSide) store(to + int64_t(r) * stride, load(sums));
    }
  }

  // weights[row][kPartition] of the groups from `first` to `end` to tiles that begin with group `start`, zeros elsewhere.
  void load_weights(int rows, int first, int start, int end, int steps, const float* weights) {
    for (int r = 0; r < rows; ++r) {
      const int top = r / kSide * kSide, count = std::min(rows - top, kSide);
      float* to = weights_ + top * steps + r % kSide * kSide;
      const auto part = [&](int g) {
        return g < first || g >= end ? _mm512_setzero_ps() : load(weights + r * kPartition + g * kLanes).v;
      };
      for (int g = start; g < start + steps / 8; g += 2, to += kSide * count)
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(part(g + 1), part(g)));
    }
  }
};

}  // namespace llmc::amx

#endif
