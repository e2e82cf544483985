// causal_conv on the cpu target: sixteen channels of a sequence at a time, its last inputs in registers.
#pragma once
#include "plugins/cpu/recurrent.h"

namespace llmc {

// y[t, c] = bias[c] + w[c, 0] x[t - K + 1, c] + .. + w[c, K - 1] x[t, c], in this order; w is [C, K].
template <int C, int K, bool Silu>
void causal_conv(const Ctx& c, int tid, const float* x, int64_t x_stride, const float* w, const float* bias, float* y,
                 int64_t offset, int64_t slot_bytes) {
  for_each_part(c, tid, blocks_of(C), offset, slot_bytes, [&](int block, const Run& run) {
    const int channel = block * kLanes, n = C - channel < kLanes ? C - channel : kLanes;
    float* state = run.state + int64_t(block) * (K - 1) * kLanes;
    clear(state, K - 1, run);
    Lanes filter[K], window[K];
    for (int k = 0; k < K; ++k) {
      float taps[kLanes] = {};
      for (int i = 0; i < n; ++i) taps[i] = w[int64_t(channel + i) * K + k];
      filter[k] = load(taps);
    }
    for (int k = 0; k < K - 1; ++k) window[k] = load(state + k * kLanes);
    const Lanes start = bias ? load_part(bias + channel, n) : splat(0);
    for (int t = run.first; t < run.first + run.tokens; ++t) {
      window[K - 1] = load_part(x + t * x_stride + channel, n);
      Lanes sum = start;
      for (int k = 0; k < K; ++k) sum = fma(filter[k], window[k], sum);
      for (int k = 0; k < K - 1; ++k) window[k] = window[k + 1];
      fn::store(y + int64_t(t) * C + channel, Silu ? fn::silu(sum) : sum, n);
    }
    for (int k = 0; k < K - 1; ++k) store(state + k * kLanes, window[k]);
  });
}

}  // namespace llmc
