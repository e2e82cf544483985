// gated_delta on the cpu target: sixteen value channels of a head at a time, token after token; sums over the keys' entries
// run in order.
#pragma once
#include <cmath>

#include "plugins/cpu/recurrent.h"

namespace llmc {

// to[i] = from[i] * scale, with Normalize also divided by from's length.
template <int K, bool Normalize>
void scaled_vector(const float* from, float scale, float eps, float* to) {
  if (Normalize) {
    Lanes squares = splat(0);
    for (int i = 0; i < K; i += kLanes) {
      const Lanes v = load_part(from + i, K - i < kLanes ? K - i : kLanes);
      squares = fma(v, v, squares);
    }
    scale = scale / std::sqrt(sum(squares) + eps);
  }
  for (int i = 0; i < K; ++i) to[i] = from[i] * scale;
}

// q and k [T, KH*K], v [T, H*V], g [T, H] or PerKey [T, H*K], beta [T, H]; the state is [H][blocks of V][K][16].
template <int H, int KH, int K, int V, bool Normalize, bool PerKey>
void gated_delta(const Ctx& c, int tid, const float* q, const float* k, const float* v, const float* g, const float* beta,
                 int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t g_stride, int64_t beta_stride, float scale,
                 float eps, float* y, int64_t offset, int64_t slot_bytes) {
  constexpr int kBlocks = blocks_of(V), kPadded = blocks_of(K) * kLanes;
  for_each_part(c, tid, H * kBlocks, offset, slot_bytes, [&](int part, const Run& run) {
    const int head = part / kBlocks, key_head = head / (H / KH), channel = part % kBlocks * kLanes;
    const int n = V - channel < kLanes ? V - channel : kLanes;
    float* state = run.state + int64_t(part) * K * kLanes;
    clear(state, K, run);
    float query[K], key[K], decay[kPadded];
    for (int t = run.first; t < run.first + run.tokens; ++t) {
      scaled_vector<K, Normalize>(q + t * q_stride + key_head * K, scale, eps, query);
      scaled_vector<K, Normalize>(k + t * k_stride + key_head * K, 1, eps, key);
      if (PerKey) {
        const float* rates = g + t * g_stride + head * K;
        for (int i = 0; i < K; i += kLanes) store(decay + i, fn::exp(load_part(rates + i, K - i < kLanes ? K - i : kLanes)));
      } else {
        store(decay, fn::exp(splat(g[t * g_stride + head])));
      }
      Lanes known = splat(0);
      for (int i = 0; i < K; ++i) {
        const Lanes s = splat(decay[PerKey ? i : 0]) * load(state + i * kLanes);
        store(state + i * kLanes, s);
        known = fma(splat(key[i]), s, known);
      }
      const Lanes change = splat(beta[t * beta_stride + head]) * (load_part(v + t * v_stride + head * V + channel, n) - known);
      Lanes out = splat(0);
      for (int i = 0; i < K; ++i) {
        const Lanes s = fma(splat(key[i]), change, load(state + i * kLanes));
        store(state + i * kLanes, s);
        out = fma(splat(query[i]), s, out);
      }
      fn::store(y + int64_t(t) * H * V + head * V + channel, out, n);
    }
  });
}

}  // namespace llmc
