// What a kernel is given: the rank, the step, its threads. Comes in: the C ABI. Goes out: `Ctx`.
#pragma once
#include "plugins/cpu/abi.h"
#include "plugins/cpu/pool.h"
#include "plugins/cpu/rank_barrier.h"

#include <ctime>

namespace llmc {

// Nanoseconds of a clock that only goes forward.
inline int64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Where each thread's part of the scratch starts: whole pages, so that threads share no cache line and no prefetch.
constexpr int64_t kScratchAlign = 4096;

// One for each engine; `step` changes. All threads of the rank call every kernel with the same arguments but `tid`.
struct Ctx {
  const llmc_rank* rank = nullptr;
  const llmc_step* step = nullptr;
  int threads = 1;
  Pool* pool = nullptr;
  RankComm* comm = nullptr;             // where tp > 1
  uint8_t* scratch_memory = nullptr;    // scratch_bytes(...) bytes, aligned to a page
  int64_t shared_scratch = 0;           // the largest CpuCall.scratch.shared, rounded up to whole pages
  int64_t thread_scratch = 0;           // the largest CpuCall.scratch.per_thread, likewise

  // All threads of the rank have come here; what they wrote before is visible after.
  void barrier(int tid) const { pool->barrier(tid); }
  // The next of n units for this thread, or -1: once between two barriers, with one n (pool.h).
  int64_t take(int64_t n, int tid) const { return pool->take(n, tid); }
  // The same between two launches of a step; number `launch` comes next. A step that nobody times pays one branch.
  void next(int tid, int launch) const {
    barrier(tid);
    if (tid == 0 && step->stamps) step->stamps[launch] = clock_ns();
  }
  uint8_t* scratch() const { return scratch_memory; }
  uint8_t* scratch(int tid) const { return scratch_memory + shared_scratch + tid * thread_scratch; }
};

inline int64_t whole_pages(int64_t bytes) { return (bytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign; }

// What to allocate for `Ctx::scratch_memory`; sizes are whole pages.
inline int64_t scratch_bytes(int64_t shared, int64_t per_thread, int threads) { return shared + per_thread * threads; }

}  // namespace llmc
