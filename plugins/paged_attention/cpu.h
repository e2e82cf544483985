// Attention of a step's queries over the paged cache, for one layer. plugins/cpu/partitions.h has the order of arithmetic
// and the division of work: a tile is up to kTileRows (query, head) rows of one sequence and KV head; a sink is joined last
// of all. What a tile computes of a partition: vectors.h, or amx.h with AMX over a cache of bf16 or E4M3, whose products are
// of bf16.
#pragma once
#include <algorithm>
#include <type_traits>

#include "plugins/cpu/fp8.h"
#include "plugins/cpu/partitions.h"
#include "plugins/paged_attention/amx.h"
#include "plugins/paged_attention/layout.h"
#include "plugins/paged_attention/scoring.h"
#include "plugins/paged_attention/vectors.h"

namespace llmc {

template <int H, int KH, int D, int DV, int BS, class KV, class S, class SCALES = Unscaled>
class PagedAttention : public PartitionedAttention<PagedAttention<H, KH, D, DV, BS, KV, S, SCALES>> {
  static_assert(BS % kLanes == 0 && kPartition % BS == 0, "block_size is 16, 32, 64, 128 or 256");
  static_assert(H % KH == 0, "heads share KV heads evenly");
  using Base = PartitionedAttention<PagedAttention>;
  friend Base;

 public:
  using Layout = BlockLayout<KH, D, DV, BS, KV>;
  static constexpr int kGroup = H / KH;
  static constexpr int kTileRows = Layout::kTiled ? 64 : 24;
  static constexpr int kTileTokens = kGroup >= kTileRows ? 1 : kTileRows / kGroup;
  static constexpr int kRows = kTileTokens * kGroup;
  static constexpr int64_t kOwn = 0;
  using Rows = Partial<DV>;

  PagedAttention(const Ctx& c, int tid, const PagedInputs& in, float* out, const SCALES& scales)
      : Base(c, tid), in_(in), out_(out), scales_(scales) {}

  void run() {
    alignas(64) float running[kRows * Rows::kStride], partial[kRows * Rows::kStride];
    ForRows rows;
    rows_ = &rows;
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

  using Parts = Span<Layout, kPartition>;

  struct InFloats {
    alignas(64) float queries[kRows * D], scores[kRows * kPartition];
    void load_query(int, int r, const float* q) { std::copy_n(q, D, queries + r * D); }
  };

#if LLMC_TILES
  using ForRows = std::conditional_t<Layout::kTiled, amx::TileRowsOf<kRows, D, DV, Rows::kStride, Parts>, InFloats>;
#else
  using ForRows = InFloats;
#endif

  using Base::c_;
  using Base::step_;
  const PagedInputs& in_;
  float* out_;
  const SCALES& scales_;
  ForRows* rows_ = nullptr;

  // The first key that a query at a position sees; never before that of an earlier query.
  static int first_key(int position) {
    int first = 0;
    if constexpr (S::window > 0) first = std::max(first, position - S::window + 1);
    if constexpr (S::chunk > 0) first = std::max(first, position - position % S::chunk);
    return first;
  }

  // The tile of KV head 0 that begins at a sequence's token.
  Tile tile(int seq, int token) const {
    const int last = step_.query_start[seq + 1];
    Tile t{seq, token, std::min(kTileTokens, last - token), step_.context_len[seq] - last + token, 0, 0, 0};
    t.first_part = t.begin() / kPartition;
    t.last_part = (t.end() - 1) / kPartition;
    return t;
  }
  // The one behind it; there is one.
  Tile next(Tile t) const {
    if (++t.kv_head < KH) return t;
    const int token = t.token + t.tokens;
    while (step_.query_start[t.seq + 1] == token) ++t.seq;
    return tile(t.seq, token);
  }

  // Calls f(tile of KV head 0).
  template <class F>
  void for_queries(F f) const {
    for (int s = 0; s < step_.num_seqs; ++s)
      for (int token = step_.query_start[s]; token < step_.query_start[s + 1]; token += kTileTokens) f(tile(s, token));
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
    const int key = std::min(part * kPartition, t.end());
    return part == t.first_part ? 0 : (key - t.begin()) * key_cost(t) + each * (part - t.first_part);
  }
  static int64_t cost(const Tile& t) { return unit_start(t, t.last_part + 1); }
  int64_t cost() const {
    int64_t total = 0;
    for_queries([&](const Tile& t) { total += cost(t) * KH; });
    return total;
  }

  void load_queries(const Tile& t) const {
    for (int i = 0; i < t.tokens; ++i) {
      const float* from = in_.q + (int64_t(t.token + i) * H + t.kv_head * kGroup) * D;
      for (int head = 0; head < kGroup; ++head) rows_->load_query(t.rows(), i * kGroup + head, from + head * D);
    }
  }

  // ---- one partition ----

  const KV* block(int32_t number) const {
    return reinterpret_cast<const KV*>(c_.rank->kv + number * in_.block_bytes + in_.offset);
  }

  // Sets the blocks of a unit, null for those before all that is seen and behind it; returns the first key that is read.
  int find_blocks(const Tile& t, int part, const KV** blocks) const {
    const int base = part * kPartition, begin = std::max(t.begin() - base, 0) / BS * BS, end = t.end() - base;
    const int32_t* table = step_.block_tables + int64_t(t.seq) * step_.block_table_stride + base / BS;
    for (int b = 0; b < kPartition / BS; ++b) blocks[b] = b * BS >= begin && b * BS < end ? block(table[b]) : nullptr;
    return begin;
  }

  Parts span(const Tile& t, int part, bool more) const {
    Parts s;
    s.end = std::min(t.end() - part * kPartition, kPartition);
    s.first_group = find_blocks(t, part, s.blocks) / kLanes;
    s.end_group = (s.end + kLanes - 1) / kLanes;
    s.next_head = 0;
    std::fill_n(s.next, kPartition / BS, nullptr);
    if (!more) return s;
    const bool same = part < t.last_part;
    const Tile behind = same ? t : next(t);
    s.next_head = behind.kv_head;
    find_blocks(behind, same ? part + 1 : behind.first_part, s.next);
    return s;
  }

  Seen<S> seen(const Tile& t, int part, int r) const {
    const int base = part * kPartition, position = t.position + r / kGroup;
    const float scale = in_.scale * (scales_.key(t.kv_head) * Layout::kRead);
    return {std::max(first_key(position) - base, 0),
            std::min(position - base + 1, kPartition),
            {scale, in_.softcap, S::slopes ? in_.slopes[head_of(t, r)] : 0, base - position}};
  }

  // `more`: the unit behind it is this thread's, too.
  void unit(const Tile& t, int part, float* to, bool more) const {
    const Parts s = span(t, part, more);
    if constexpr (Layout::kTiled) {
      rows_->unit(s, t.kv_head, t.rows(), [&](int r) { return seen(t, part, r); }, to);
    } else {
      const VectorRows<D, DV, Rows::kStride, Parts> vectors(s, t.kv_head);
      vectors.score(t.rows(), rows_->queries, rows_->scores);
      for (int r = 0; r < t.rows(); ++r) {
        const Seen<S> row = seen(t, part, r);
        softmax(s.first_group, s.end_group, row.first, row.last, row.score, rows_->scores + r * kPartition,
                to + r * Rows::kStride + Rows::kWidth);
      }
      vectors.weigh(t.rows(), rows_->scores, to);
    }
  }

  static int head_of(const Tile& t, int row) { return t.kv_head * kGroup + row % kGroup; }

  void finish(const Tile& t, float* running) const {
    for (int r = 0; r < t.rows(); ++r, running += Rows::kStride) {
      const int64_t token = t.token + r / kGroup, head = head_of(t, r);
      if constexpr (S::sinks) join_sink(running, in_.sinks[head]);
      Rows::finish(running, out_ + (token * H + head) * DV, scales_.value(t.kv_head) * Layout::kRead);
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
