// What attention over the paged cache is given, and which of a model's features are compiled into it.
//
// Cache: a block holds, for this layer at `offset`, K as [kv_head][head_dim][block_size] (keys are lanes), then V as
// [kv_head][block_size][v_dim]. block_size is 16, 32, 64, 128 or 256.
#pragma once
#include <cstdint>

namespace llmc {

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

}  // namespace llmc
