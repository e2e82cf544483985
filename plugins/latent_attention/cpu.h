// Attention of a step's queries over cached latents, for one layer: every head reads the same row a token.
//
// Cache: a block holds, for this layer at `offset`, rows [block_size][L + R]: a latent, which is key and value, and a
// rotated key part. block_size is 16, 32, 64, 128 or 256.
//
// Order, whatever the step, the threads or the ISA level: positions are cut into partitions of 256. In a partition a
// score accumulates over the row's columns, the largest score is taken, exponentials are summed in 16 lanes and their
// tree, latents accumulate over keys. Partitions join a running (largest, sum, values) one after the other. A position
// that a query does not see has weight 0, which changes no bit, so tiles of queries can share what they read.
//
// Work: a tile is up to kTileRows (query, head) rows of one sequence; a unit is a tile's work on one partition. Scores
// want keys as lanes, so a unit turns sixteen rows of the cache at a time, once for all its queries. Threads own equal
// stretches of the units' total cost. A tile that several threads share is joined, after a barrier, by the owner of its
// first unit, from the partial results that the others left in their scratch.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

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
class LatentAttention {
  static constexpr int kPartition = 256, kTileRows = 32;
  static_assert(BS % kLanes == 0 && kPartition % BS == 0, "block_size is 16, 32, 64, 128 or 256");
  static constexpr int kRow = L + R;
  static constexpr int kDepth = (kRow + kLanes - 1) / kLanes * kLanes;
  static constexpr int kWidth = (L + kLanes - 1) / kLanes * kLanes;  // floats of a row's values
  static constexpr int kStride = kWidth + kLanes;                    // the values, then largest score and sum
  static constexpr int kTileTokens = H >= kTileRows ? 1 : kTileRows / H;
  static constexpr int kChunks = (H + kTileRows - 1) / kTileRows;  // of heads; a tile of several tokens has all
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

 public:
  // A thread's own buffers, and what it leaves for others: a partial result for each partition of one tile.
  static constexpr int64_t kOwn = kTileRows * (kRow + kPartition + 2 * kStride) + kDepth * kLanes + 4 * kLanes;
  static constexpr int64_t scratch_bytes(int max_seq_len) {
    return int64_t(sizeof(float)) * (kOwn + int64_t(kTileRows) * kStride * ((max_seq_len + kPartition - 1) / kPartition));
  }

  LatentAttention(const Ctx& c, int tid, const float* q, const float* q_rope, float* out, float scale, int64_t offset,
                  int64_t block_bytes)
      : c_(c), step_(*c.step), tid_(tid), q_(q), q_rope_(q_rope), out_(out), scale_(scale), offset_(offset),
        block_bytes_(block_bytes) {
    float* at = reinterpret_cast<float*>(c.scratch(tid));
    const auto take = [&](int64_t floats) {
      float* own = at;
      at += floats;
      return own;
    };
    keys_ = take(kDepth * kLanes);
    queries_ = take(kTileRows * kRow);
    scores_ = take(kTileRows * kPartition);
    running_ = take(kTileRows * kStride);
    partial_ = take(kTileRows * kStride);
  }

  void run() {
    for_tiles([this](const Tile& t, int64_t) { total_ += unit_start(t, t.parts()); });
    bool shared = false;
    Tile pending{};
    int64_t pending_start = -1;
    for_tiles([&](const Tile& t, int64_t start) {
      const int first_owner = owner(start);
      const bool is_shared = first_owner != owner(start + unit_start(t, t.parts() - 1));
      shared |= is_shared;
      if (first_owner == tid_) {
        begin(t.rows());
        work(t, start, true);
        if (is_shared)
          pending = t, pending_start = start;
        else
          finish(t);
      } else if (is_shared) {
        work(t, start, false);
      }
    });
    if (!shared) return;
    c_.barrier(tid_);
    if (pending_start < 0) return;
    join_others(pending, pending_start);
    finish(pending);
  }

 private:
  // Queries of `tokens` tokens of sequence `seq` from step token `token` on, at positions from `position` on, each for
  // `heads` heads from `head` on. Row i is token i / heads, head i % heads of the tile.
  struct Tile {
    int seq, token, tokens, head, heads, position;
    int rows() const { return tokens * heads; }
    int end() const { return position + tokens; }  // one past the last key that any query sees
    int parts() const { return (end() + kPartition - 1) / kPartition; }
  };

  const Ctx& c_;
  const llmc_step& step_;
  int tid_;
  const float *q_, *q_rope_;
  float* out_;
  float scale_;
  int64_t offset_, block_bytes_;
  int64_t total_ = 0;
  float *keys_, *queries_, *scores_, *running_, *partial_;

  // Calls f(tile, cost of everything before it).
  template <class F>
  void for_tiles(F f) const {
    int64_t start = 0;
    for (int s = 0; s < step_.num_seqs; ++s) {
      const int first = step_.query_start[s], last = step_.query_start[s + 1];
      const int ahead = step_.context_len[s] - last;  // position - token
      for (int token = first; token < last; token += kTileTokens)
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int head = H * chunk / kChunks, end = H * (chunk + 1) / kChunks;
          const Tile t{s, token, std::min(kTileTokens, last - token), head, end - head, ahead + token};
          f(t, start);
          start += unit_start(t, t.parts());
        }
    }
  }

  // Cost of the units before `part`: keys times rows, the reading of a key counting as eight rows, and some for each.
  static int64_t unit_start(const Tile& t, int part) {
    return int64_t(std::min(part * kPartition, t.end())) * (t.rows() + 8) + 512 * part;
  }
  int64_t stretch(int thread) const { return total_ * thread / c_.threads; }
  int owner(int64_t start) const {
    int thread = int(start * c_.threads / total_);
    while (stretch(thread + 1) <= start) ++thread;
    while (stretch(thread) > start) --thread;
    return thread;
  }

  // This thread's units of a tile: joined to the running result, or each left for the tile's owner.
  void work(const Tile& t, int64_t start, bool own) {
    bool loaded = false;
    float* next = left_by(tid_);
    for (int part = 0; part < t.parts(); ++part) {
      if (owner(start + unit_start(t, part)) != tid_) continue;
      if (!loaded) load_queries(t);
      loaded = true;
      unit(t, part, own ? partial_ : next);
      if (own)
        join(partial_, t.rows());
      else
        next += kTileRows * kStride;
    }
  }

  void join_others(const Tile& t, int64_t start) const {
    int last_owner = tid_;
    const float* next = nullptr;
    for (int part = 0; part < t.parts(); ++part) {
      const int from = owner(start + unit_start(t, part));
      if (from == tid_) continue;
      if (from != last_owner) next = left_by(from);
      last_owner = from;
      join(next, t.rows());
      next += kTileRows * kStride;
    }
  }

  float* left_by(int thread) const { return reinterpret_cast<float*>(c_.scratch(thread)) + kOwn; }

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

  void unit(const Tile& t, int part, float* to) const {
    const int base = part * kPartition, count = std::min(t.end() - base, kPartition);
    for (int key = 0; key < count; key += kLanes) {
      turn(row(t, base + key));
      for_rows(t.rows(), [&](auto rows, int r) {
        score_rows<decltype(rows)::value>(queries_ + r * kRow, scores_ + r * kPartition + key);
      });
    }
    for (int r = 0; r < t.rows(); ++r)
      softmax(count, t.position + r / t.heads - base + 1, scores_ + r * kPartition, to + r * kStride + kWidth);
    for_rows(t.rows(), [&](auto rows, int r) {
      constexpr int N = decltype(rows)::value > 2 ? 1 : 2;
      int column = 0;
      for (; L - column >= N * kLanes; column += N * kLanes)
        value_rows<decltype(rows)::value, N, kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * kStride);
      for (; L - column >= kLanes; column += kLanes)
        value_rows<decltype(rows)::value, 1, kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * kStride);
      if constexpr (L % kLanes > 0)
        value_rows<decltype(rows)::value, 1, L % kLanes>(t, base, count, column, scores_ + r * kPartition, to + r * kStride);
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

  // Calls f(an integral constant N, first row) with register tiles of N rows.
  static constexpr int kMaxTile = LLMC_WIDE ? 8 : 6;
  template <class F>
  static void for_rows(int rows, F f) {
    int r = 0;
    for (; rows - r >= kMaxTile; r += kMaxTile) f(std::integral_constant<int, kMaxTile>(), r);
    for (; rows - r >= 4; r += 4) f(std::integral_constant<int, 4>(), r);
    if (rows - r == 3) f(std::integral_constant<int, 3>(), r);
    if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
    if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
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

  // One row's scores become weights for the keys before `last`; state: largest score and sum, which is 0 for no key.
  void softmax(int count, int last, float* scores, float* state) const {
    const Lanes none = splat(kNone), to = splat(float(last));
    Lanes top = none, total = splat(0);
    for (int key = 0; key < count; key += kLanes) {
      Lanes x = load(scores + key) * splat(scale_);
      if (key + kLanes > last) x = select(iota() + splat(float(key)) < to, x, none);
      store(scores + key, x);
      top = max(top, x);
    }
    const bool empty = last <= 0;
    const float most = empty ? 0 : largest(top);
    for (int key = 0; key < count; key += kLanes) {
      const Lanes weight = exp(load(scores + key) - splat(most));
      store(scores + key, weight);
      total = total + weight;
    }
    state[0] = empty ? kNone : most;
    state[1] = sum(total);
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
      for (int n = 0; n < N; ++n) store(to + r * kStride + column + n * kLanes, acc[r][n]);
  }

  // ---- partitions joined ----

  void begin(int rows) const {
    std::fill_n(running_, rows * kStride, 0.0f);
    for (int r = 0; r < rows; ++r) running_[r * kStride + kWidth] = kNone;
  }

  void join(const float* partial, int rows) const {
    float* running = running_;
    for (int r = 0; r < rows; ++r, running += kStride, partial += kStride) {
      const float most = partial[kWidth], total = partial[kWidth + 1];
      if (total == 0) continue;
      const float before = running[kWidth], now = before > most ? before : most;
      float factors[kLanes];
      const float shifts[kLanes] = {before - now, most - now};
      store(factors, exp(load(shifts)));
      const Lanes old = splat(factors[0]), fresh = splat(factors[1]);
      for (int i = 0; i < kWidth; i += kLanes)
        store(running + i, fma(load(running + i), old, load(partial + i) * fresh));
      running[kWidth] = now;
      running[kWidth + 1] = running[kWidth + 1] * factors[0] + total * factors[1];
    }
  }

  void finish(const Tile& t) const {
    for (int r = 0; r < t.rows(); ++r) {
      const float* from = running_ + r * kStride;
      float* to = out_ + (int64_t(t.token + r / t.heads) * H + t.head + r % t.heads) * L;
      // + 0: a zero is +0 whether or not positions of weight 0 were added.
      for (int i = 0; i < L; ++i) to[i] = from[i] / from[kWidth + 1] + 0.0f;
    }
  }
};

// q [T, H * L], q_rope [T, H * R] -> out [T, H * L]. `offset`: of this layer within a block of `block_bytes`.
template <int H, int L, int R, int BS, class KV>
void latent_attention(const Ctx& c, int tid, const float* q, const float* q_rope, float* out, float scale,
                      int64_t offset, int64_t block_bytes) {
  LatentAttention<H, L, R, BS, KV>(c, tid, q, q_rope, out, scale, offset, block_bytes).run();
}

}  // namespace llmc
