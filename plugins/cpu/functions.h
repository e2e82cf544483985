// The elementwise functions of plugins/pointwise/functions.py on sixteen lanes; the same bits on every ISA level. Always
// call them qualified, fn::exp(x): `llmc` has coarser ones of some names. Errors were measured against float64 over a
// dense grid of arguments. log, log1p, expm1, sin, cos and pow are computed lane by lane in double: they are rare and
// must be right.
#pragma once
#include <cmath>

#include "plugins/cpu/lanes.h"

namespace llmc::fn {

#if LLMC_WIDE
inline Lanes magnitude(Lanes x) { return {_mm512_abs_ps(x.v)}; }
inline Lanes with_sign(Lanes x, Lanes sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, x.v), _mm512_and_ps(bit, sign.v))};
}
inline Lanes root(Lanes x) { return {_mm512_sqrt_ps(x.v)}; }
inline Mask is_nan(Lanes x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
#else
inline __m256 sign_bit() { return _mm256_set1_ps(-0.0f); }
inline Lanes magnitude(Lanes x) { return {_mm256_andnot_ps(sign_bit(), x.lo), _mm256_andnot_ps(sign_bit(), x.hi)}; }
inline __m256 with_sign(__m256 x, __m256 sign) {
  return _mm256_or_ps(_mm256_andnot_ps(sign_bit(), x), _mm256_and_ps(sign_bit(), sign));
}
inline Lanes with_sign(Lanes x, Lanes sign) { return {with_sign(x.lo, sign.lo), with_sign(x.hi, sign.hi)}; }
inline Lanes root(Lanes x) { return {_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)}; }
inline Mask is_nan(Lanes x) {
  return {_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q), _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q)};
}
#endif

// The first n lanes.
inline void store(float* p, Lanes a, int n) {
  if (n == kLanes) return llmc::store(p, a);
  float part[kLanes];
  llmc::store(part, a);
  std::memcpy(p, part, n * sizeof(float));
}

inline Lanes number(float x) { return splat(x); }
inline Lanes add(Lanes a, Lanes b) { return a + b; }
inline Lanes sub(Lanes a, Lanes b) { return a - b; }
inline Lanes mul(Lanes a, Lanes b) { return a * b; }
inline Lanes div(Lanes a, Lanes b) { return a / b; }
inline Lanes neg(Lanes x) { return splat(-0.0f) - x; }
inline Lanes abs(Lanes x) { return magnitude(x); }
inline Lanes square(Lanes x) { return x * x; }
inline Lanes cube(Lanes x) { return x * x * x; }
inline Lanes reciprocal(Lanes x) { return splat(1) / x; }
inline Lanes sqrt(Lanes x) { return root(x); }
inline Lanes rsqrt(Lanes x) { return splat(1) / root(x); }
inline Lanes relu(Lanes x) { return llmc::max(splat(0), x); }
// NaN where either is.
inline Lanes maximum(Lanes a, Lanes b) { return select(is_nan(a), a, llmc::max(a, b)); }
inline Lanes minimum(Lanes a, Lanes b) { return select(is_nan(a), a, llmc::min(a, b)); }

inline Lanes round(Lanes x) { return round_even(x); }
inline Lanes floor(Lanes x) {
  const Lanes n = round_even(x);
  return select(x < n, n - splat(1), n);
}
inline Lanes ceil(Lanes x) {
  const Lanes n = round_even(x);
  return select(n < x, n + splat(1), n);
}
inline Lanes sign(Lanes x) {
  const Lanes below = select(x < splat(0), splat(-1), x);
  return select(splat(0) < x, splat(1), below);
}

// Truths are 1 and 0; what is compared with NaN is false, but for ne.
inline Lanes truth(Mask m) { return select(m, splat(1), splat(0)); }
inline Mask equal(Lanes a, Lanes b) { return (a >= b) & (b >= a); }
inline Lanes lt(Lanes a, Lanes b) { return truth(a < b); }
inline Lanes le(Lanes a, Lanes b) { return truth(b >= a); }
inline Lanes gt(Lanes a, Lanes b) { return truth(b < a); }
inline Lanes ge(Lanes a, Lanes b) { return truth(a >= b); }
inline Lanes eq(Lanes a, Lanes b) { return truth(equal(a, b)); }
inline Lanes ne(Lanes a, Lanes b) { return select(equal(a, b), splat(0), splat(1)); }
inline Lanes where(Lanes condition, Lanes yes, Lanes no) { return select(equal(condition, splat(0)), no, yes); }
inline Lanes logical_not(Lanes a) { return truth(equal(a, splat(0))); }
inline Lanes logical_and(Lanes a, Lanes b) { return where(a, ne(b, splat(0)), splat(0)); }
inline Lanes logical_or(Lanes a, Lanes b) { return where(a, splat(1), ne(b, splat(0))); }

// e^x for every x, infinity and denormals included; 1 ulp. Polynomial of Cephes' expf (Moshier), with fused multiply-adds.
inline Lanes exp(Lanes x) {
  const Lanes y = llmc::min(splat(89), llmc::max(splat(-104), x));
  const Lanes n = round_even(y * splat(1.44269504088896341f));
  Lanes r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1);
  const Lanes half = round_even(n * splat(0.5f));  // in two steps: 2^128 is no float, nor is 2^-150 a normal one
  return p * power_of_two(half) * power_of_two(n - half);
}

// 0 below -88.7, where the truth is below 1e-38.
inline Lanes sigmoid(Lanes x) { return splat(1) / (splat(1) + fn::exp(fn::neg(x))); }
inline Lanes silu(Lanes x) { return x / (splat(1) + fn::exp(fn::neg(x))); }

// 1.8 ulp. Below 0.6 a minimax polynomial (N. Juffa, public domain), above by the exponential.
inline Lanes tanh(Lanes x) {
  const Lanes t = magnitude(x), s = x * x;
  Lanes p = splat(1.57394409e-2f);
  p = fma(p, s, splat(-5.23025580e-2f));
  p = fma(p, s, splat(1.33152470e-1f));
  p = fma(p, s, splat(-3.33327681e-1f));
  p = fma(p * s, x, x);
  const Lanes large = splat(1) - splat(2) / (fn::exp(t + t) + splat(1));
  return select(t >= splat(0.6f), with_sign(large, x), p);
}

// 1 ulp. Two minimax polynomials, the outer one of log(1 - erf) (N. Juffa, public domain).
inline Lanes erf(Lanes x) {
  const Lanes t = magnitude(x), s = x * x;
  Lanes r = fma(splat(-1.72853470e-5f), t, splat(3.83197126e-4f));
  const Lanes u = fma(splat(-3.88396438e-3f), t, splat(2.42546219e-2f));
  r = fma(r, s, u);
  r = fma(r, t, splat(-1.06777877e-1f));
  r = fma(r, t, splat(-6.34846687e-1f));
  r = fma(r, t, splat(-1.28717512e-1f));
  r = fma(r, t, fn::neg(t));
  // Past 4 the result is 1, and the polynomial is only good up to there.
  const Lanes outer = select(t >= splat(4), splat(1), splat(1) - fn::exp(r));
  Lanes p = splat(-5.96761703e-4f);
  p = fma(p, s, splat(4.99119423e-3f));
  p = fma(p, s, splat(-2.67681349e-2f));
  p = fma(p, s, splat(1.12819925e-1f));
  p = fma(p, s, splat(-3.76125336e-1f));
  p = fma(p, s, splat(1.28379166e-1f));
  p = fma(p, x, x);
  return select(t >= splat(0.921875f), with_sign(outer, x), p);
}

inline Lanes gelu(Lanes x) { return splat(0.5f) * x * (splat(1) + fn::erf(x * splat(0.70710678118654752f))); }
inline Lanes gelu_tanh(Lanes x) {
  const Lanes inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * (x * x * x));
  return splat(0.5f) * x * (splat(1) + fn::tanh(inner));
}

// log x = exponent * log 2 + 2 atanh((m - 1) / (m + 1)), m within sqrt(1/2)..sqrt(2); relative error below 1e-13.
inline double log_double(double x) {
  if (!(x > 0)) return x == 0 ? -HUGE_VAL : NAN;
  if (x == HUGE_VAL) return x;
  uint64_t bits;  // floats, denormal ones too, are normal doubles
  std::memcpy(&bits, &x, 8);
  int64_t exponent = int64_t(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u;
  double m;
  std::memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1), q = s * s;
  double p = 1.0 / 19;
  for (int i = 17; i > 0; i -= 2) p = std::fma(p, q, 1.0 / i);
  return std::fma(double(exponent), 0.69314718055994531, 2 * s * p);
}

// Taylor's series after reduction by multiples of log 2; relative error below 1e-13. For results that are floats.
inline double exp_double(double x) {
  if (x != x) return x;
  x = x > 100 ? 100 : x < -110 ? -110 : x;  // beyond the range of floats
  const double n = std::nearbyint(x * 1.4426950408889634);
  const double r = std::fma(n, -1.9082149292705877e-10, std::fma(n, -6.93147180369123816490e-01, x));
  double p = 1;
  for (int i = 13; i > 0; --i) p = std::fma(p, r / i, 1);
  const uint64_t bits = uint64_t(int64_t(n) + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, 8);
  return p * scale;
}

// Near 0 by the first terms of the series, where 1 would swallow x or what is left of e^x - 1.
inline double log1p_double(double x) {
  return std::fabs(x) < 1e-5 ? x * (1 + x * (-0.5 + x / 3)) : log_double(1 + x);
}
inline double expm1_double(double x) {
  return std::fabs(x) < 1e-5 ? x * (1 + x * (0.5 + x / 6)) : exp_double(x) - 1;
}

// sin (quarter 0) or cos (quarter 1) of x, |x| < 2^53: reduced by multiples of pi/2, which are exact under the fma.
inline double sine_double(double x, int quarter) {
  if (!(std::fabs(x) < 9007199254740992.0)) return NAN;
  const double n = std::nearbyint(x * 0.63661977236758134);
  const double r = std::fma(n, -6.123233995736766e-17, std::fma(n, -1.5707963267948966, x));
  const int64_t turn = int64_t(n) + quarter;
  const double q = r * r;
  double p = 1;
  for (int i = turn & 1 ? 16 : 17; i > 1; i -= 2) p = std::fma(p, -q / (i * (i - 1)), 1);
  if (!(turn & 1)) p *= r;
  return turn & 2 ? -p : p;
}

inline double pow_double(double x, double y) {
  const double size = std::fabs(x);
  if (y == 0 || x == 1) return 1;
  const double power = size == 1 ? 1 : exp_double(y * log_double(size));
  const bool whole = y == std::nearbyint(y), odd = whole && std::fabs(y) < 9007199254740992.0 && int64_t(y) & 1;
  if (std::signbit(x) && odd) return -power;
  return x < 0 && !whole && size != HUGE_VAL ? NAN : power;
}

template <class F>
inline Lanes by_lane(Lanes x, F f) {
  float a[kLanes];
  llmc::store(a, x);
  for (float& value : a) value = float(f(double(value)));
  return load(a);
}
inline Lanes log(Lanes x) { return by_lane(x, log_double); }
inline Lanes log1p(Lanes x) { return by_lane(x, log1p_double); }
inline Lanes expm1(Lanes x) { return by_lane(x, expm1_double); }
inline Lanes sin(Lanes x) {
  return by_lane(x, [](double v) { return sine_double(v, 0); });
}
inline Lanes cos(Lanes x) {
  return by_lane(x, [](double v) { return sine_double(v, 1); });
}
inline Lanes pow(Lanes x, Lanes y) {
  float a[kLanes], b[kLanes];
  llmc::store(a, x);
  llmc::store(b, y);
  for (int i = 0; i < kLanes; ++i) a[i] = float(pow_double(a[i], b[i]));
  return load(a);
}

}  // namespace llmc::fn
