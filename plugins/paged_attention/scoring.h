// What attention over the paged cache is given, which of a model's features are compiled into it, how results join.
//
// Cache: a block holds, for this layer at `offset`, K as [kv_head][head_dim][block_size] (keys are lanes), then V as
// [kv_head][block_size][v_dim]. block_size is 16, 32, 64, 128 or 256.
#pragma once
#include <cstdint>

#include "plugins/cpu/lanes.h"

namespace llmc {

constexpr int kPartition = 256;
constexpr int kTileRows = 24;

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

// Joins partial results to running ones: a row is WIDTH values, the largest score, the sum, and room up to a vector.
template <int WIDTH>
inline void join(float* running, const float* partial, int rows) {
  constexpr int stride = WIDTH + kLanes;
  for (int r = 0; r < rows; ++r, running += stride, partial += stride) {
    const float most = partial[WIDTH], total = partial[WIDTH + 1];
    if (total == 0) continue;
    const float before = running[WIDTH], now = before > most ? before : most;
    float factors[kLanes];
    const float shifts[kLanes] = {before - now, most - now};
    store(factors, exp(load(shifts)));
    const Lanes old = splat(factors[0]), fresh = splat(factors[1]);
    for (int i = 0; i < WIDTH; i += kLanes)
      store(running + i, fma(load(running + i), old, load(partial + i) * fresh));
    running[WIDTH] = now;
    running[WIDTH + 1] = running[WIDTH + 1] * factors[0] + total * factors[1];
  }
}

}  // namespace llmc
