// What attention over the paged cache is given, and which of a model's features are compiled into it.
#pragma once
#include <cstdint>

#include "plugins/cpu/lanes.h"

namespace llmc {

// What is compiled into the kernel; what a model has not costs nothing. `window`, `chunk`: 0 for none.
template <int WINDOW, int CHUNK, bool SOFTCAP, bool SLOPES, bool SINKS>
struct Scoring {
  static constexpr int window = WINDOW, chunk = CHUNK;
  static constexpr bool softcap = SOFTCAP, slopes = SLOPES, sinks = SINKS;
};

// q [T, H, D] -> out [T, H * DV]. `slopes`, `sinks`: one number a query head, or null. `offset`: of this layer within a
// block of `block_bytes`.
struct PagedInputs {
  const float *q, *slopes, *sinks;
  float scale, softcap;
  int64_t offset, block_bytes;
};

// What a product of query and key scores; `distance`: from the query's position to that of the partition's first key.
template <class S>
struct Score {
  static constexpr bool kLinear = !S::softcap && !S::slopes;  // a product times `factor`
  float factor, softcap, slope;
  int distance;
  Lanes operator()(Lanes product, int key) const {
    Lanes x = product * splat(factor);
    if constexpr (S::softcap) x = tanh(x / splat(softcap)) * splat(softcap);
    if constexpr (S::slopes) x = fma(iota() + splat(float(key + distance)), splat(slope), x);
    return x;
  }
};

// The keys [first, last) of a partition that a row sees, and its scores.
template <class S>
struct Seen {
  int first, last;
  Score<S> score;
};

}  // namespace llmc
