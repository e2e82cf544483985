// Norm, rotary embedding and the write of keys and values into the paged cache, for one layer.
//
// The cache's layout is that of plugins/paged_attention/layout.h, within a block at `offset`. Token i of sequence s stands
// at position context_len[s] - (tokens of s in this step) + i. Every element has one order of operations: x * cos +
// turned(x) * sin without fusing, as Hugging Face computes it; squares are summed in 16 lanes and their tree; keys and values
// are divided by their head's scale, where there is one, before they are rounded to what the cache holds.
#pragma once
#include <algorithm>
#include <cmath>

#include "plugins/cpu/fp8.h"
#include "plugins/cpu/runtime.h"
#include "plugins/paged_attention/layout.h"

namespace llmc {

enum class Rotary { kHalf, kInterleaved };
enum class Norm { kNone, kRms, kLayer };
// Over each head with one weight for all, over each head with a weight of its own, over all heads at once.
enum class NormScope { kHead, kEach, kAll };

// How q and k are normed: LAST after the rotation, BIAS with a bias, MEANS with the tokens' mean squares given.
template <Norm KIND, NormScope SCOPE, bool BIAS, bool LAST, bool MEANS>
struct Norming {
  static constexpr bool first = KIND != Norm::kNone && !LAST, last = KIND != Norm::kNone && LAST;
  static constexpr bool layer = KIND == Norm::kLayer, bias = BIAS, means = MEANS;
  static constexpr bool all = KIND != Norm::kNone && SCOPE == NormScope::kAll, own = SCOPE != NormScope::kHead;
};

// Rows may be parts of wider ones: strides are in floats. What an instance does not use is null.
struct RopeInputs {
  const float *q, *k, *v, *cos, *sin;
  int64_t q_stride, k_stride, v_stride, cos_stride, sin_stride;
  const float *q_weight, *k_weight, *q_bias, *k_bias, *means;
  float eps;
};

template <int H, int KH, int D, int DV, int R, Rotary STYLE, class NORM, int BS, class KV, class SCALES>
class RopeCache {
  using Layout = BlockLayout<KH, D, DV, BS, KV>;

 public:
  RopeCache(const Ctx& c, const RopeInputs& in, float* out, int64_t offset, int64_t block_bytes, const SCALES& scales)
      : c_(c), step_(*c.step), in_(in), out_(out), offset_(offset), block_bytes_(block_bytes), scales_(scales) {}

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
  const SCALES& scales_;
  int q_token_ = -1, k_token_ = -1;  // whose mean squares are known
  float q_square_ = 0, k_square_ = 0;

  void query(int token, int head) {
    transform(in_.q + token * in_.q_stride + head * D, token, head, query_norm(token),
              out_ + (int64_t(token) * H + head) * D);
  }

  void key_value(int sequence, int token, int head) {
    const int position = step_.context_len[sequence] - step_.query_start[sequence + 1] + token;
    const int32_t* table = step_.block_tables + int64_t(sequence) * step_.block_table_stride;
    auto* block = reinterpret_cast<KV*>(c_.rank->kv + table[position / BS] * block_bytes_ + offset_);
    const int slot = position % BS;
    float key[D];
    transform(in_.k + token * in_.k_stride + head * D, token, head, key_norm(token), key);
    for (int d = 0; d < D; ++d) store_as(key[d] / scales_.key(head), block + Layout::key(head, slot, d));
    const float* value = in_.v + token * in_.v_stride + head * DV;
    for (int d = 0; d < DV; ++d) store_as(value[d] / scales_.value(head), block + Layout::value(head, slot, d));
  }

  // What a head of q or of k is normed with; `square`: the mean square over all heads, where that is what counts.
  struct Weights {
    const float *weight, *bias;
    float square;
  };

  Weights query_norm(int token) {
    if constexpr (NORM::all)
      if (token != q_token_) q_token_ = token, q_square_ = mean_square<H>(in_.q + token * in_.q_stride, token, 0);
    return {in_.q_weight, in_.q_bias, q_square_};
  }
  Weights key_norm(int token) {
    if constexpr (NORM::all)
      if (token != k_token_) k_token_ = token, k_square_ = mean_square<KH>(in_.k + token * in_.k_stride, token, 1);
    return {in_.k_weight, in_.k_bias, k_square_};
  }

  template <int HEADS>
  float mean_square(const float* x, int token, int which) const {
    if constexpr (NORM::means) return in_.means[2 * token + which];
    return sum_by_lane(HEADS * D, [x](int d) { return x[d] * x[d]; }) / float(HEADS * D);
  }

  void transform(const float* from, int token, int head, const Weights& w, float* to) const {
    float x[D];
    std::copy_n(from, D, x);
    if constexpr (NORM::first) norm(x, w, head);
    if constexpr (R > 0) {
      rotate(x, in_.cos + token * in_.cos_stride, in_.sin + token * in_.sin_stride, to);
      std::copy_n(x + R, D - R, to + R);
    } else {
      std::copy_n(x, D, to);
    }
    if constexpr (NORM::last) norm(to, w, head);
  }

  void norm(float* x, const Weights& w, int head) const {
    if constexpr (NORM::layer) {
      const float mean = sum_by_lane(D, [x](int d) { return x[d]; }) / float(D);
      for (int d = 0; d < D; ++d) x[d] = x[d] - mean;
    }
    const float square = NORM::all ? w.square : sum_by_lane(D, [x](int d) { return x[d] * x[d]; }) / float(D);
    const float scale = 1.0f / std::sqrt(square + in_.eps);
    const float* weight = w.weight + (NORM::own ? head * D : 0);
    for (int d = 0; d < D; ++d) x[d] = x[d] * scale * weight[d];
    if constexpr (NORM::bias) {
      const float* bias = w.bias + (NORM::own ? head * D : 0);
      for (int d = 0; d < D; ++d) x[d] = x[d] + bias[d];
    }
  }

  // In 16 lanes and their tree.
  template <class F>
  static float sum_by_lane(int count, F f) {
    float lanes[kLanes] = {};
    for (int d = 0; d < count; ++d) lanes[d % kLanes] += f(d);
    return tree(lanes, [](float a, float b) { return a + b; });
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
template <int H, int KH, int D, int DV, int R, Rotary STYLE, class NORM, int BS, class KV, class SCALES>
void rope_cache(const Ctx& c, int tid, const RopeInputs& in, float* out, int64_t offset, int64_t block_bytes,
                const SCALES& scales) {
  RopeCache<H, KH, D, DV, R, STYLE, NORM, BS, KV, SCALES>(c, in, out, offset, block_bytes, scales).run(tid);
}

}  // namespace llmc
