// Attention of a step's queries over the paged cache, for one layer.
//
// Order, whatever the step, the threads or the ISA level: positions are cut into partitions of 256. In a partition a
// score accumulates over head_dim, the largest score is taken, exponentials are summed in 16 lanes and their tree, values
// accumulate over keys. Partitions join a running (largest, sum, values) one after the other, a sink last of all. A
// position that a query does not see has weight 0, which changes no bit, so tiles of queries can share what they read.
//
// Work: a tile is up to kTileRows (query, head) rows of one sequence and KV head; a unit is a tile's work on one
// partition. Threads own equal stretches of the units' total cost. A tile that several threads share is joined, after a
// barrier, by the owner of its first unit, from the partial results the others left in their scratch.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"
#include "plugins/paged_attention/scoring.h"

namespace llmc {

template <int H, int KH, int D, int DV, int BS, class KV, class S>
class PagedAttention {
  static_assert(BS % kLanes == 0 && kPartition % BS == 0, "block_size is 16, 32, 64, 128 or 256");
  static_assert(H % KH == 0, "heads share KV heads evenly");

 public:
  static constexpr int kGroup = H / KH;
  static constexpr int kTileTokens = kGroup >= kTileRows ? 1 : kTileRows / kGroup;
  static constexpr int kRows = kTileTokens * kGroup;
  static constexpr int kFull = DV / kLanes, kRest = DV % kLanes;
  static constexpr int kWidth = (DV + kLanes - 1) / kLanes * kLanes;  // floats of a row's values
  static constexpr int kStride = kWidth + kLanes;                    // the values, then largest score and sum

  // What a thread leaves for others: a partial result for each partition of one tile.
  static constexpr int64_t scratch_bytes(int max_seq_len) {
    return int64_t(sizeof(float)) * kRows * kStride * ((max_seq_len + kPartition - 1) / kPartition);
  }

  PagedAttention(const Ctx& c, int tid, const PagedInputs& in, float* out)
      : c_(c), step_(*c.step), tid_(tid), in_(in), out_(out) {}

  void run() {
    for_tiles([this](const Tile& t, int64_t) { total_ += cost(t) * KH; });
    bool shared = false;
    Tile pending{};
    int64_t pending_start = -1;
    alignas(64) float running[kRows * kStride];
    for_tiles([&](Tile t, int64_t start) {
      for (t.kv_head = 0; t.kv_head < KH; ++t.kv_head, start += cost(t)) {
        const int first_owner = owner(start);
        const bool is_shared = first_owner != owner(start + unit_start(t, t.last_part));
        shared |= is_shared;
        if (first_owner == tid_) {
          begin(running, t.rows());
          work(t, start, running);
          if (is_shared)
            pending = t, pending_start = start;
          else
            finish(t, running);
        } else if (is_shared) {
          work(t, start, nullptr);
        }
      }
    });
    if (!shared) return;
    c_.barrier(tid_);
    if (pending_start < 0) return;
    join_others(pending, pending_start, running);
    finish(pending, running);
  }

 private:
  // `tokens` queries of sequence `seq` from step token `token` on, at positions from `position` on.
  struct Tile {
    int seq, token, tokens, position, kv_head, first_part, last_part;
    int rows() const { return tokens * kGroup; }
    int end() const { return position + tokens; }  // one past the last key that any query sees
    int begin() const { return first_key(position); }  // the first key that any query sees
  };

  const Ctx& c_;
  const llmc_step& step_;
  int tid_;
  const PagedInputs& in_;
  float* out_;
  int64_t total_ = 0;

  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  // The first key that a query at a position sees; never before that of an earlier query.
  static int first_key(int position) {
    int first = 0;
    if constexpr (S::window > 0) first = std::max(first, position - S::window + 1);
    if constexpr (S::chunk > 0) first = std::max(first, position - position % S::chunk);
    return first;
  }

  // Calls f(tile of KV head 0, cost of everything before it).
  template <class F>
  void for_tiles(F f) const {
    int64_t start = 0;
    for (int s = 0; s < step_.num_seqs; ++s) {
      const int first = step_.query_start[s], last = step_.query_start[s + 1];
      const int ahead = step_.context_len[s] - last;  // position - token
      for (int token = first; token < last; token += kTileTokens) {
        Tile t{s, token, std::min(kTileTokens, last - token), ahead + token, 0, 0, 0};
        t.first_part = t.begin() / kPartition;
        t.last_part = (t.end() - 1) / kPartition;
        f(t, start);
        start += cost(t) * KH;
      }
    }
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
  int64_t stretch(int thread) const { return total_ * thread / c_.threads; }
  int owner(int64_t start) const {
    int thread = int(start * c_.threads / total_);
    while (stretch(thread + 1) <= start) ++thread;
    while (stretch(thread) > start) --thread;
    return thread;
  }

  // This thread's units of a tile: into `running`, or each into the scratch.
  void work(const Tile& t, int64_t start, float* running) {
    alignas(64) float queries[kRows * D], scores[kRows * kPartition], partial[kRows * kStride];
    bool loaded = false;
    float* next = thread_scratch(tid_);
    for (int part = t.first_part; part <= t.last_part; ++part) {
      if (owner(start + unit_start(t, part)) != tid_) continue;
      if (!loaded) load_queries(t, queries);
      loaded = true;
      float* to = running ? partial : next;
      unit(t, part, queries, scores, to);
      if (running)
        join<kWidth>(running, to, t.rows());
      else
        next += kRows * kStride;
    }
  }

  void join_others(const Tile& t, int64_t start, float* running) const {
    int last_owner = tid_;
    const float* next = nullptr;
    for (int part = t.first_part; part <= t.last_part; ++part) {
      const int from = owner(start + unit_start(t, part));
      if (from == tid_) continue;
      if (from != last_owner) next = thread_scratch(from);
      last_owner = from;
      join<kWidth>(running, next, t.rows());
      next += kRows * kStride;
    }
  }

  float* thread_scratch(int thread) const { return reinterpret_cast<float*>(c_.scratch(thread)); }

  void load_queries(const Tile& t, float* queries) const {
    for (int i = 0; i < t.tokens; ++i)
      std::copy_n(in_.q + (int64_t(t.token + i) * H + t.kv_head * kGroup) * D, kGroup * D, queries + i * kGroup * D);
  }

  // ---- one partition ----

  struct Span {
    const uint8_t* blocks[kPartition / BS];  // by block within the partition; only those from first_group on are set
    const uint8_t* next;                     // the block behind the partition, null where the tile needs none
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
    s.next = part < t.last_part ? block(table[kPartition / BS]) : nullptr;
    return s;
  }

  void unit(const Tile& t, int part, const float* queries, float* scores, float* to) const {
    const Span s = span(t, part);
    for_rows(t.rows(), [&](auto rows, int r) {
      score_rows<decltype(rows)::value>(s, t.kv_head, queries + r * D, scores + r * kPartition, r == 0);
    });
    for (int r = 0; r < t.rows(); ++r) {
      const int base = part * kPartition, position = t.position + r / kGroup;
      const int first = std::max(first_key(position) - base, 0), last = std::min(position - base + 1, kPartition);
      const Bias bias{S::slopes ? in_.slopes[head_of(t, r)] : 0, base - position};
      softmax(s, first, last, bias, scores + r * kPartition, to + r * kStride + kWidth);
    }
    for_rows(t.rows(), [&](auto rows, int r) {
      value_rows<decltype(rows)::value>(s, t.kv_head, scores + r * kPartition, to + r * kStride, r == 0);
    });
  }

  static const KV* keys_at(const Span& s, int kv_head, int key) {
    return reinterpret_cast<const KV*>(s.blocks[key / BS]) + int64_t(kv_head) * D * BS + key % BS;
  }
  static const KV* values_at(const Span& s, int kv_head, int key) {
    return reinterpret_cast<const KV*>(s.blocks[key / BS]) + int64_t(KH) * D * BS +
           (int64_t(kv_head) * BS + key % BS) * DV;
  }

  // What will be read after some 16 keys: more keys, then values, then the next partition's keys; null where nothing is
  // known. Blocks lie anywhere in memory, so the hardware cannot foresee them.
  static const KV* after_keys(const Span& s, int kv_head, int group) {
    if (group < s.end_group) return keys_at(s, kv_head, group * kLanes);
    const int key = (s.first_group + group - s.end_group) * kLanes;
    return key < s.end ? values_at(s, kv_head, key) : nullptr;
  }
  static const KV* after_values(const Span& s, int kv_head, int key) {
    if (key < s.end) return values_at(s, kv_head, key);
    return s.next && BS == kLanes ? reinterpret_cast<const KV*>(s.next) + int64_t(kv_head) * D * BS : nullptr;
  }
  static constexpr int kAhead = std::max(2 * kLanes, BS);
  // With more rows the arithmetic takes longer than the memory does.
  static constexpr bool fetches(int rows) { return rows <= 4; }
  static void fetch(const KV* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  // Calls f(an integral constant R, first row) with register tiles of R rows.
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
  // Vectors beside R rows that the registers have room for.
  static constexpr int columns(int rows) {
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
    const KV *keys[N], *later[N];
    for (int n = 0; n < N; ++n) {
      keys[n] = keys_at(s, kv_head, (group + n) * kLanes);
      const KV* after = first && fetches(R) ? after_keys(s, kv_head, group + n + N) : nullptr;
      later[n] = after ? after : keys[n];
    }
    Lanes acc[R][N];
    for (auto& row : acc)
      for (auto& a : row) a = splat(0);
    constexpr int step = D % 2 == 0 ? 2 : 1;
    for (int d = 0; d < D; d += step) {
      for (int n = 0; fetches(R) && n < N; ++n) {
        fetch(later[n] + d * BS);
        if (step * BS * sizeof(KV) > 64) fetch(later[n] + (d + step - 1) * BS);
      }
      for (int e = d; e < d + step; ++e)
        multiply<R, N>(acc, [&](int r) { return splat(q[r * D + e]); }, [&](int n) { return load(keys[n] + e * BS); });
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(scores + r * kPartition + (group + n) * kLanes, acc[r][n]);
  }

  // slope * (key position - query position); `distance`: that of the partition's first key.
  struct Bias {
    float slope;
    int distance;
  };
  static int head_of(const Tile& t, int row) { return t.kv_head * kGroup + row % kGroup; }

  // One row's scores become weights for the keys [first, last); state: largest score and sum, which is 0 for no key.
  void softmax(const Span& s, int first, int last, Bias bias, float* scores, float* state) const {
    const Lanes none = splat(kNone), from = splat(float(first)), to = splat(float(last));
    Lanes top = none, total = splat(0);
    for (int g = s.first_group; g < s.end_group; ++g) {
      const int key = g * kLanes;
      Lanes x = load(scores + key) * splat(in_.scale);
      if constexpr (S::softcap) x = tanh(x / splat(in_.softcap)) * splat(in_.softcap);
      if constexpr (S::slopes) x = fma(iota() + splat(float(key + bias.distance)), splat(bias.slope), x);
      if (key < first || key + kLanes > last) {
        const Lanes index = iota() + splat(float(key));
        x = select((index >= from) & (index < to), x, none);
      }
      store(scores + key, x);
      top = max(top, x);
    }
    const bool empty = first >= last;
    const float most = empty ? 0 : largest(top);
    for (int g = s.first_group; g < s.end_group; ++g) {
      const Lanes weight = exp(load(scores + g * kLanes) - splat(most));
      store(scores + g * kLanes, weight);
      total = total + weight;
    }
    state[0] = empty ? kNone : most;
    state[1] = sum(total);
  }

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
    Lanes acc[R][N];
    for (auto& row : acc)
      for (auto& a : row) a = splat(0);
    for (int first = s.first_group * kLanes; first < s.end; first += BS) {
      const KV* values = values_at(s, kv_head, first) + column;
      const KV* after = first_rows && fetches(R) ? after_values(s, kv_head, first + kAhead) : nullptr;
      const KV* later = after ? after + column : values;
      const int count = std::min(BS, s.end - first);
      const float* w = weights + first;
      for (int i = 0; i < count; ++i, values += DV, later += DV, ++w) {
        for (int j = 0; fetches(R) && j < N * kLanes; j += 64 / int(sizeof(KV))) fetch(later + j);
        multiply<R, N>(acc, [&](int r) { return splat(w[r * kPartition]); }, [&](int n) {
          return FILLED == kLanes ? load(values + n * kLanes) : load(values + n * kLanes, FILLED);
        });
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(to + r * kStride + column + n * kLanes, acc[r][n]);
  }

  static void begin(float* running, int rows) {
    std::fill_n(running, rows * kStride, 0.0f);
    for (int r = 0; r < rows; ++r) running[r * kStride + kWidth] = kNone;
  }

  void finish(const Tile& t, float* running) const {
    for (int r = 0; r < t.rows(); ++r, running += kStride) {
      const int64_t token = t.token + r / kGroup, head = head_of(t, r);
      if constexpr (S::sinks) join_sink(running, in_.sinks[head]);
      float* to = out_ + (token * H + head) * DV;
      // + 0: a zero is +0 whether or not positions of weight 0 were added.
      for (int i = 0; i < DV; ++i) to[i] = running[i] / running[kWidth + 1] + 0.0f;
    }
  }

  // One more score, whose value is 0.
  static void join_sink(float* running, float sink) {
    float partial[kStride] = {};
    partial[kWidth] = sink, partial[kWidth + 1] = 1;
    join<kWidth>(running, partial, 1);
  }
};

template <int H, int KH, int D, int DV, int BS, class KV, class S>
void paged_attention(const Ctx& c, int tid, const PagedInputs& in, float* out) {
  PagedAttention<H, KH, D, DV, BS, KV, S>(c, tid, in, out).run();
}

}  // namespace llmc
