// Attention by partitions of positions: how its work is divided among threads, how scores become weights, how partial
// results join. Comes in: a kernel's tiles and units. Goes out: `PartitionedAttention`, `Partial`, `softmax`, `for_rows`.
//
// Order, whatever the step, the threads or the ISA level (but for paged_attention/amx.h): positions are cut into partitions
// of 256. In a partition a score accumulates over columns, the largest score is taken, exponentials are summed in 16 lanes
// and their tree, values accumulate over keys. Partitions join a running (largest, sum, values) one after the other. A
// position that a query does not see has weight 0, which changes no bit, so tiles of queries can share what they read.
//
// Work: a tile is a few (query, head) rows of one sequence; a unit is a tile's work on one partition. Threads own equal
// stretches of the units' total cost. A tile that several threads share is joined, after a barrier, by the owner of its
// first unit, from the partial results that the others left in their scratch.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

constexpr int kPartition = 256;
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the score of a key that is not seen

// Rows of partial results: VALUES weighted sums, up to whole vectors, then the largest score and the sum of weights.
template <int VALUES>
struct Partial {
  static constexpr int kWidth = (VALUES + kLanes - 1) / kLanes * kLanes;
  static constexpr int kStride = kWidth + kLanes;

  static void begin(float* running, int rows) {
    std::fill_n(running, rows * kStride, 0.0f);
    for (int r = 0; r < rows; ++r) running[r * kStride + kWidth] = kNone;
  }

  // In groups of rows: a vector holds the factors of as many.
  static void join(float* running, const float* partial, int rows) {
    for (int top = 0; top < rows; top += kLanes, running += kLanes * kStride, partial += kLanes * kStride)
      join_group(running, partial, std::min(rows - top, kLanes));
  }

  // One row's means times `scale`. + 0: a zero is +0 whether or not positions of weight 0 were added.
  static void finish(const float* running, float* to, float scale = 1) {
    for (int i = 0; i < VALUES; ++i) to[i] = running[i] / running[kWidth + 1] * scale + 0.0f;
  }

 private:
  static void join_group(float* running, const float* partial, int rows) {
    float old[kLanes] = {}, fresh[kLanes] = {}, now[kLanes];
    for (int r = 0; r < rows; ++r) {
      const float before = running[r * kStride + kWidth], most = partial[r * kStride + kWidth];
      now[r] = before > most ? before : most;
      old[r] = before - now[r], fresh[r] = most - now[r];
    }
    store(old, exp(load(old)));
    store(fresh, exp(load(fresh)));
    for (int r = 0; r < rows; ++r, running += kStride, partial += kStride) {
      const float total = partial[kWidth + 1];
      if (total == 0) continue;
      for (int i = 0; i < kWidth; i += kLanes)
        store(running + i, fma(load(running + i), splat(old[r]), load(partial + i) * splat(fresh[r])));
      running[kWidth] = now[r];
      running[kWidth + 1] = running[kWidth + 1] * old[r] + total * fresh[r];
    }
  }
};

// One row's products become weights for the keys [first, last) of the groups of 16 from first_group to end_group;
// `score(products, first key of the group)` is what a product scores. state: largest score and sum, 0 for no key.
template <class F>
inline void softmax(int first_group, int end_group, int first, int last, F score, float* scores, float* state) {
  const Lanes none = splat(kNone), from = splat(float(first)), to = splat(float(last));
  Lanes top = none, total = splat(0);
  for (int g = first_group; g < end_group; ++g) {
    const int key = g * kLanes;
    Lanes x = score(load(scores + key), key);
    if (key < first || key + kLanes > last) {
      const Lanes index = iota() + splat(float(key));
      x = select((index >= from) & (index < to), x, none);
    }
    store(scores + key, x);
    top = max(top, x);
  }
  const bool empty = first >= last;
  const float most = empty ? 0 : largest(top);
  for (int g = first_group; g < end_group; ++g) {
    const Lanes weight = exp(load(scores + g * kLanes) - splat(most));
    store(scores + g * kLanes, weight);
    total = total + weight;
  }
  state[0] = empty ? kNone : most;
  state[1] = sum(total);
}

// Calls f(an integral constant N, first row) with register tiles of N rows.
template <class F>
inline void for_rows(int rows, F f) {
  constexpr int most = LLMC_WIDE ? 8 : 6;
  int r = 0;
  for (; rows - r >= most; r += most) f(std::integral_constant<int, most>(), r);
  for (; rows - r >= 4; r += 4) f(std::integral_constant<int, 4>(), r);
  if (rows - r == 3) f(std::integral_constant<int, 3>(), r);
  if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
}

// The tiles of a step on all threads. KERNEL derives from this and gives
//   Tile: rows(), first_part, last_part      Rows: its Partial      kRows: the most rows of a tile
//   kOwn: floats at the start of each thread's scratch that are the kernel's own
//   cost(): that of all tiles                unit_start(tile, part): that of the tile's units before `part`
//   for_tiles(f): calls f(tile, cost of everything before it) for every tile, in one order
//   load_queries(tile) comes before the tile's first unit on a thread; unit(tile, part, to) leaves a partial result;
//   finish(tile, running) turns what was joined into output.
template <class KERNEL>
class PartitionedAttention {
 public:
  // For each thread: the kernel's own, then a partial result for each partition of one tile, for the tile's owner.
  static constexpr int64_t scratch_bytes(int max_seq_len) {
    const int64_t parts = (max_seq_len + kPartition - 1) / kPartition;
    return int64_t(sizeof(float)) * (KERNEL::kOwn + parts * KERNEL::kRows * KERNEL::Rows::kStride);
  }

 protected:
  PartitionedAttention(const Ctx& c, int tid) : c_(c), step_(*c.step), tid_(tid) {}

  const Ctx& c_;
  const llmc_step& step_;
  const int tid_;

  // `running`, `partial`: each has room for the rows of a tile.
  void run_tiles(float* running, float* partial) {
    KERNEL& kernel = static_cast<KERNEL&>(*this);
    using Tile = typename KERNEL::Tile;
    total_ = kernel.cost();
    bool shared = false;
    Tile pending{};
    int64_t pending_start = -1;
    kernel.for_tiles([&](const Tile& t, int64_t start) {
      const int first_owner = owner(start);
      const bool is_shared = first_owner != owner(start + KERNEL::unit_start(t, t.last_part));
      shared |= is_shared;
      if (first_owner == tid_) {
        KERNEL::Rows::begin(running, t.rows());
        work(kernel, t, start, running, partial);
        if (is_shared)
          pending = t, pending_start = start;
        else
          kernel.finish(t, running);
      } else if (is_shared) {
        work(kernel, t, start, nullptr, nullptr);
      }
    });
    if (!shared) return;
    c_.barrier(tid_);
    if (pending_start < 0) return;
    join_others(pending, pending_start, running);
    kernel.finish(pending, running);
  }

 private:
  int64_t total_ = 0;

  int64_t stretch(int thread) const { return total_ * thread / c_.threads; }
  int owner(int64_t start) const {
    int thread = int(start * c_.threads / total_);
    while (stretch(thread + 1) <= start) ++thread;
    while (stretch(thread) > start) --thread;
    return thread;
  }
  float* left_by(int thread) const { return reinterpret_cast<float*>(c_.scratch(thread)) + KERNEL::kOwn; }
  static constexpr int64_t left_floats() { return int64_t(KERNEL::kRows) * KERNEL::Rows::kStride; }

  // This thread's units of a tile: joined to `running`, or, where that is null, each left for the tile's owner.
  template <class Tile>
  void work(KERNEL& kernel, const Tile& t, int64_t start, float* running, float* partial) const {
    bool loaded = false;
    float* next = left_by(tid_);
    for (int part = t.first_part; part <= t.last_part; ++part) {
      if (owner(start + KERNEL::unit_start(t, part)) != tid_) continue;
      if (!loaded) kernel.load_queries(t);
      loaded = true;
      const int64_t behind = start + KERNEL::unit_start(t, part + 1);
      kernel.unit(t, part, running ? partial : next, behind < total_ && owner(behind) == tid_);
      if (running)
        KERNEL::Rows::join(running, partial, t.rows());
      else
        next += left_floats();
    }
  }

  template <class Tile>
  void join_others(const Tile& t, int64_t start, float* running) const {
    int last_owner = tid_;
    const float* next = nullptr;
    for (int part = t.first_part; part <= t.last_part; ++part) {
      const int from = owner(start + KERNEL::unit_start(t, part));
      if (from == tid_) continue;
      if (from != last_owner) next = left_by(from);
      last_owner = from;
      KERNEL::Rows::join(running, next, t.rows());
      next += left_floats();
    }
  }
};

}  // namespace llmc
