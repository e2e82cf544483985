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
#include "plugins/cpu/lanes.h"

namespace llmc::sampler {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kOne = 1073741824.0f;  // 2^30, the weight of the largest logit
constexpr int kMaxChunks = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// Sixteen values from p[i], with `fill` where i + lane >= n.
inline Lanes load_at(const float* p, int i, int n, float fill) {
  if (i + kLanes <= n) return load(p + i);
  return select(iota() < splat(float(n - i)), load(p + i, n - i), splat(fill));
}
inline void store_at(float* p, int i, int n, Lanes x) {
  if (i + kLanes <= n) return store(p + i, x);
  float part[kLanes];
  store(part, x);
  std::copy(part, part + (n - i), p + i);
}

struct Largest {
  int id = -1;  // -1: NaN, +infinity or nothing but -infinity
  float value = 0;
};

inline Largest find_largest(const float* x, int n) {
  Lanes best = splat(-kInfinity), where = splat(0), index = iota();
  uint32_t ordered = 0xffff;
  for (int i = 0; i < n; i += kLanes) {
    const Lanes v = load_at(x, i, n, -kInfinity);
    const Mask better = best < v;
    ordered &= bits(v >= v);
    best = select(better, v, best);
    where = select(better, index, where);
    index = index + splat(kLanes);
  }
  const float value = largest(best);
  if (ordered != 0xffff || value == kInfinity || value == -kInfinity) return {};
  float values[kLanes], ids[kLanes];
  store(values, best);
  store(ids, where);
  float id = kInfinity;
  for (int i = 0; i < kLanes; ++i)
    if (values[i] == value) id = std::min(id, ids[i]);
  return {int(id), value};
}

inline bool changes_logits(const llmc_sampling& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0 || p.num_bias || p.num_banned;
}

// x: a copy of the row. counts: scratch of n. Ids outside the vocabulary are passed over.
inline void change_logits(const llmc_sampling& p, float* x, int n, int32_t* counts) {
  constexpr int32_t in_prompt = 1 << 30;
  if (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0) {
    std::fill(counts, counts + n, 0);
    auto valid = [n](int32_t id) { return id >= 0 && id < n; };
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

// The row as whole-number weights in `w`, and their sums over chunks.
struct Weights {
  float* w;
  int n, chunk;
  double sums[kMaxChunks];

  Weights(const float* x, float* weights, int count, float top, float temperature) : w(weights), n(count) {
    chunk = (n + kLanes * kMaxChunks - 1) / (kLanes * kMaxChunks) * kLanes;
    const Lanes inverse = splat(1.0f / temperature), shift = splat(top), one = splat(kOne);
    for (int c = 0; c * chunk < n; ++c) {
      DoubleLanes total;
      for (int i = c * chunk; i < std::min(n, (c + 1) * chunk); i += kLanes) {
        const Lanes e = round_even(exp((load_at(x, i, n, -kInfinity) - shift) * inverse) * one);
        store_at(w, i, n, e);
        total.add(e);
      }
      sums[c] = sum(total);
    }
  }

  double total() const {
    double result = 0;
    for (int c = 0; c * chunk < n; ++c) result += sums[c];
    return result;
  }

  // Drops the weights below `least` from the sums, and on lookup.
  void sum_from(float least) {
    const Lanes bound = splat(least), zero = splat(0);
    for (int c = 0; c * chunk < n; ++c) {
      DoubleLanes kept;
      for (int i = c * chunk; i < std::min(n, (c + 1) * chunk); i += kLanes) {
        const Lanes v = load_at(w, i, n, 0);
        kept.add(select(v >= bound, v, zero));
      }
      sums[c] = sum(kept);
    }
  }

  // The first id at which the running sum over weights >= least exceeds `target`.
  int lookup(uint64_t target, float least) const {
    int c = 0;
    for (; target >= uint64_t(sums[c]); ++c) target -= uint64_t(sums[c]);
    for (int i = c * chunk;; ++i) {
      const uint64_t weight = w[i] >= least ? uint64_t(w[i]) : 0;
      if (target < weight) return i;
      target -= weight;
    }
  }

  // Ids of weight >= least, ascending.
  int gather(float least, int32_t* ids) const {
    int count = 0;
    const Lanes bound = splat(least);
    for (int i = 0; i < n; i += kLanes)
      for (uint32_t m = bits(load_at(w, i, n, -1) >= bound); m; m &= m - 1) ids[count++] = i + __builtin_ctz(m);
    return count;
  }

  // A weight that at least k candidates reach: the k-th largest among the maxima of disjoint groups. scratch: n.
  float reached_by(int k, int32_t* scratch) const {
    constexpr int span = 16;  // vectors; each lane of them is a group
    const int groups = (n + span * kLanes - 1) / (span * kLanes) * kLanes;
    if (k > groups || groups > n) return 0;
    for (int g = 0; g < groups; g += kLanes) {
      Lanes most = splat(0);
      for (int i = g * span; i < std::min(n, (g + kLanes) * span); i += kLanes) most = max(most, load_at(w, i, n, 0));
      float values[kLanes];
      store(values, most);
      std::memcpy(scratch + g, values, sizeof values);
    }
    // Floats that are not negative order as their bits do.
    std::nth_element(scratch, scratch + (k - 1), scratch + groups, [](int32_t a, int32_t b) { return a > b; });
    float value;
    std::memcpy(&value, scratch + (k - 1), sizeof value);
    return value;
  }
};

// A beginning of the candidates' order: all weights above `weight` and `ties` of those equal to it.
struct Prefix {
  float weight;
  int ties;
  uint64_t mass;
  int first_tie, end_tie;  // where in `ids` those of that very weight stand
};

// The shortest beginning of ids[0, count) that has `limit` members or reaches `mass`; all of it where none does.
// Permutes ids: a quickselect that carries sums along.
inline Prefix shortest_prefix(const float* w, int32_t* ids, int count, int limit, uint64_t mass) {
  int low = 0, high = count;
  uint64_t before = 0;
  while (low < high) {
    const float a = w[ids[low]], b = w[ids[(low + high) / 2]], c = w[ids[high - 1]];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    int above = low, below = high;
    uint64_t heavier = before;
    for (int i = low; i < below;) {
      const float v = w[ids[i]];
      if (v > pivot) {
        heavier += uint64_t(v);
        std::swap(ids[above++], ids[i++]);
      } else if (v < pivot) {
        std::swap(ids[i], ids[--below]);
      } else {
        ++i;
      }
    }
    if (above >= limit || (above > low && heavier >= mass)) {
      high = above;
      continue;
    }
    const int equal = below - above, room = std::min(limit - above, equal);
    const auto each = uint64_t(pivot);
    const uint64_t missing = mass > heavier ? mass - heavier : 1;
    const int ties = each && (missing - 1) / each < uint64_t(room) ? int((missing - 1) / each) + 1 : room;
    const uint64_t reached = heavier + each * ties;
    if (above + ties == limit || reached >= mass || below == count) return {pivot, ties, reached, above, below};
    before = reached;
    low = below;
  }
  return {0, 0, before, 0, 0};
}

// Applies top-k, top-p and min-p; returns the least weight that is kept, having zeroed the ties beyond the prefix.
inline float truncate(Weights& weights, const llmc_sampling& p, int32_t* ids) {
  const bool by_count = p.top_k > 0 && p.top_k < weights.n, by_mass = p.top_p < 1;
  float least = 0;
  if (by_count || by_mass) {
    const double mass = weights.total();
    // No prefix that top-p keeps reaches below a weight which, held by every id, would weigh less than what it drops.
    const double tail = (1.0 - double(p.top_p)) * mass / weights.n * (1 - 1e-6);
    const float floor = by_count ? weights.reached_by(p.top_k, ids) : float(tail);
    const int count = weights.gather(std::min(floor, kOne), ids);
    const int limit = by_count ? p.top_k : count;
    auto share = [&p](double all) { return uint64_t(std::max(0.0, std::ceil(double(p.top_p) * all))); };
    Prefix prefix = shortest_prefix(weights.w, ids, count, limit, by_count ? UINT64_MAX : share(mass));
    if (by_count && by_mass) prefix = shortest_prefix(weights.w, ids, count, limit, share(double(prefix.mass)));
    least = prefix.weight;
    int32_t *first = ids + prefix.first_tie, *end = ids + prefix.end_tie;
    if (prefix.ties < end - first) {
      std::nth_element(first, first + prefix.ties, end);
      for (int32_t* id = first + prefix.ties; id < end; ++id) weights.w[*id] = 0;
    }
  }
  if (p.min_p > 0) {
    const double bound = std::min(double(p.min_p), 1.0) * kOne;
    const float near = float(bound);
    least = std::max(least, double(near) < bound ? std::nextafter(near, kInfinity) : near);
  }
  return least;
}

inline int draw(const float* x, const Largest& top, const llmc_sampling& p, int n, float* scratch, int32_t* ids) {
  Weights weights(x, scratch, n, top.value, p.temperature);
  const float least = truncate(weights, p, ids);
  if (least > 0) weights.sum_from(least);
  const auto product = static_cast<unsigned __int128>(philox(p.seed, p.counter)) * uint64_t(weights.total());
  return weights.lookup(uint64_t(product >> 64), least);
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

inline void sample_row(const float* logits, int n, const llmc_sampling& p, llmc_sampled& out, int32_t* top_ids,
                       float* top_logprobs, int top_stride, float* scratch, int32_t* scratch_ids) {
  out = {-1, 0, 0, 0};
  const int wanted = std::min({p.num_logprobs, n, top_stride});
  for (int i = 0; i < wanted; ++i) top_ids[i] = -1, top_logprobs[i] = -kInfinity;
  const Largest raw = find_largest(logits, n);
  if (raw.id < 0) return;
  const float* x = logits;
  Largest top = raw;
  if (changes_logits(p)) {
    std::copy(logits, logits + n, scratch);
    change_logits(p, scratch, n, scratch_ids);
    x = scratch;
    top = find_largest(x, n);
    if (top.id < 0) return;
  }
  out.token = p.temperature < kGreedyBelow ? top.id : draw(x, top, p, n, scratch, scratch_ids);
  if (p.num_logprobs < 0) return;
  const double log_total = log_of_sum(logits, n, raw.value);
  out.logprob = float(double(logits[out.token]) - log_total);
  out.rank = rank_of(logits, n, out.token);
  if (wanted > 0) best_of(logits, n, wanted, log_total, top_ids, top_logprobs);
}

}  // namespace llmc::sampler

extern "C" void llmc_sample(const float* logits, int32_t n, int32_t vocab, const llmc_sampling* params,
                            llmc_sampled* out, int32_t* top_ids, float* top_logprobs, int32_t top_stride,
                            float* scratch, int32_t* scratch_ids) {
  for (int64_t row = 0; row < n; ++row)
    llmc::sampler::sample_row(logits + row * vocab, vocab, params[row], out[row], top_ids + row * top_stride,
                              top_logprobs + row * top_stride, top_stride, scratch, scratch_ids);
}
