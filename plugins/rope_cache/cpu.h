// Norm per head, rotary embedding and the write of keys and values into the paged cache, for one layer.
//
// The cache's layout is that of plugins/paged_attention/cpu.h: within a block, at `offset`, K as
// [kv_head][head_dim][block_size], then V as [kv_head][block_size][head_dim]. Token i of sequence s stands at position
// context_len[s] - (tokens of s in this step) + i. Every element has one order of operations: x * cos + turned(x) * sin
// without fusing, as Hugging Face computes it; squares are summed in 16 lanes and their tree.
#pragma once
#include <algorithm>
#include <cmath>

#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

enum class Rotary { kHalf, kInterleaved };

// Rows may be parts of wider ones: strides are in floats. What an instance does not use is null.
struct RopeInputs {
  const float *q, *k, *v, *cos, *sin;
  int64_t q_stride, k_stride, v_stride, cos_stride, sin_stride;
  const float *q_weight, *k_weight;
  float eps;
};

template <int H, int KH, int D, int R, Rotary STYLE, bool NORM, int BS, class KV>
class RopeCache {
 public:
  RopeCache(const Ctx& c, const RopeInputs& in, float* out, int64_t offset, int64_t block_bytes)
      : c_(c), step_(*c.step), in_(in), out_(out), offset_(offset), block_bytes_(block_bytes) {}

  // A thread owns a stretch of (token, head) pairs; behind the query heads each token has its KV heads.
  void run(int tid) {
    constexpr int heads = H + KH;
    const int64_t all = int64_t(step_.num_tokens) * heads;
    const int64_t first = all * tid / c_.threads, last = all * (tid + 1) / c_.threads;
    int sequence = 0;
    for (int64_t i = first; i < last; ++i) {
      const int token = int(i / heads), head = int(i % heads);
      if (head < H) {
        query(token, head);
      } else {
        while (step_.query_start[sequence + 1] <= token) ++sequence;
        key_value(sequence, token, head - H);
      }
    }
  }

 private:
  const Ctx& c_;
  const llmc_step& step_;
  const RopeInputs& in_;
  float* out_;
  int64_t offset_, block_bytes_;

  void query(int token, int head) const {
    transform(in_.q + token * in_.q_stride + head * D, token, in_.q_weight, out_ + (int64_t(token) * H + head) * D);
  }

  void key_value(int sequence, int token, int head) const {
    const int position = step_.context_len[sequence] - step_.query_start[sequence + 1] + token;
    const int32_t* table = step_.block_tables + int64_t(sequence) * step_.block_table_stride;
    auto* block = reinterpret_cast<KV*>(c_.rank->kv + table[position / BS] * block_bytes_ + offset_);
    const int slot = position % BS;
    float key[D];
    transform(in_.k + token * in_.k_stride + head * D, token, in_.k_weight, key);
    KV* keys = block + int64_t(head) * D * BS + slot;
    for (int d = 0; d < D; ++d) store_as(key[d], keys + d * BS);
    const float* value = in_.v + token * in_.v_stride + head * D;
    KV* values = block + int64_t(KH) * D * BS + (int64_t(head) * BS + slot) * D;
    for (int d = 0; d < D; ++d) store_as(value[d], values + d);
  }

  void transform(const float* from, int token, const float* weight, float* to) const {
    float x[D];
    std::copy_n(from, D, x);
    if constexpr (NORM) norm(x, weight);
    if constexpr (R > 0) {
      rotate(x, in_.cos + token * in_.cos_stride, in_.sin + token * in_.sin_stride, to);
      std::copy_n(x + R, D - R, to + R);
    } else {
      std::copy_n(x, D, to);
    }
  }

  void norm(float* x, const float* weight) const {
    float squares[kLanes] = {};
    for (int d = 0; d < D; ++d) squares[d % kLanes] += x[d] * x[d];
    const float mean = tree(squares, [](float a, float b) { return a + b; }) / float(D);
    const float scale = 1.0f / std::sqrt(mean + in_.eps);
    for (int d = 0; d < D; ++d) x[d] = x[d] * scale * weight[d];
  }

  static void rotate(const float* x, const float* cos, const float* sin, float* to) {
    if constexpr (STYLE == Rotary::kHalf) {
      for (int d = 0; d < R / 2; ++d) to[d] = x[d] * cos[d] + -x[d + R / 2] * sin[d];
      for (int d = R / 2; d < R; ++d) to[d] = x[d] * cos[d] + x[d - R / 2] * sin[d];
    } else {
      for (int d = 0; d < R; d += 2) {
        to[d] = x[d] * cos[d] + -x[d + 1] * sin[d];
        to[d + 1] = x[d + 1] * cos[d + 1] + x[d] * sin[d + 1];
      }
    }
  }
};

// Writes this step's keys and values and returns the transformed queries: out [T, H, D].
template <int H, int KH, int D, int R, Rotary STYLE, bool NORM, int BS, class KV>
void rope_cache(const Ctx& c, int tid, const float* q, const float* k, const float* v, const float* cos,
                const float* sin, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t cos_stride,
                int64_t sin_stride, const float* q_weight, const float* k_weight, float eps, float* out, int64_t offset,
                int64_t block_bytes) {
  const RopeInputs in{q, k, v, cos, sin, q_stride, k_stride, v_stride, cos_stride, sin_stride, q_weight, k_weight, eps};
  RopeCache<H, KH, D, R, STYLE, NORM, BS, KV>(c, in, out, offset, block_bytes).run(tid);
}

}  // namespace llmc
