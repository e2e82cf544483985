// The few tokens of a row among which top-k, top-p and min-p choose, found without sorting or storing the rest.
//
// Candidates are all tokens that weigh `least` or more, in the order of their ids. What `least` must be is known exactly
// for min-p, bounded by the largest logits of groups for top-k, and guessed from a part of the row for top-p; a guess that
// was too high is noticed, since the mass of all is known. Where more than half of the row are candidates, all are.
#pragma once
#include "plugins/sampler/weights.h"

namespace llmc::sampler {

// What weighs `least` or more of v[0, count) weighs together.
inline uint64_t mass_of(const int32_t* v, int count, int32_t least) {
  WholeSum sum;
  const Whole below = every(least - 1);
  for (int i = 0; i < count; i += kLanes) {
    const Whole a = load_at(v, i, count, 0);
    sum.add(keep(a > below, a));
  }
  return sum.total();
}

// Of 16 numbers from all over v one that about so large a part of them are below. Without branches, which would be guessed
// wrong.
inline int32_t quantile(const int32_t* v, int count, double part) {
  if (count < kLanes) return v[count / 2];
  int32_t some[kLanes], found = INT32_MAX;
  for (int i = 0; i < kLanes; ++i) some[i] = v[int64_t(count) * (2 * i + 1) / (2 * kLanes)];
  const int above = std::clamp(int((1 - part) * kLanes), 0, kLanes - 1);
  const Whole all = load(some);
  for (int i = 0; i < kLanes; ++i) {
    const bool high = __builtin_popcount(bits(all > every(some[i]))) <= above;
    found = std::min(found, high ? some[i] : INT32_MAX);
  }
  return found;
}

// Numbers of v[0, count) above the pivot, their sum, and how many are equal to it.
struct Tally {
  int above = 0, equals = 0;
  uint64_t mass = 0;

  Tally(const int32_t* v, int count, int32_t pivot) {
    WholeSum sum;
    const Whole p = every(pivot);
    for (int i = 0; i < count; i += kLanes) {
      const Whole a = load_at(v, i, count, -1);
      const Mask more = a > p;
      sum.add(keep(more, a));
      above += __builtin_popcount(bits(more));
      equals += __builtin_popcount(bits(equal(a, p)));
    }
    mass = sum.total();
  }
};

// Those of from[0, count) on one side of the pivot, to `to`, which may be `from`; returns how many.
inline int move_side(const int32_t* from, int count, int32_t pivot, bool above, int32_t* to, int room) {
  const Whole low = every(above ? pivot : -1), high = every(above ? INT32_MAX : pivot);
  int kept = 0;
  for (int i = 0; i < count; i += kLanes) {
    const Whole a = load_at(from, i, count, -1);
    kept += compress(to + kept, room - kept, (a > low) & (high > a), a);
  }
  return kept;
}

// The largest weight that together with all above it reaches `wanted`, in members or in mass; the least of all where none
// does. `above`: what those above it reach; `reached`: with it.
struct Edge {
  int32_t weight = 0;
  int equals = 0;
  uint64_t above = 0, reached = 0;
};

// A quickselect that carries sums along. buffer: room for `room` numbers, at least as many as there are and, where it is
// not `from`, 16 more. low: the edge is likely to be among the smallest.
template <bool kMass>
inline Edge edge_of(const int32_t* from, int count, int32_t* buffer, int room, uint64_t wanted, bool low = false) {
  uint64_t before = 0;
  double part = low ? 0.35 : 0.5;
  for (;;) {
    if (!kMass) part = 1 - double(wanted - before) / count;
    const int32_t pivot = quantile(from, count, part);
    const Tally tally(from, count, pivot);
    const uint64_t above = before + (kMass ? tally.mass : uint64_t(tally.above));
    const uint64_t reached = above + (kMass ? uint64_t(pivot) : 1) * tally.equals;
    const bool higher = above >= wanted;
    const int kept = !higher && reached >= wanted ? 0 : move_side(from, count, pivot, higher, buffer, room);
    if (kept == 0) return {pivot, tally.equals, above, reached};
    if (!higher) before = reached;
    from = buffer;
    count = kept;
    part = 0.5;
  }
}

// Weights of the largest logits of groups, and of some of the others: enough to tell about where a share of the mass ends.
class Sample {
 public:
  Sample(const Survey& s, const Scale& scale) : count_(s.chunks * kLanes) {
    scale.weights(s.most, count_, most_);
    largest_ = mass_of(most_, count_, 0);
    float some[kSome * kLanes];
    const int stride = (s.chunks + kSome - 1) / kSome;
    for (int c = 0; c < s.chunks; c += stride) {
      const int i = c * s.chunk + c / stride % 16 * kLanes;
      if (i + kLanes > s.n) continue;
      const Lanes x = load(s.x + i);
      others_ += compress(reinterpret_cast<int32_t*>(some) + others_, x < load(s.most + c * kLanes), bits_of(x));
    }
    scale.weights(some, others_, other_);
    each_ = others_ ? double(s.n - count_) / others_ : 0;
  }

  // A weight below which, it seems, somewhat less than this share of the mass is; `members`: how many it seems to leave.
  int32_t cut(double share, double* members) const {
    const double mass = double(largest_) + each_ * double(mass_of(other_, others_, 0));
    int half = 0;  // powers of the square root of two
    for (int step = 32; step; step /= 2)
      if (half + step <= 60 && below(power(half + step)) <= 0.85 * share * mass) half += step;
    int above = 0;
    const Whole edge = every(power(half) - 1);
    for (int i = 0; i < others_; i += kLanes) above += __builtin_popcount(bits(load_at(other_, i, others_, 0) > edge));
    *members = each_ * above;
    return power(half);
  }

 private:
  static constexpr int kSome = 64;  // vectors

  int count_, others_ = 0;
  double each_;  // for how many one of the others stands
  uint64_t largest_;
  int32_t most_[kMaxChunks * kLanes], other_[kSome * kLanes];

  static int32_t power(int half) { return int32_t(half % 2 ? 1.41421356 * double(1 << half / 2) : double(1 << half / 2)); }

  // About what weighs less weighs together.
  double below(int32_t weight) const {
    WholeSum most, other;  // all of the largest: a few of them are much of the mass
    const Whole edge = every(weight);
    for (int i = 0; i < count_; i += kLanes) {
      const Whole a = load(most_ + i);
      most.add(keep(edge > a, a));
    }
    for (int i = 0; i < others_; i += kLanes) {
      const Whole a = load_at(other_, i, others_, 0);
      other.add(keep(edge > a, a));
    }
    return double(most.total()) + each_ * double(other.total());
  }
};

class Candidates {
 public:
  // scratch and ids: n each; scratch may be where the row is, and is written only when all tokens become candidates.
  Candidates(const Survey& survey, const Scale& scale, float* scratch, int32_t* ids)
      : s_(survey), scale_(scale), all_(reinterpret_cast<int32_t*>(scratch)), ids_(ids) {}

  // Rows too short to be worth it are taken whole.
  static bool few(int n) { return n < 1024; }

  int count() const { return count_; }
  uint64_t mass() const { return mass_; }  // of the whole row, where that was asked for
  uint64_t mass_from(int32_t least) const { return mass_of(v_, count_, least); }
  Edge edge_of_count(int wanted) { return edge_of<false>(v_, count_, buffer(), room(), uint64_t(wanted)); }
  Edge edge_of_mass(uint64_t wanted, bool low) { return edge_of<true>(v_, count_, buffer(), room(), wanted, low); }

  // All tokens that weigh `least` (1 or more) or more, looked for only where the survey says that there may be some.
  void find(int32_t least) {
    least_ = least;
    if (few(s_.n) || !gather<false>(scale_.bound(least), nullptr)) take_all();
  }

  // The same, and the mass of the whole row. `next` is fetched into the caches meanwhile. False: more than half.
  bool find_and_weigh(int32_t least, const float* next) {
    least_ = least;
    return gather<true>(scale_.bound(1), next);
  }

  // Every token becomes a candidate.
  void take_all() {
    dense_ = true;
    least_ = 0;
    v_ = all_;
    count_ = s_.n;
    scale_.weights(s_.x, s_.n, v_);
    mass_ = mass_of(v_, count_, 0);
  }

  // Makes 0 of all but the first `ties` of those that weigh just so much.
  void drop_ties(int32_t weight, int ties) {
    const Whole own = every(weight);
    for (int i = 0; i < count_; i += kLanes)
      for (uint32_t m = bits(equal(load_at(v_, i, count_, -1), own)); m; m &= m - 1)
        if (ties-- <= 0) v_[i + __builtin_ctz(m)] = 0;
  }

  // The token at which the running sum over weights >= least exceeds `target`.
  int look_up(uint64_t target, int32_t least) const {
    constexpr int kBlock = 8 * kLanes;
    int first = 0;
    for (; first + kBlock <= count_; first += kBlock) {
      const uint64_t sum = mass_of(v_ + first, kBlock, least);
      if (target < sum) break;
      target -= sum;
    }
    for (;; ++first) {
      const uint64_t weight = v_[first] >= least ? uint64_t(v_[first]) : 0;
      if (target < weight) return dense_ ? first : id_of(first);
      target -= weight;
    }
  }

 private:
  const Survey& s_;
  const Scale& scale_;
  int32_t* const all_;
  int32_t* const ids_;
  int32_t* v_ = nullptr;
  int count_ = 0;
  int32_t least_ = 0;
  uint64_t mass_ = 0;
  bool dense_ = false;

  int32_t* buffer() { return dense_ ? ids_ : ids_ + s_.n / 2; }
  int room() const { return dense_ ? s_.n : s_.n - s_.n / 2; }
  int starts_[kMaxChunks];  // how many candidates are before a chunk

  // kAll: every vector of the chunks that may weigh anything is added up; otherwise those with a logit >= bound are looked
  // at. False where candidates do not fit into half of `ids`.
  template <bool kAll>
  bool gather(float bound, const float* next) {
    v_ = ids_;
    count_ = 0;
    WholeSum sum;
    const Lanes least_logit = splat(bound);
    const Whole below = every(least_ - 1);
    for (int c = 0; c < s_.chunks; ++c) {
      starts_[c] = count_;
      if (count_ + s_.chunk + kLanes > s_.n / 2) return false;
      if (!bits(load(s_.most + c * kLanes) >= least_logit)) continue;
      int count = count_;
      auto take = [&](Whole w) { count += compress(ids_ + count, w > below, w); };
      if (kAll) {
        scale_.weigh(s_, c, next, sum, take);
      } else {
        const int last = std::min(s_.n, (c + 1) * s_.chunk);
        for (int i = c * s_.chunk; i < last; i += kLanes) {
          const Lanes x = load_at(s_.x, i, s_.n, -kInfinity);
          if (bits(x >= least_logit)) take(scale_.weights(x));
        }
      }
      count_ = count;
    }
    mass_ = sum.total();
    return true;
  }

  int id_of(int place) const {
    const int c = int(std::upper_bound(starts_, starts_ + s_.chunks, place) - starts_) - 1;
    place -= starts_[c];
    const Whole below = every(least_ - 1);
    for (int i = c * s_.chunk;; i += kLanes) {
      uint32_t m = bits(scale_.weights(load_at(s_.x, i, s_.n, -kInfinity)) > below);
      for (; m; m &= m - 1)
        if (place-- == 0) return i + __builtin_ctz(m);
    }
  }
};

}  // namespace llmc::sampler
