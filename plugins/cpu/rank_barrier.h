// The meeting point of a tp group: ranks are processes that share `llmc_rank.comm`. Linux futexes.
//
// Memory: one CommHeader (kCommHeaderBytes), then two halves of `tp` slots, one slot a rank; a slot holds the partial
// of one all-reduce. Halves alternate, so that one barrier an all-reduce is enough: whoever overwrites a slot has passed
// the barrier after the one at which the slot was last read.
//
//   RankComm comm(rank.comm, rank.rank, rank.tp, comm_slot_bytes);   // once, in llmc_create
//   float* mine = comm.slot(comm.rank);                              // where this rank's partial goes
//   comm.wait();                                                     // one thread of each rank calls this
//   comm.failed()                                    // sticky: llmc_run returns 2; later waits return at once
//
// A wait ends when all ranks have arrived, when anyone called comm_abort, or when nobody moved for the deadline. That is
// counted in naps: time also passes while this very process is stopped, or its machine stands still.
#pragma once
#include "plugins/cpu/patience.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace llmc {

constexpr int kMaxRanks = 16;
constexpr int64_t kCommHeaderBytes = 4096;
constexpr uint32_t kDefaultDeadlineMs = 10000;
constexpr long kNapMs = 50;

// Zeroed before the first rank starts. The counters count barriers and wrap round; only their differences matter.
struct CommHeader {
  std::atomic<uint32_t> aborted;      // not 0: nobody waits any more
  std::atomic<uint32_t> deadline_ms;  // 0: kDefaultDeadlineMs. Written by whoever owns the memory, before a step
  struct alignas(64) Arrival {
    std::atomic<uint32_t> count;     // barriers that this rank has reached; also the word that others sleep on
    std::atomic<uint32_t> sleepers;  // how many ranks sleep on it
  } arrival[kMaxRanks];
};
static_assert(sizeof(CommHeader) <= kCommHeaderBytes, "the header has outgrown its place");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics must work across processes");

inline long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

// Wakes and fails every rank that waits or will wait.
inline void comm_abort(uint8_t* memory) {
  auto* header = reinterpret_cast<CommHeader*>(memory);
  header->aborted.store(1, std::memory_order_seq_cst);
  for (auto& arrival : header->arrival) futex(&arrival.count, FUTEX_WAKE, INT32_MAX, nullptr);
}

class RankComm {
 public:
  int rank = 0, tp = 1;

  RankComm() = default;
  // slot_bytes: the largest partial, max_tokens * cols * 4, rounded up to 64. The memory has kCommHeaderBytes +
  // 2 * tp * slot_bytes; plugins/all_reduce/cpu.py has both formulas.
  RankComm(uint8_t* memory, int own_rank, int num_ranks, int64_t slot_bytes)
      : rank(own_rank), tp(num_ranks), memory_(memory), slot_bytes_(slot_bytes) {
    if (tp > 1) epoch_ = header()->arrival[rank].count.load(std::memory_order_relaxed);
  }

  bool failed() const { return failed_; }

  // The slot of rank r in the current half. The half changes inside wait(): take the pointers before it.
  float* slot(int r) const {
    const int64_t half = epoch_ & 1;
    return reinterpret_cast<float*>(memory_ + kCommHeaderBytes + (half * tp + r) * slot_bytes_);
  }

  // True when all ranks have arrived. What they wrote before is then visible.
  bool wait() {
    if (tp == 1) return true;
    if (failed_) return false;
    ++epoch_;
    auto& own = header()->arrival[rank];
    own.count.store(epoch_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) futex(&own.count, FUTEX_WAKE, INT32_MAX, nullptr);
    for (int r = 0; r < tp && !failed_; ++r)
      if (r != rank && !wait_for(r)) failed_ = true;
    return !failed_;
  }

 private:
  uint8_t* memory_ = nullptr;
  int64_t slot_bytes_ = 0;
  uint32_t epoch_ = 0;
  bool failed_ = false;
  Patience patience_;

  CommHeader* header() const { return reinterpret_cast<CommHeader*>(memory_); }
  bool arrived(int r) const {
    return int32_t(header()->arrival[r].count.load(std::memory_order_acquire) - epoch_) >= 0;
  }
  bool aborted() const { return header()->aborted.load(std::memory_order_relaxed) != 0; }

  bool wait_for(int r) { return patience_.spin([&] { return arrived(r); }) || sleep_for(r); }

  bool sleep_for(int r) {
    const uint32_t limit = header()->deadline_ms.load(std::memory_order_relaxed);
    int64_t naps = (limit ? limit : kDefaultDeadlineMs) / kNapMs + 1;
    auto& other = header()->arrival[r];
    const timespec nap{0, kNapMs * 1000 * 1000};
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool here = arrived(r);
    while (!here && !aborted() && naps > 0) {
      const uint32_t seen = other.count.load(std::memory_order_seq_cst);
      here = int32_t(seen - epoch_) >= 0;
      if (!here && futex(&other.count, FUTEX_WAIT, seen, &nap) && errno == ETIMEDOUT) --naps;
    }
    other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (!here) comm_abort(memory_);  // the group is lost: spare the others their own deadline
    return here;
  }
};

// Sums every rank's slot [rows * cols] in rank order into y [rows, cols], then adds bias[cols] where there is one. All
// threads of the rank call it once each has written its share of `comm.slot(comm.rank)`; `sync()` is the barrier of the
// rank's threads. The threads leave without a barrier, each having written its own share of y.
// After a failure y is meaningless and nobody waits; llmc_run returns 2 in the end.
template <class Sync>
void rank_all_reduce(RankComm& comm, int tid, int threads, Sync&& sync, float* y, int64_t rows, int64_t cols,
                     const float* bias = nullptr) {
  const float* slots[kMaxRanks];
  for (int r = 0; r < comm.tp; ++r) slots[r] = comm.slot(r);
  sync();
  if (tid == 0) comm.wait();
  sync();
  const int64_t lines = (rows * cols + 15) / 16;  // whole cache lines a thread
  const int64_t first = lines * tid / threads * 16;
  const int64_t end = lines * (tid + 1) / threads * 16;
  const int64_t last = end < rows * cols ? end : rows * cols;
  if (first >= last) return;
  for (int64_t i = first; i < last; ++i) y[i] = slots[0][i];
  for (int r = 1; r < comm.tp; ++r)
    for (int64_t i = first; i < last; ++i) y[i] += slots[r][i];
  if (!bias) return;
  for (int64_t i = first, c = first % cols; i < last; ++i, c = c + 1 == cols ? 0 : c + 1) y[i] += bias[c];
}

}  // namespace llmc
