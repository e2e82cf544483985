// ssd_scan on the cpu target: sixteen channels of a head at a time, token after token; sums over the state run in order.
#pragma once
#include "plugins/cpu/recurrent.h"

namespace llmc {

// x [T, H*P], b and c_in [T, G*N], dt [T, H], a and d [H]; the state is [H][blocks of P][N][16].
template <int H, int P, int G, int N>
void ssd_scan(const Ctx& c, int tid, const float* x, const float* b, const float* c_in, const float* dt, int64_t x_stride,
              int64_t b_stride, int64_t c_stride, int64_t dt_stride, const float* a, const float* d, float* y,
              int64_t offset, int64_t slot_bytes) {
  constexpr int kBlocks = blocks_of(P);
  for_each_part(c, tid, H * kBlocks, offset, slot_bytes, [&](int part, const Run& run) {
    const int head = part / kBlocks, group = head / (H / G), p = part % kBlocks * kLanes;
    const int n = P - p < kLanes ? P - p : kLanes;
    float* state = run.state + int64_t(part) * N * kLanes;
    clear(state, N, run);
    for (int t = run.first; t < run.first + run.tokens; ++t) {
      const float step = dt[t * dt_stride + head];
      const float *bs = b + t * b_stride + group * N, *cs = c_in + t * c_stride + group * N;
      const Lanes decay = fn::exp(splat(step * a[head]));
      const Lanes in = load_part(x + t * x_stride + head * P + p, n), scaled = splat(step) * in;
      Lanes sum = splat(0);
      for (int i = 0; i < N; ++i) {
        const Lanes s = fma(splat(bs[i]), scaled, decay * load(state + i * kLanes));
        store(state + i * kLanes, s);
        sum = fma(splat(cs[i]), s, sum);
      }
      if (d) sum = fma(splat(d[head]), in, sum);
      fn::store(y + int64_t(t) * H * P + head * P + p, sum, n);
    }
  });
}

}  // namespace llmc
