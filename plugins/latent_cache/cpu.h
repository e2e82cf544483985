// Norm of the latent, rotation of the shared key part and of the queries', and the write of a row a token, for one layer.
//
// The cache's layout is that of plugins/latent_attention/cpu.h: within a block, at `offset`, rows [block_size][L + R], the
// latent first. Token i of sequence s stands at position context_len[s] - (tokens of s in this step) + i. Every element
// has one order of operations: a * cos - b * sin and b * cos + a * sin without fusing, as Hugging Face computes them;
// squares are summed in 16 lanes and their tree.
#pragma once
#include <algorithm>
#include <cmath>

#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

namespace llmc {

enum class Turn { kNone, kHalf, kInterleaved };

// x[R] with its pairs turned by cos[R / 2] and sin[R / 2], to `to`.
template <int R, Turn STYLE>
void turn_pairs(const float* x, const float* cos, const float* sin, float* to) {
  if constexpr (STYLE == Turn::kNone) {
    std::copy_n(x, R, to);
  } else {
    constexpr int apart = STYLE == Turn::kHalf ? R / 2 : 1, step = STYLE == Turn::kHalf ? 1 : 2;
    for (int i = 0; i < R / 2; ++i) {
      const float a = x[i * step], b = x[i * step + apart];
      to[i * step] = a * cos[i] - b * sin[i];
      to[i * step + apart] = b * cos[i] + a * sin[i];
    }
  }
}

// x[L] / sqrt(mean of squares + eps) * w, in place.
template <int L>
void norm_row(float* x, const float* w, float eps) {
  float squares[kLanes] = {};
  for (int i = 0; i < L; ++i) squares[i % kLanes] += x[i] * x[i];
  const float mean = tree(squares, [](float a, float b) { return a + b; }) / float(L);
  const float scale = 1.0f / std::sqrt(mean + eps);
  for (int i = 0; i < L; ++i) x[i] = x[i] * scale * w[i];
}

// q[T, H * width], c[T, L], k[T, R] -> out[T, H * R], and the cache. A thread owns a stretch of tokens and, of a single
// token, a stretch of its heads: unit 0 of a token is its row of the cache, the others are its heads.
template <int H, int L, int R, int BS, Turn STYLE, bool NORM, class KV>
void latent_cache(const Ctx& c, int tid, const float* q, const float* latent, const float* k, const float* cos,
                  const float* sin, int64_t q_stride, int64_t latent_stride, int64_t k_stride, int64_t cos_stride,
                  int64_t sin_stride, const float* weight, float eps, int width, int q_start, float* out,
                  int64_t offset, int64_t block_bytes) {
  const llmc_step& step = *c.step;
  const Share mine = share(int64_t(step.num_tokens) * (H + 1), tid, c.threads);
  int sequence = 0;
  for (int64_t unit = mine.first; unit < mine.last; ++unit) {
    const int token = int(unit / (H + 1)), head = int(unit % (H + 1)) - 1;
    const float *own_cos = cos + token * cos_stride, *own_sin = sin + token * sin_stride;
    if (head >= 0) {
      turn_pairs<R, STYLE>(q + token * q_stride + int64_t(head) * width + q_start, own_cos, own_sin,
                           out + (int64_t(token) * H + head) * R);
      continue;
    }
    while (step.query_start[sequence + 1] <= token) ++sequence;
    const int position = step.context_len[sequence] - step.query_start[sequence + 1] + token;
    const int32_t* table = step.block_tables + int64_t(sequence) * step.block_table_stride;
    KV* row = reinterpret_cast<KV*>(c.rank->kv + table[position / BS] * block_bytes + offset) + int64_t(position % BS) * (L + R);
    float values[L + R];
    std::copy_n(latent + token * latent_stride, L, values);
    if (NORM) norm_row<L>(values, weight, eps);
    turn_pairs<R, STYLE>(k + token * k_stride, own_cos, own_sin, values + L);
    for (int i = 0; i < L + R; ++i) store_as(values[i], row + i);
  }
}

}  // namespace llmc
