// How long a waiter spins before it sleeps. It learns from how its waits end, since one number fits no two machines.
//
// On processors of its own the one waited for is a moment away, and sleeping would cost more than the work between two
// launches. Where others want the processors, the one waited for may need this very one: spinning keeps it from it, and
// sched_yield is worse, for it gives away the rest of a time slice at every launch (measured with one other busy process
// on two processors: steps ten times as long). A sleeper is woken on whichever processor is free, at once.
#pragma once
#include <algorithm>

namespace llmc {

class Patience {
 public:
  // True as soon as ready() is, false when it is time to sleep. Threads may share one: it only guesses.
  template <class Ready>
  bool spin(Ready ready) {
    const int spins = __atomic_load_n(&spins_, __ATOMIC_RELAXED);
    for (int i = 0; i < spins; ++i) {
      if (ready()) {
        if (spins < kMost) learn(std::min(spins + kMore, kMost));
        return true;
      }
      __builtin_ia32_pause();
    }
    learn(std::max(spins - spins / 4, kLeast));
    return false;
  }

 private:
  static constexpr int kLeast = 100, kMost = 2000, kMore = 20;
  int spins_ = kMost;

  void learn(int spins) { __atomic_store_n(&spins_, spins, __ATOMIC_RELAXED); }
};

}  // namespace llmc
