// A row of logits, looked over once, and the weights of its tokens: see cpu.h for what they mean.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugins/cpu/whole.h"

namespace llmc::sampler {

using llmc::load_at;
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
  Scale(float top, float temperature)
      : top_(top), temperature_(temperature), shift_(splat(top)), inverse_(splat(1.0f / temperature)) {}

  // exp((x - top) / temperature) * 2^30, rounded, with the very bits of `exp` in lanes.h: below -30 that is 0, nothing is
  // above 0, and the power of two is put into the exponent, where adding 1.5 * 2^23 leaves the nearest whole number.
  Whole weights(Lanes x) const {
    const Lanes y = max(splat(-30.0f), (x - shift_) * inverse_), round = splat(12582912.0f + 30.0f);
    const Lanes sum = y * splat(1.44269504088896341f) + round, n = sum - round;
    Lanes r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    Lanes p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return nearest(from_bits(bits_of(p) + left(bits_of(sum), 23)));
  }

  // A logit below which all weigh less than `weight` (1 or more). The margin is far above all roundings.
  float bound(int32_t weight) const {
    const double distance = std::log((weight - 0.5) / kOne) * 1.0001 - 0.001;
    return std::nextafter(float(top_ + distance * temperature_), -kInfinity);
  }

 private:
  double top_, temperature_;
  Lanes shift_, inverse_;
};

}  // namespace llmc::sampler
