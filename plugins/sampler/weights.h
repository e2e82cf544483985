// A row of logits, looked over once, and the weights of its tokens: see cpu.h for what they mean.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugins/cpu/whole.h"

namespace llmc::sampler {

using llmc::load_at;
using llmc::store_at;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kOne = 1 << 30;  // the weight of the largest logit
constexpr int kMaxChunks = 512;

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

// What one pass over a row finds: its largest logit, and that of each lane in each of up to 512 chunks, so that later
// passes can leave out what holds nothing large enough.
struct Survey {
  const float* x;
  int n, chunk, chunks;
  int id = -1;  // of the largest, the lowest among equals; -1: NaN, +infinity or nothing but -infinity
  float top = 0;
  float most[kMaxChunks * kLanes];

  // With `copy` the row is written there, too, and the survey is of the copy.
  Survey(const float* row, int count, float* copy = nullptr) : x(copy ? copy : row), n(count) {
    constexpr int least = 16 * kLanes;
    chunk = (n + least * kMaxChunks - 1) / (least * kMaxChunks) * least;
    chunks = (n + chunk - 1) / chunk;
    const Mask bad = copy ? look<true>(row, copy) : look<false>(row, nullptr);
    Lanes all = splat(-kInfinity);
    for (int c = 0; c < chunks; ++c) all = max(load(most + c * kLanes), all);
    top = largest(all);
    if (!bits(bad) && top != kInfinity && top != -kInfinity) id = first_of(splat(top));
  }

 private:
  static constexpr int kStep = 4 * kLanes, kAhead = 16 * kStep;  // how far memory is fetched ahead

  // Returns where NaN is.
  template <bool kCopy>
  Mask look(const float* row, float* copy) {
    Mask bad = no_lane();
    for (int c = 0; c < chunks; ++c) {
      Lanes a = splat(-kInfinity), b = a;
      int i = c * chunk;
      const int last = std::min(n, i + chunk);
      for (; i + kStep <= last; i += kStep) {
        Lanes v[4];
        for (int j = 0; j < 4; ++j) {
          __builtin_prefetch(row + i + kAhead + j * kLanes);
          v[j] = load(row + i + j * kLanes);
          if (kCopy) store(copy + i + j * kLanes, v[j]);
        }
        bad = bad | (unordered(v[0], v[1]) | unordered(v[2], v[3]));
        a = max(max(v[0], v[1]), a);
        b = max(max(v[2], v[3]), b);
      }
      for (; i < last; i += kLanes) {
        const Lanes v = load_at(row, i, n, -kInfinity);
        if (kCopy) store_at(copy, i, n, v);
        bad = bad | unordered(v, v);
        a = max(v, a);
      }
      store(most + c * kLanes, max(a, b));
    }
    return bad;
  }

  int first_of(Lanes value) const {
    int c = 0;
    while (!bits(load(most + c * kLanes) >= value)) ++c;
    for (int i = c * chunk;; i += kLanes)
      if (const uint32_t found = bits(load_at(x, i, n, -kInfinity) >= value)) return i + __builtin_ctz(found);
  }
};

// From logits to weights.
class Scale {
 public:
  Scale(const Survey& s, float temperature)
      : top_(s.top),
        temperature_(temperature),
        shift_(splat(s.top)),
        inverse_(splat(1.0f / temperature)),
        quarter_(splat(bound(kOne / 4))) {}

  // exp((x - top) / temperature) * 2^30, rounded, with the very bits of `exp` in lanes.h: below -30 that is 0, nothing is
  // above 0, and the power of two is put into the exponent, where adding 1.5 * 2^23 leaves the nearest whole number.
  //
  // One vector is a chain of twenty operations that wait for one another, and few of those fit into a processor's window.
  // So kCount vectors go step by step together.
  template <int kCount>
  void weights(const Lanes (&x)[kCount], Whole (&w)[kCount]) const {
    Lanes y[kCount], sum[kCount], r[kCount], p[kCount];
    const Lanes round = splat(12582912.0f + 30.0f);
    auto each = [](auto step) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) step(i);
    };
    each([&](int i) { y[i] = x[i] - shift_; });
    each([&](int i) { y[i] = y[i] * inverse_; });
    each([&](int i) { y[i] = max(splat(-30.0f), y[i]); });
    each([&](int i) { sum[i] = y[i] * splat(1.44269504088896341f); });
    each([&](int i) { sum[i] = sum[i] + round; });
    each([&](int i) { r[i] = sum[i] - round; });
    each([&](int i) { y[i] = fma(r[i], splat(-0.693359375f), y[i]); });
    each([&](int i) { r[i] = fma(r[i], splat(2.12194440e-4f), y[i]); });
    each([&](int i) { p[i] = fma(splat(1.9875691500e-4f), r[i], splat(1.3981999507e-3f)); });
    for (const float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
      each([&](int i) { p[i] = fma(p[i], r[i], splat(next)); });
    each([&](int i) { y[i] = r[i] * r[i]; });
    each([&](int i) { p[i] = fma(p[i], y[i], r[i]); });
    each([&](int i) { p[i] = p[i] + splat(1.0f); });
    each([&](int i) { w[i] = nearest(from_bits(bits_of(p[i]) + left(bits_of(sum[i]), 23))); });
  }

  Whole weights(Lanes x) const {
    const Lanes one[1] = {x};
    Whole w[1];
    weights(one, w);
    return w[0];
  }

  // Of x[0, n), to `to`, which may be in the same place.
  void weights(const float* x, int n, int32_t* to) const {
    int i = 0;
    for (; i + kTogether * kLanes <= n; i += kTogether * kLanes) {
      Whole w[kTogether];
      together(x + i, w);
      for (int l = 0; l < kTogether; ++l) store(to + i + l * kLanes, w[l]);
    }
    for (; i < n; i += kLanes) store_at(to, i, n, weights(load_at(x, i, n, -kInfinity)));
  }

  // Adds the weights of a chunk of the survey's row up, and shows each vector of them to `see`. The same place of the row
  // `next` is fetched meanwhile, a little at a time: a burst would hold up the loads between.
  template <class See>
  void weigh(const Survey& s, int chunk, const float* next, WholeSum& sum, See see) const {
    const int first = chunk * s.chunk, last = std::min(s.n, first + s.chunk);
    const bool light = !bits(load(s.most + chunk * kLanes) >= quarter_);
    if (light && last - first == s.chunk) {
      for (int i = first; i < last; i += kBlock) {
        Whole part = every(0);  // sums of 16 that are below a quarter of 2^30 fit into 32 bits
        for (int j = i; j < i + kBlock; j += kTogether * kLanes) {
          Whole w[kTogether];
          for (int l = 0; l < kTogether; ++l) __builtin_prefetch(next + j + l * kLanes, 0, 2);
          together(s.x + j, w);
          for (int l = 0; l < kTogether; ++l) part = part + w[l];
          for (int l = 0; l < kTogether; ++l) see(w[l]);
        }
        sum.add(part);
      }
    } else {
      for (int i = first; i < last; i += kLanes) {
        const Whole w = weights(load_at(s.x, i, s.n, -kInfinity));
        sum.add(w);
        see(w);
      }
    }
  }

  // A logit below which all weigh less than `weight` (1 or more). The margin is far above all roundings.
  float bound(int32_t weight) const {
    const double distance = std::log((weight - 0.5) / kOne) * 1.0001 - 0.001;
    return std::nextafter(float(top_ + distance * temperature_), -kInfinity);
  }

 private:
  static constexpr int kTogether = LLMC_WIDE ? 8 : 4, kBlock = 16 * kLanes;

  void together(const float* from, Whole (&w)[kTogether]) const {
    Lanes x[kTogether];
    for (int l = 0; l < kTogether; ++l) x[l] = load(from + l * kLanes);
    weights(x, w);
  }

  double top_, temperature_;
  Lanes shift_, inverse_, quarter_;
};

}  // namespace llmc::sampler
