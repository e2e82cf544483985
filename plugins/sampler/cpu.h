// llmc_sample of plugins/cpu/abi.h. Include in exactly one translation unit of a shared object; -ffp-contract=off.
//
// Order for a row: repetition penalty, frequency and presence penalty, logit bias, banned ids; then, with a temperature
// below 1e-5, the largest (lowest id among equals); otherwise temperature, top-k, top-p, min-p, and one draw.
//
// Weights are whole numbers, exp((logit - max) / temperature) * 2^30 rounded, so that sums are exact in any order: the
// draw is the same on every ISA level and in plugins/sampler/reference.py. Candidates are ordered by weight, then by
// lower id; top-k, top-p and min-p each keep a beginning of that order. The draw is floor(u * sum / 2^64) for u = 64 bits
// of Philox 4x32-10 under key `seed` and counter `counter`, looked up in the running sum over ids.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugins/cpu/abi.h"
#include "plugins/sampler/candidates.h"

namespace llmc::sampler {

constexpr float kGreedyBelow = 1e-5f;

inline uint64_t philox(uint64_t key, uint64_t counter) {
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0};
  uint32_t k[2] = {uint32_t(key), uint32_t(key >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b),  //
                              uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return uint64_t(c[1]) << 32 | c[0];
}

inline bool changes_logits(const llmc_sampling& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0 || p.num_bias || p.num_banned;
}

// x: a copy of the row. counts: scratch of n, of which only what the history names is touched. Ids outside the vocabulary
// are passed over.
inline void change_logits(const llmc_sampling& p, float* x, int n, int32_t* counts) {
  constexpr int32_t in_prompt = 1 << 30;
  if (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0) {
    auto valid = [n](int32_t id) { return id >= 0 && id < n; };
    for (int i = 0; i < p.num_output; ++i)
      if (valid(p.output[i])) counts[p.output[i]] = 0;
    for (int i = 0; i < p.num_prompt; ++i)
      if (valid(p.prompt[i])) counts[p.prompt[i]] = 0;
    for (int i = 0; i < p.num_output; ++i)
      if (valid(p.output[i])) ++counts[p.output[i]];
    for (int i = 0; i < p.num_prompt; ++i)
      if (valid(p.prompt[i])) counts[p.prompt[i]] |= in_prompt;
    auto penalise = [&](int32_t id) {
      if (!valid(id) || !counts[id]) return;  // each id once
      const int32_t count = counts[id] & ~in_prompt;
      x[id] = x[id] > 0 ? x[id] / p.repetition_penalty : x[id] * p.repetition_penalty;
      if (count) {
        x[id] -= p.frequency_penalty * float(count);
        x[id] -= p.presence_penalty;
      }
      counts[id] = 0;
    };
    for (int i = 0; i < p.num_output; ++i) penalise(p.output[i]);
    for (int i = 0; i < p.num_prompt; ++i) penalise(p.prompt[i]);
  }
  for (int i = 0; i < p.num_bias; ++i)
    if (p.bias_ids[i] >= 0 && p.bias_ids[i] < n) x[p.bias_ids[i]] += p.bias[i];
  for (int i = 0; i < p.num_banned; ++i)
    if (p.banned[i] >= 0 && p.banned[i] < n) x[p.banned[i]] = -kInfinity;
}

// Of all tokens, at a temperature alone. Sums are kept by chunk, and the weights of one chunk are made again.
inline int draw_from_all(const Survey& s, const Scale& scale, uint64_t random, const float* next) {
  uint64_t sums[kMaxChunks], total = 0;
  const Lanes least = splat(scale.bound(1));
  for (int c = 0; c < s.chunks; ++c) {
    WholeSum sum;
    if (bits(load(s.most + c * kLanes) >= least)) scale.weigh(s, c, next, sum, [](Whole) {});
    total += sums[c] = sum.total();
  }
  auto target = uint64_t(static_cast<unsigned __int128>(random) * total >> 64);
  int c = 0;
  for (; target >= sums[c]; ++c) target -= sums[c];
  for (int i = c * s.chunk;; i += kLanes) {
    int32_t weights[kLanes];
    store(weights, scale.weights(load_at(s.x, i, s.n, -kInfinity)));
    for (int lane = 0; lane < kLanes; ++lane) {
      if (target < uint64_t(weights[lane])) return i + lane;
      target -= weights[lane];
    }
  }
}

// A weight that at least k tokens reach: the k-th largest of those of groups' largest logits; 0 where there are too few.
inline int32_t reached_by(int k, const Survey& s, const Scale& scale) {
  int32_t most[kMaxChunks * kLanes];
  const int count = s.chunks * kLanes;
  if (k > count || Candidates::few(s.n)) return 0;
  scale.weights(s.most, count, most);
  return edge_of<false>(most, count, most, count, uint64_t(k)).weight;
}

// What top-p asks for of a mass; one token is always left.
inline uint64_t share(const llmc_sampling& p, uint64_t mass) {
  return uint64_t(std::max(1.0, std::ceil(double(p.top_p) * double(mass))));
}

// Finds candidates that hold the share which top-p asks for, and where it ends. `next`: as of draw.
inline Edge find_share(const llmc_sampling& p, const Survey& s, const Scale& scale, const float* next, Candidates& found) {
  if (!Candidates::few(s.n)) {
    double members;
    int32_t least = Sample(s, scale).cut(1 - double(p.top_p), &members);
    for (; members < 0.4 * s.n && found.find_and_weigh(least, next); least = std::max(least / 16, 1)) {
      const Edge edge = found.edge_of_mass(share(p, found.mass()), true);
      if (edge.reached >= share(p, found.mass())) return edge;
    }
  }
  found.take_all();
  return found.edge_of_mass(share(p, found.mass()), true);
}

// What truncation leaves: tokens that weigh `least` or more, and their mass.
struct Kept {
  int32_t least;
  uint64_t mass;
};

// Finds what top-k, top-p and min-p leave, having zeroed the ties beyond.
inline Kept truncate(const llmc_sampling& p, const Survey& s, const Scale& scale, const float* next, Candidates& found) {
  const bool by_count = p.top_k > 0 && p.top_k < s.n, by_mass = p.top_p < 1;
  const auto floor = p.min_p > 0 ? int32_t(std::ceil(std::min(double(p.min_p), 1.0) * kOne)) : 0;
  Edge edge;
  uint64_t ties = 0, mass = 0;
  if (by_count) {
    // Top-p takes its share of all that top-k leaves; without it what min-p drops need not be found.
    const int32_t least = std::max(reached_by(p.top_k, s, scale), by_mass ? 0 : floor);
    least > 0 ? found.find(least) : found.take_all();
    if (p.top_k < found.count()) {
      edge = found.edge_of_count(p.top_k);
      ties = p.top_k - edge.above;
      mass = found.mass_from(edge.weight + 1) + ties * edge.weight;
    } else {
      mass = found.mass_from(0);
    }
  } else if (!by_mass) {
    found.find(floor);
  }
  if (by_mass) {
    edge = by_count ? found.edge_of_mass(share(p, mass), false) : find_share(p, s, scale, next, found);
    const uint64_t wanted = share(p, by_count ? mass : found.mass());
    ties = (wanted - edge.above + edge.weight - 1) / edge.weight;  // not beyond those of top-k: its mass holds the share
    mass = edge.above + ties * edge.weight;
  }
  if (ties < uint64_t(edge.equals)) found.drop_ties(edge.weight, int(ties));
  if (floor > edge.weight) return {floor, found.mass_from(floor)};
  return {edge.weight, mass};
}

// `next`: the row that will be sampled after this one, or this one again. scratch may be where the row itself is.
inline int draw(const Survey& s, const llmc_sampling& p, const float* next, float* scratch, int32_t* ids) {
  const Scale scale(s, p.temperature);
  const uint64_t random = philox(p.seed, p.counter);
  if (!(p.top_k > 0 && p.top_k < s.n) && !(p.top_p < 1) && !(p.min_p > 0)) return draw_from_all(s, scale, random, next);
  Candidates found(s, scale, scratch, ids);
  const Kept kept = truncate(p, s, scale, next, found);
  return found.look_up(uint64_t(static_cast<unsigned __int128>(random) * kept.mass >> 64), kept.least);
}

// The best `count` of the raw row, best first, lower ids first among equals; log-probabilities relative to `log_total`.
inline void best_of(const float* x, int n, int count, double log_total, int32_t* ids, float* logprobs) {
  int have = 0;
  for (int i = 0; i < n; i += kLanes) {
    const Lanes v = load_at(x, i, n, -kInfinity);
    uint32_t m = have < count ? (1u << std::min(kLanes, n - i)) - 1 : bits(splat(logprobs[count - 1]) < v);
    for (; m; m &= m - 1) {
      const int id = i + __builtin_ctz(m);
      if (have == count && !(x[id] > logprobs[count - 1])) continue;
      int at = have < count ? have++ : count - 1;
      for (; at > 0 && logprobs[at - 1] < x[id]; --at) {
        logprobs[at] = logprobs[at - 1];
        ids[at] = ids[at - 1];
      }
      logprobs[at] = x[id];
      ids[at] = id;
    }
  }
  for (int i = 0; i < have; ++i) logprobs[i] = float(double(logprobs[i]) - log_total);
}

// 1 for the largest of the raw row; equals stand in the order of their ids.
inline int rank_of(const float* x, int n, int id) {
  int rank = 1;
  const Lanes own = splat(x[id]);
  for (int i = 0; i < n; i += kLanes) {
    const Lanes v = load_at(x, i, n, -kInfinity);
    const uint32_t lower_ids = i >= id ? 0 : (1u << std::min(kLanes, id - i)) - 1;
    rank += __builtin_popcount(bits(own < v) | (bits(v >= own) & lower_ids));
  }
  return rank;
}

inline double log_of_sum(const float* x, int n, float top) {
  DoubleLanes total;
  for (int i = 0; i < n; i += kLanes) total.add(exp(load_at(x, i, n, -kInfinity) - splat(top)));
  return double(top) + std::log(sum(total));
}

// `next`: as of draw.
inline void sample_row(const float* logits, const float* next, int n, const llmc_sampling& p, llmc_sampled& out,
                       int32_t* top_ids, float* top_logprobs, int top_stride, float* scratch, int32_t* scratch_ids) {
  out = {-1, 0, 0, 0};
  const int wanted = std::min({p.num_logprobs, n, top_stride});
  for (int i = 0; i < wanted; ++i) top_ids[i] = -1, top_logprobs[i] = -kInfinity;
  auto choose = [&](const Survey& s) { return p.temperature < kGreedyBelow ? s.id : draw(s, p, next, scratch, scratch_ids); };
  const bool changes = changes_logits(p);
  const Survey raw(logits, n, changes ? scratch : nullptr);
  if (raw.id < 0) return;
  if (changes) {
    change_logits(p, scratch, n, scratch_ids);
    const Survey changed(scratch, n);
    if (changed.id < 0) return;
    out.token = choose(changed);
  } else {
    out.token = choose(raw);
  }
  if (p.num_logprobs < 0) return;
  const double log_total = log_of_sum(logits, n, raw.top);
  out.logprob = float(double(logits[out.token]) - log_total);
  out.rank = rank_of(logits, n, out.token);
  if (wanted > 0) best_of(logits, n, wanted, log_total, top_ids, top_logprobs);
}

}  // namespace llmc::sampler

extern "C" void llmc_sample(const float* logits, int32_t n, int32_t vocab, const llmc_sampling* params,
                            llmc_sampled* out, int32_t* top_ids, float* top_logprobs, int32_t top_stride,
                            float* scratch, int32_t* scratch_ids) {
  for (int64_t row = 0; row < n; ++row) {
    const float* own = logits + row * vocab;
    llmc::sampler::sample_row(own, row + 1 < n ? own + vocab : own, vocab, params[row], out[row],
                              top_ids + row * top_stride, top_logprobs + row * top_stride, top_stride, scratch,
                              scratch_ids);
  }
}
