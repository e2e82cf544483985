// selective_scan on the cpu target: sixteen channels at a time, token after token; sums over the state run in order.
#pragma once
#include "plugins/cpu/recurrent.h"

namespace llmc {

// x and dt [T, C], b and c_in [T, N], a [C, N], d [C]; the state is [blocks of C][N][16].
template <int C, int N>
void selective_scan(const Ctx& c, int tid, const float* x, const float* b, const float* c_in, const float* dt,
                    int64_t x_stride, int64_t b_stride, int64_t c_stride, int64_t dt_stride, const float* a, const float* d,
                    float* y, int64_t offset, int64_t slot_bytes) {
  for_each_part(c, tid, blocks_of(C), offset, slot_bytes, [&](int block, const Run& run) {
    const int channel = block * kLanes, n = C - channel < kLanes ? C - channel : kLanes;
    float* state = run.state + int64_t(block) * N * kLanes;
    clear(state, N, run);
    float rates[N * kLanes] = {};  // a, as the lanes need it
    for (int i = 0; i < n; ++i)
      for (int k = 0; k < N; ++k) rates[k * kLanes + i] = a[int64_t(channel + i) * N + k];
    const Lanes skip = d ? load_part(d + channel, n) : splat(0);
    for (int t = run.first; t < run.first + run.tokens; ++t) {
      const float *bs = b + t * b_stride, *cs = c_in + t * c_stride;
      const Lanes step = load_part(dt + t * dt_stride + channel, n), in = load_part(x + t * x_stride + channel, n);
      const Lanes scaled = step * in;
      Lanes sum = splat(0);
      for (int k = 0; k < N; ++k) {
        const Lanes decay = fn::exp(step * load(rates + k * kLanes));
        const Lanes s = fma(splat(bs[k]), scaled, decay * load(state + k * kLanes));
        store(state + k * kLanes, s);
        sum = fma(splat(cs[k]), s, sum);
      }
      fn::store(y + int64_t(t) * C + channel, fma(skip, in, sum), n);
    }
  });
}

}  // namespace llmc
