// Where a recurrent state lies, and how its work is divided. Comes in: the step's slots. Goes out: `for_each_part`.
//
// A state f32[.., R, C] of one sequence is stored as [.., blocks of sixteen channels, R, 16], zeros behind the last
// channel: a block of channels is the part that one thread works on, from the first of the sequence's tokens to the last.
// So a token's result depends neither on threads nor on how a prompt was cut into steps.
#pragma once
#include "plugins/cpu/functions.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

constexpr int blocks_of(int channels) { return (channels + kLanes - 1) / kLanes; }

// `tokens` rows from `first` on; `fresh`: these are the first of the sequence, so that its state is zero whatever its
// slot holds.
struct Run {
  int first, tokens;
  bool fresh;
  float* state;
};

// Calls f(part, run) for this thread's share of parts x sequences. Sequences change fastest: a step may hold one long
// prompt and many single tokens, and every thread gets some of the prompt.
template <class F>
void for_each_part(const Ctx& c, int tid, int64_t parts, int64_t offset, int64_t slot_bytes, F f) {
  const llmc_step& step = *c.step;
  const Share mine = share(parts * step.num_seqs, tid, c.threads);
  for (int64_t i = mine.first; i < mine.last; ++i) {
    const int s = int(i % step.num_seqs), first = step.query_start[s], tokens = step.query_start[s + 1] - first;
    uint8_t* slot = c.rank->state + step.state_slots[s] * slot_bytes + offset;
    f(int(i / step.num_seqs), Run{first, tokens, step.context_len[s] == tokens, reinterpret_cast<float*>(slot)});
  }
}

// Up to n (1..16) floats at p, which need not have sixteen.
inline Lanes load_part(const float* p, int n) { return n == kLanes ? load(p) : load(p, n); }

// The state's lanes, all zero where the sequence is fresh.
inline void clear(float* state, int rows, const Run& run) {
  if (run.fresh) std::memset(state, 0, sizeof(float) * rows * kLanes);
}

}  // namespace llmc
