// Attention of a step's queries over cached latents, for one layer: every head reads the same row a token.
//
// Cache: a block holds, for this layer at `offset`, rows [block_size][L + R]: a latent, which is key and value, and a
// rotated key part. block_size is 16, 32, 64, 128 or 256.
//
// plugins/cpu/partitions.h has the order of arithmetic and the division of work: a tile is up to kRows (query, head) rows
// of one sequence. Scores want keys as lanes, so a unit turns sixteen rows of the cache at a time, once for all its queries.
#pragma once
#include <algorithm>
#include <type_traits>

#include "plugins/cpu/partitions.h"

namespace llmc {

// The 8 x 8 floats at `from` (rows 16 apart), turned, to `to` (rows 16 apart).
inline void turn_8x8(const float* from, float* to) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * kLanes);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      r[4 * i + 2 * j] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0x44);
      r[4 * i + 2 * j + 1] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0xEE);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * kLanes, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
    _mm256_storeu_ps(to + (4 + i) * kLanes, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
  }
}

template <int H, int L, int R, int BS, class KV>
class LatentAttention : public PartitionedAttention<LatentAttention<H, L, R, BS, KV>> {
  static_assert(BS % kLanes == 0 && kPartition % BS == 0, "block_size is 16, 32, 64, 128 or 256");
  using Base = PartitionedAttention<LatentAttention>;
  friend Base;
  static constexpr int kRow = L + R;
  static constexpr int kDepth = (kRow + kLanes - 1) / kLanes * kLanes;

 public:
  static constexpr int kRows = 32;
  static constexpr int kTileTokens = H >= kRows ? 1 : kRows / H;
  static constexpr int kChunks = (H + kRows - 1) / kRows;  // of heads; a tile of several tokens has all
  using Rows = Partial<L>;
  // Keys, queries, scores, the running result and a partial one.
  static constexpr int64_t kOwn = kDepth * kLanes + kRows * (kRow + kPartition + 2 * Rows::kStride);

  LatentAttention(const Ctx& c, int tid, const float* q, const float* q_rope, float* out, float scale, int64_t offset,
                  int64_t block_bytes)
      : Base(c, tid), q_(q), q_rope_(q_rope), out_(out), scale_(scale), offset_(offset), block_bytes_(block_bytes) {
    keys_ = reinterpret_cast<float*>(c.scratch(tid));
    queries_ = keys_ + kDepth * kLanes;
    scores_ = queries_ + kRows * kRow;
  }

  void run() {
    float* running = scores_ + kRows * kPartition;
    this->run_tiles(running, running + kRows * Rows::kStride);
  }

 private:
  // Queries of `tokens` tokens of sequence `seq` from step token `token` on, at positions from `position` on, each for
  // `heads` heads from `head` on. Row i is token i / heads, head i % heads of the tile.
  struct Tile {
    static constexpr int first_part = 0;
    int seq, token, tokens, head, heads, position, last_part;
    int rows() const { return tokens * heads; }
    int end() const { return position + tokens; }  // one past the last key that any query sees
  };

  using Base::c_;
  using Base::step_;
  const float *q_, *q_rope_;
  float* out_;
  float scale_;
  int64_t offset_, block_bytes_;
  float *keys_, *queries_, *scores_;

  template <class F>
  void for_tiles(F f) const {
    int64_t start = 0;
    for (int s = 0; s < step_.num_seqs; ++s) {
      const int first = step_.query_start[s], last = step_.query_start[s + 1];
      const int ahead = step_.context_len[s] - last;  // position - token
      for (int token = first; token < last; token += kTileTokens)
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int head = H * chunk / kChunks, end = H * (chunk + 1) / kChunks;
          Tile t{s, token, std::min(kTileTokens, last - token), head, end - head, ahead + token, 0};
          t.last_part = (t.end() - 1) / kPartition;
          f(t, start);
          start += unit_start(t, t.last_part + 1);
        }
    }
  }

  // Cost of the units before `part`: keys times rows, the reading of a key counting as eight rows, and some for each.
  static int64_t unit_start(const Tile& t, int part) {
    return int64_t(std::min(part * kPartition, t.end())) * (t.rows() + 8) + 512 * part;
  }
  int64_t cost() const {
    int64_t total = 0;
    for_tiles([&](const Tile& t, int64_t start) { total = start + unit_start(t, t.last_part + 1); });
    return total;
  }

  void load_queries(const Tile& t) const {
    for (int r = 0; r < t.rows(); ++r) {
      const int64_t row = int64_t(t.token + r / t.heads) * H + t.head + r % t.heads;
      std::copy_n(q_ + row * L, L, queries_ + r * kRow);
      std::copy_n(q_rope_ + row * R, R, queries_ + r * kRow + L);
    }
  }

  // ---- one partition ----

  const KV* row(const Tile& t, int position) const {
    const int32_t number = step_.block_tables[int64_t(t.seq) * step_.block_table_stride + position / BS];
    return reinterpret_cast<const KV*>(c_.rank->kv + number * block_bytes_ + offset_) + int64_t(position % BS) * kRow;
  }

  void unit(const Tile& t, int part, float* to, bool) const {
    const int base = part * kPartition, count = std::min(t.end() - base, kPartition);
    for (int key = 0; key < count; key += kLanes) {
      turn(row(t, base + key));
      for_rows(t.rows(), [&](auto rows, int r) {
        score_rows<decltype(rows)::value>(queries_ + r * kRow, scores_ + r * kPartition + key);
      });
    }
    const Lanes scale = splat(scale_);
    const auto score = [scale](Lanes product, int) { return product * scale; };
    for (int r = 0; r < t.rows(); ++r)
      softmax(0, (count + kLanes - 1) / kLanes, 0, t.position + r / t.heads - base + 1, score, scores_ + r * kPartition,
              to + r * Rows::kStride + Rows::kWidth);
    for_rows(t.rows(), [&](auto rows, int r) {
      constexpr int N = decltype(rows)::value > 2 ? 1 : 2;
      int column = 0;
      for (; L - column >= N * kLanes; column += N * kLanes)
        value_rows<decltype(rows)::value, N, kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * Rows::kStride);
      for (; L - column >= kLanes; column += kLanes)
        value_rows<decltype(rows)::value, 1, kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * Rows::kStride);
      if constexpr (L % kLanes > 0)
        value_rows<decltype(rows)::value, 1, L % kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * Rows::kStride);
    });
  }

  // Sixteen rows of the cache to keys_[column][key]. They lie in one block; what is not written yet is masked later.
  void turn(const KV* rows) const {
    alignas(64) float square[kLanes * kLanes];
    for (int d = 0; d < kRow; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        const KV* from = rows + i * kRow + d;
        store(square + i * kLanes, kRow - d >= kLanes ? load(from) : load(from, kRow - d));
      }
      for (int i = 0; i < kLanes; i += 8)
        for (int j = 0; j < kLanes; j += 8) turn_8x8(square + i * kLanes + j, keys_ + (d + j) * kLanes + i);
    }
  }

  template <int N>
  void score_rows(const float* q, float* scores) const {
    Lanes acc[N];
    for (auto& a : acc) a = splat(0);
    for (int d = 0; d < kRow; ++d) {
      const Lanes key = load(keys_ + d * kLanes);
      for (int r = 0; r < N; ++r) acc[r] = fma(splat(q[r * kRow + d]), key, acc[r]);
    }
    for (int r = 0; r < N; ++r) store(scores + r * kPartition, acc[r]);
  }

  // Columns [column, column + 16 N) of the weighted latents of M rows; of the last vector only FILLED lanes exist.
  template <int M, int N, int FILLED>
  void value_rows(const Tile& t, int base, int count, int column, const float* weights, float* to) const {
    Lanes acc[M][N];
    for (auto& one : acc)
      for (auto& a : one) a = splat(0);
    for (int first = 0; first < count; first += BS) {
      const KV* values = row(t, base + first) + column;
      const float* w = weights + first;
      for (int left = std::min(BS, count - first); left > 0; --left, values += kRow, ++w) {
        Lanes v[N];
        for (int n = 0; n < N; ++n) v[n] = FILLED == kLanes ? load(values + n * kLanes) : load(values + n * kLanes, FILLED);
        for (int r = 0; r < M; ++r) {
          const Lanes weight = splat(w[r * kPartition]);
          for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, v[n], acc[r][n]);
        }
      }
    }
    for (int r = 0; r < M; ++r)
      for (int n = 0; n < N; ++n) store(to + r * Rows::kStride + column + n * kLanes, acc[r][n]);
  }

  void finish(const Tile& t, const float* running) const {
    for (int r = 0; r < t.rows(); ++r)
      Rows::finish(running + r * Rows::kStride,
                   out_ + (int64_t(t.token + r / t.heads) * H + t.head + r % t.heads) * L);
  }
};

// q [T, H * L], q_rope [T, H * R] -> out [T, H * L]. `offset`: of this layer within a block of `block_bytes`.
template <int H, int L, int R, int BS, class KV>
void latent_attention(const Ctx& c, int tid, const float* q, const float* q_rope, float* out, float scale,
                      int64_t offset, int64_t block_bytes) {
  LatentAttention<H, L, R, BS, KV>(c, tid, q, q_rope, out, scale, offset, block_bytes).run();
}

}  // namespace llmc
