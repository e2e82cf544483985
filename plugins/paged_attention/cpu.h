// Attention of a step's queries over the paged cache, for one layer. plugins/cpu/partitions.h has the order of arithmetic
// and the division of work: a tile is up to kTileRows (query, head) rows of one sequence and KV head; a sink is joined last
// of all.
//
// With AMX, over a cache of bf16, products are of bf16 (amx.h): a few rows in vectors, in the order of tiles, because memory
// takes longer than the arithmetic; more in tiles. Both give the same bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "plugins/cpu/fp8.h"
#include "plugins/cpu/partitions.h"
#include "plugins/paged_attention/amx.h"
#include "plugins/paged_attention/scoring.h"

namespace llmc {

template <int H, int KH, int D, int DV, int BS, class KV, class S, class SCALES = Unscaled>
class PagedAttention : public PartitionedAttention<PagedAttention<H, KH, D, DV, BS, KV, S, SCALES>> {
  static_assert(BS % kLanes == 0 && kPartition % BS == 0, "block_size is 16, 32, 64, 128 or 256");
  static_assert(H % KH == 0, "heads share KV heads evenly");
  using Base = PartitionedAttention<PagedAttention>;
  friend Base;

 public:
  static constexpr int kGroup = H / KH;
  static constexpr int kTileTokens = kGroup >= kTileRows ? 1 : kTileRows / kGroup;
  static constexpr int kRows = kTileTokens * kGroup;
  static constexpr int kFull = DV / kLanes, kRest = DV % kLanes;
  static constexpr int64_t kOwn = 0;
  using Rows = Partial<DV>;

  PagedAttention(const Ctx& c, int tid, const PagedInputs& in, float* out, const SCALES& scales)
      : Base(c, tid), in_(in), out_(out), scales_(scales) {}

  void run() {
    alignas(64) float queries[kRows * D], scores[kRows * kPartition];
    alignas(64) float running[kRows * Rows::kStride], partial[kRows * Rows::kStride];
    queries_ = queries, scores_ = scores;
    [[maybe_unused]] Tiled tiled;
    tiled_ = &tiled;
    this->run_tiles(running, partial);
  }

 private:
  // `tokens` queries of sequence `seq` from step token `token` on, at positions from `position` on.
  struct Tile {
    int seq, token, tokens, position, kv_head, first_part, last_part;
    int rows() const { return tokens * kGroup; }
    int end() const { return position + tokens; }  // one past the last key that any query sees
    int begin() const { return first_key(position); }  // the first key that any query sees
  };

  struct InFloats {};
#if LLMC_TILES
  static constexpr bool kTiled =
      std::is_same_v<KV, bf16> && D % amx::kPiece == 0 && DV % amx::kPiece == 0 && kRows <= amx::kBlockRows;
  using Tiled = std::conditional_t<kTiled, amx::TiledRows<kRows, D>, InFloats>;
  using Order = std::conditional_t<kTiled, amx::PairOrder, OneChain>;
#else
  static constexpr bool kTiled = false;
  using Tiled = InFloats;
  using Order = OneChain;
#endif

  using Base::c_;
  using Base::step_;
  const PagedInputs& in_;
  float* out_;
  const SCALES& scales_;
  float *queries_ = nullptr, *scores_ = nullptr;
  Tiled* tiled_ = nullptr;

  // The first key that a query at a position sees; never before that of an earlier query.
  static int first_key(int position) {
    int first = 0;
    if constexpr (S::window > 0) first = std::max(first, position - S::window + 1);
    if constexpr (S::chunk > 0) first = std::max(first, position - position % S::chunk);
    return first;
  }

  // Calls f(tile of KV head 0).
  template <class F>
  void for_queries(F f) const {
    for (int s = 0; s < step_.num_seqs; ++s) {
      const int first = step_.query_start[s], last = step_.query_start[s + 1];
      const int ahead = step_.context_len[s] - last;  // position - token
      for (int token = first; token < last; token += kTileTokens) {
        Tile t{s, token, std::min(kTileTokens, last - token), ahead + token, 0, 0, 0};
        t.first_part = t.begin() / kPartition;
        t.last_part = (t.end() - 1) / kPartition;
        f(t);
      }
    }
  }
  template <class F>
  void for_tiles(F f) const {
    int64_t start = 0;
    for_queries([&](Tile t) {
      for (; t.kv_head < KH; ++t.kv_head, start += cost(t)) f(t, start);
    });
  }

  // Keys times rows, the reading of a key counting as four rows, plus something for each unit.
  static int64_t key_cost(const Tile& t) { return t.rows() + 4; }
  static int64_t unit_start(const Tile& t, int part) {
    constexpr int64_t each = 512;
    return part == t.first_part ? 0 : (part * kPartition - t.begin()) * key_cost(t) + each * (part - t.first_part);
  }
  static int64_t cost(const Tile& t) {
    return unit_start(t, t.last_part) + (t.end() - std::max(t.begin(), t.last_part * kPartition)) * key_cost(t) + 512;
  }
  int64_t cost() const {
    int64_t total = 0;
    for_queries([&](const Tile& t) { total += cost(t) * KH; });
    return total;
  }

  static bool in_tiles(const Tile& t) { return kTiled && t.rows() > 4; }

  void load_queries(const Tile& t) const {
    for (int i = 0; i < t.tokens; ++i) {
      const float* from = in_.q + (int64_t(t.token + i) * H + t.kv_head * kGroup) * D;
      if constexpr (kTiled)
        for (int head = 0; in_tiles(t) && head < kGroup; ++head)
          tiled_->load_query(t.rows(), i * kGroup + head, from + head * D);
      if (!in_tiles(t)) Order::copy(from, kGroup * D, queries_ + i * kGroup * D);
    }
  }

  // ---- one partition ----

  struct Span {
    const uint8_t* blocks[kPartition / BS];  // by block within the partition; only those from first_group on are set
    const uint8_t* next[kPartition / BS];    // those of the partition behind it, null where the tile needs none
    int first_group, end_group;              // groups of 16 keys that are touched
    int end;                                 // one past the last key that is read; all relative to the partition
  };

  const uint8_t* block(int32_t number) const { return c_.rank->kv + number * in_.block_bytes + in_.offset; }

  Span span(const Tile& t, int part) const {
    const int base = part * kPartition;
    const int begin = std::max(t.begin() - base, 0) / BS * BS;
    Span s;
    s.end = std::min(t.end() - base, kPartition);
    s.first_group = begin / kLanes;
    s.end_group = (s.end + kLanes - 1) / kLanes;
    const int32_t* table = step_.block_tables + int64_t(t.seq) * step_.block_table_stride + base / BS;
    for (int b = begin / BS; b * BS < s.end; ++b) s.blocks[b] = block(table[b]);
    for (int b = 0; b < kPartition / BS; ++b)
      s.next[b] = base + kPartition + b * BS < t.end() ? block(table[kPartition / BS + b]) : nullptr;
    return s;
  }

  void unit(const Tile& t, int part, float* to) const {
    const Span s = span(t, part);
    [[maybe_unused]] const typename Order::Rounding rounding;
    score(s, t);
    for (int r = 0; r < t.rows(); ++r) {
      const int base = part * kPartition, position = t.position + r / kGroup;
      const int first = std::max(first_key(position) - base, 0), last = std::min(position - base + 1, kPartition);
      const float scale = in_.scale * (scales_.key(t.kv_head) * kLoaded<KV>);
      const Score score(scale, in_.softcap, S::slopes ? in_.slopes[head_of(t, r)] : 0, base - position);
      softmax(s.first_group, s.end_group, first, last, score, scores_ + r * kPartition,
              to + r * Rows::kStride + Rows::kWidth);
    }
    weigh(s, t, to);
  }

  void score(const Span& s, const Tile& t) const {
    if constexpr (kTiled)
      if (in_tiles(t))
        return tiled_->template score<BS>(
            t.rows(), s.first_group, s.end_group, [&](int g) { return keys_at(s, t.kv_head, g * kLanes); }, scores_);
    for_rows(t.rows(), [&](auto rows, int r) {
      score_rows<decltype(rows)::value>(s, t.kv_head, queries_ + r * D, scores_ + r * kPartition, r == 0);
    });
  }

  void weigh(const Span& s, const Tile& t, float* to) const {
    if constexpr (kTiled)
      if (in_tiles(t))
        return tiled_->template weigh<DV>(
            t.rows(), s.first_group, s.end, [&](int g) { return values_at(s, t.kv_head, g * kLanes); }, scores_, to,
            Rows::kStride);
    for (int r = 0; r < t.rows(); ++r) {
      float* weights = scores_ + r * kPartition;
      Order::copy(weights + s.first_group * kLanes, (s.end_group - s.first_group) * kLanes, weights + s.first_group * kLanes);
    }
    for_rows(t.rows(), [&](auto rows, int r) {
      value_rows<decltype(rows)::value>(s, t.kv_head, scores_ + r * kPartition, to + r * Rows::kStride, r == 0);
    });
  }

  static const KV* keys_at(const Span& s, int kv_head, int key) {
    return reinterpret_cast<const KV*>(s.blocks[key / BS]) + int64_t(kv_head) * D * BS + key % BS;
  }
  static const KV* values_at(const Span& s, int kv_head, int key) {
    return reinterpret_cast<const KV*>(s.blocks[key / BS]) + int64_t(KH) * D * BS +
           (int64_t(kv_head) * BS + key % BS) * DV;
  }

  // Blocks lie anywhere in memory, so the hardware cannot foresee them, and with few rows memory takes longer than the
  // arithmetic: while keys are read their values are fetched, and while values are read the next partition's keys.
  static constexpr bool fetches(int rows) { return rows <= 4; }
  static constexpr int lines(int numbers) { return (numbers * int(sizeof(KV)) + 63) / 64; }
  template <_mm_hint To = _MM_HINT_T1>
  static void fetch(const void* from, int line) {
    _mm_prefetch(static_cast<const char*>(from) + 64 * line, To);
  }

  // Keys that come next in this partition; null behind it.
  static const KV* after_keys(const Span& s, int kv_head, int group) {
    return group < s.end_group ? keys_at(s, kv_head, group * kLanes) : nullptr;
  }

  // Vectors beside R rows that the registers have room for.
  static constexpr int columns(int rows) {
    if (kTiled) return rows > 2 ? 2 : rows > 1 ? 4 : 8;
    if (LLMC_WIDE) return rows > 4 ? 2 : rows > 1 ? 4 : 8;
    return rows > 2 ? 1 : rows > 1 ? 2 : 4;
  }

  // acc[r][n] += row(r) * column(n), holding the fewer of the two in registers.
  template <int R, int N, class Row, class Column>
  static void multiply(Lanes (&acc)[R][N], Row row, Column column) {
    if constexpr (R <= 3) {
      Lanes x[R];
      for (int r = 0; r < R; ++r) x[r] = row(r);
      for (int n = 0; n < N; ++n) {
        const Lanes y = column(n);
        for (int r = 0; r < R; ++r) acc[r][n] = fma(x[r], y, acc[r][n]);
      }
    } else {
      Lanes y[N];
      for (int n = 0; n < N; ++n) y[n] = column(n);
      for (int r = 0; r < R; ++r) {
        const Lanes x = row(r);
        for (int n = 0; n < N; ++n) acc[r][n] = fma(x, y[n], acc[r][n]);
      }
    }
  }

  template <int R>
  static void score_rows(const Span& s, int kv_head, const float* q, float* scores, bool first) {
    constexpr int N = columns(R);
    int g = s.first_group;
    for (; s.end_group - g >= N; g += N) score_tile<R, N>(s, kv_head, q, g, scores, first);
    for (; g < s.end_group; ++g) score_tile<R, 1>(s, kv_head, q, g, scores, first);
  }

  // Scores of R rows [R][D] and N groups of 16 keys.
  template <int R, int N>
  static void score_tile(const Span& s, int kv_head, const float* q, int group, float* scores, bool first) {
    const KV *keys[N], *later[N], *values[N];
    for (int n = 0; n < N; ++n) {
      keys[n] = keys_at(s, kv_head, (group + n) * kLanes);
      const KV* after = first && fetches(R) ? after_keys(s, kv_head, group + n + N) : nullptr;
      later[n] = after ? after : keys[n];
      values[n] = first ? values_at(s, kv_head, (group + n) * kLanes) : keys[n];
    }
    typename Order::template Sums<R, N> sums;
    constexpr int step = D % 4 == 0 && 4 * BS * sizeof(KV) <= 64 ? 4 : D % 2 == 0 ? 2 : 1;  // a line of the cache
    constexpr int kEach = (lines(kLanes * DV) * step + D - 1) / D;
    for (int d = 0; d < D; d += step) {
      for (int n = 0; fetches(R) && n < N; ++n) {
        fetch<_MM_HINT_T0>(later[n] + d * BS, 0);
        if (step * BS * sizeof(KV) > 64) fetch<_MM_HINT_T0>(later[n] + (d + step - 1) * BS, 0);
        for (int line = 0; line < kEach; ++line) fetch(values[n], d / step * kEach + line);
      }
      for (int e = d; e < d + step; ++e)
        multiply<R, N>(sums.at(e), [&](int r) { return splat(q[r * D + e]); }, [&](int n) { return load(keys[n] + e * BS); });
      sums.close(d + step);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(scores + r * kPartition + (group + n) * kLanes, sums.total[r][n]);
  }

  static int head_of(const Tile& t, int row) { return t.kv_head * kGroup + row % kGroup; }

  // What a product of query and key scores; `distance`: from the query's position to that of the partition's first key.
  struct Score {
    Lanes scale, softcap, slope;
    int distance;
    Score(float factor, float cap, float own_slope, int to_first)
        : scale(splat(factor)), softcap(splat(cap)), slope(splat(own_slope)), distance(to_first) {}
    Lanes operator()(Lanes product, int key) const {
      Lanes x = product * scale;
      if constexpr (S::softcap) x = tanh(x / softcap) * softcap;
      if constexpr (S::slopes) x = fma(iota() + splat(float(key + distance)), slope, x);
      return x;
    }
  };

  template <int R>
  static void value_rows(const Span& s, int kv_head, const float* weights, float* to, bool first) {
    constexpr int N = columns(R);
    int n = 0;
    for (; kFull - n >= N; n += N) value_tile<R, N, kLanes>(s, kv_head, weights, n * kLanes, to, first);
    for (; n < kFull; ++n) value_tile<R, 1, kLanes>(s, kv_head, weights, n * kLanes, to, first);
    if constexpr (kRest > 0) value_tile<R, 1, kRest>(s, kv_head, weights, kFull * kLanes, to, first);
  }

  // Columns [column, column + 16 N) of R rows of weighted values; of the last vector only FILLED lanes exist.
  template <int R, int N, int FILLED>
  static void value_tile(const Span& s, int kv_head, const float* weights, int column, float* to, bool first_rows) {
    typename Order::template Sums<R, N> sums;
    // The next partition's keys are fetched in every pass over the columns, an equal part in each: memory is idle in none.
    constexpr int most = columns(R), kPasses = kFull / most + kFull % most + (kRest > 0);
    constexpr int kPart = (lines(D * BS) + kPasses - 1) / kPasses, kEach = (kPart + BS - 1) / BS;
    const int part = (column / kLanes / most + column / kLanes % most) * kPart;
    for (int first = s.first_group * kLanes; first < s.end; first += BS) {
      const KV* values = values_at(s, kv_head, first) + column;
      const uint8_t* next = fetches(R) && first_rows ? s.next[first / BS] : nullptr;
      const KV* keys = reinterpret_cast<const KV*>(next) + int64_t(kv_head) * D * BS;
      const int count = std::min(BS, s.end - first), fetching = next ? (kPart + kEach - 1) / kEach : 0;
      const float* w = weights + first;
      for (int i = 0; i < count; ++i, values += DV, ++w) {
        for (int line = 0; i < fetching && line < kEach; ++line) fetch(keys, part + i * kEach + line);
        multiply<R, N>(sums.at(i), [&](int r) { return splat(w[r * kPartition]); }, [&](int n) {
          return FILLED == kLanes ? load(values + n * kLanes) : load(values + n * kLanes, FILLED);
        });
        sums.close(first + i + 1);
      }
    }
    sums.close(0);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(to + r * Rows::kStride + column + n * kLanes, sums.total[r][n]);
  }

  void finish(const Tile& t, float* running) const {
    for (int r = 0; r < t.rows(); ++r, running += Rows::kStride) {
      const int64_t token = t.token + r / kGroup, head = head_of(t, r);
      if constexpr (S::sinks) join_sink(running, in_.sinks[head]);
      Rows::finish(running, out_ + (token * H + head) * DV, scales_.value(t.kv_head) * kLoaded<KV>);
    }
  }

  // One more score, whose value is 0.
  static void join_sink(float* running, float sink) {
    float partial[Rows::kStride] = {};
    partial[Rows::kWidth] = sink, partial[Rows::kWidth + 1] = 1;
    Rows::join(running, partial, 1);
  }
};

template <int H, int KH, int D, int DV, int BS, class KV, class S, class SCALES>
void paged_attention(const Ctx& c, int tid, const PagedInputs& in, float* out, const SCALES& scales) {
  PagedAttention<H, KH, D, DV, BS, KV, S, SCALES>(c, tid, in, out, scales).run();
}

}  // namespace llmc
