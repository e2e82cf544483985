// The threads of a rank: the caller and `threads - 1` workers that run every step together. Linux futexes.
//
//   Pool pool(threads);
//   pool.run([](void* what, int tid) { ...; }, what);   // the caller is thread 0; returns when all have returned
//   pool.barrier(tid);                    // inside: all threads meet
//   while ((i = pool.take(n, tid)) >= 0)  // inside, once between two barriers: n units of work, each done by one thread
//
// Who waits spins for a moment, then sleeps (patience.h): an idle server burns no CPU, and a busy machine's other
// processes get theirs. Workers are not pinned: a pinned worker waits for its CPU when another process has it, and all
// the others wait for the worker.
#pragma once
#include "plugins/cpu/patience.h"

#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <memory>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace llmc {

// A thread's share of n things: first..last, contiguous, whatever the number of threads.
struct Share {
  int64_t first, last;
};
inline Share share(int64_t n, int tid, int threads) { return {n * tid / threads, n * (tid + 1) / threads}; }

// A word that threads wait for to change. Sleepers are counted, so that nobody pays for a wake-up that none needs.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void advance() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) call(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  // Until value() is no longer `old`.
  void wait(uint32_t old) {
    if (patience_.spin([&] { return value() != old; })) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == old) call(FUTEX_WAIT_PRIVATE, old);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
  alignas(64) Patience patience_;  // apart from the word that is waited for

  void call(int op, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), op, value, nullptr, nullptr, 0);
  }
};

class Pool {
 public:
  using Work = void (*)(void*, int);

  explicit Pool(int threads) : threads_(threads), taken_(new Taken[threads]) {
    try {
      for (int tid = 1; tid < threads; ++tid) workers_.emplace_back([this, tid] { serve(tid); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  void run(Work work, void* what) {
    work_ = work;
    what_ = what;
    if (threads_ > 1) start_.advance();
    work(what, 0);
    barrier(0);
  }

  // A unit of n that nobody has taken since the last barrier, or -1. A thread takes its own share from the front, so that it
  // reads memory in order; who has done his helps from the back: a thread that lost its processor for a while, or has a
  // slower one, does not hold up the others.
  int64_t take(int64_t n, int tid) {
    for (int i = 0; i < threads_; ++i) {
      const int whose = (tid + i) % threads_;
      const Share all = share(n, whose, threads_);
      std::atomic<uint64_t>& word = taken_[whose].word;
      uint64_t taken = word.load(std::memory_order_relaxed);
      for (;;) {
        const int64_t front = taken & UINT32_MAX, back = taken >> 32;
        if (front + back >= all.last - all.first) break;
        if (word.compare_exchange_weak(taken, taken + (i ? kBack : 1), std::memory_order_relaxed))
          return i ? all.last - 1 - back : all.first + front;
      }
    }
    return -1;
  }

  void barrier(int) {
    if (threads_ == 1) return forget();
    const uint32_t phase = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads_)) {
      arrived_.store(0, std::memory_order_relaxed);
      forget();
      phase_.advance();
    } else {
      phase_.wait(phase);
    }
  }

 private:
  // Units taken of a thread's share: from its front in the low half, from its back in the high one.
  struct alignas(64) Taken {
    std::atomic<uint64_t> word{0};
  };
  static constexpr uint64_t kBack = uint64_t(1) << 32;

  const int threads_;
  const std::unique_ptr<Taken[]> taken_;
  Work work_ = nullptr;
  void* what_ = nullptr;
  std::atomic<bool> stopping_{false};
  Signal start_, phase_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  std::vector<std::thread> workers_;

  // A word that nobody has touched is only looked at: its line stays in the caches of all.
  void forget() {
    for (int i = 0; i < threads_; ++i)
      if (taken_[i].word.load(std::memory_order_relaxed)) taken_[i].word.store(0, std::memory_order_relaxed);
  }

  void serve(int tid) {
    uint32_t seen = 0;
    for (;;) {
      start_.wait(seen);
      ++seen;  // run() returns only when every worker has met it, so none can be missed
      if (stopping_.load(std::memory_order_acquire)) return;
      work_(what_, tid);
      barrier(tid);
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    start_.advance();
    for (auto& worker : workers_) worker.join();
  }
};

}  // namespace llmc
