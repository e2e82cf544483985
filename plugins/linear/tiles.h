// The inner loops of linear: a tile of rows times a panel of weights. Every output is one chain of fused multiply-adds over
// k from 0 up, whatever the tile, so that results do not depend on how rows are grouped or which loop ran. Where a group of
// k has a scale, a chain is that of a group, and groups are added in order. Of INT8 the sums are whole numbers.
//
// x of a tile of R rows is interleaved: x[k * R + r].
#pragma once
#include <algorithm>
#include <utility>

#include "plugins/linear/formats.h"
#include "plugins/linear/int4.h"

namespace llmc::lin {

// Rows of the largest tile, on unpacked weights and on packed ones, which need registers to decode in.
constexpr int kMaxTile = LLMC_WIDE ? 12 : 6;
constexpr int kMaxPackedTile = LLMC_WIDE ? 12 : 5;
// k that are unpacked at once: a piece [kBlock][kPiece] stays in the L1 cache. Tactics, which targets describe, come as
// macros (profiles/tactics.py).
constexpr int kBlock = LLMC_BLOCK;
constexpr int kPackedBlock = 64;
constexpr int kAhead = LLMC_PREFETCH_BYTES;  // prefetches across the end of a page, where hardware stops

// In how many parts a tile of R rows takes a panel, so that accumulators stay in registers (32 wide, 16 narrow).
constexpr int parts_for(int rows) { return LLMC_WIDE ? (rows <= 6 ? 1 : 2) : rows <= 1 ? 1 : rows <= 3 ? 2 : 4; }

template <class F>
[[gnu::always_inline]] inline void prefetch(const typename F::T* w) {
  constexpr int bytes = F::kRow * sizeof(*w);
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + line);
}

// fn(0), .., fn(N - 1), each number a constant: so that the compiler takes arrays of vectors apart into registers.
template <class Fn, size_t... I>
[[gnu::always_inline]] inline void unrolled(const Fn& fn, std::index_sequence<I...>) {
  (fn(std::integral_constant<int, I>()), ...);
}
template <int N, class Fn>
[[gnu::always_inline]] inline void unrolled(const Fn& fn) {
  unrolled(fn, std::make_index_sequence<N>());
}

// The vectors of a tile that one part of a panel takes: sums of them are kept in registers.
template <class F, int R, int Parts, int Part, size_t... J>
struct PartSums {
  Vec sum[kVecs / Parts][R];

  // Which of `sum` belongs to vector j.
  static constexpr int at(int j) {
    int before = 0;
    for (int i = 0; i < j; ++i) before += F::in_part(Parts, i) == Part;
    return before;
  }

  // Calls fn(index) for the vectors of this part.
  template <class Fn>
  [[gnu::always_inline]] static void each(const Fn& fn) {
    const auto one = [&](auto index) {
      if constexpr (F::in_part(Parts, decltype(index)::value) == Part) fn(index);
    };
    (one(std::integral_constant<int, J>()), ...);
  }

  [[gnu::always_inline]] void clear() {
    each([&](auto index) {
      unrolled<R>([&](auto r) { sum[at(index)][r] = vzero(); });
    });
  }

  // += x * weights, `count` of k.
  [[gnu::always_inline]] void add(const typename F::T* w, int count, const float* x) {
    for (int k = 0; k < count; ++k, w += F::kRow, x += R) {
      if constexpr (Part == 0) prefetch<F>(w);
      each([&](auto index) {
        constexpr int j = decltype(index)::value;
        const Vec value = F::template decode<j>(w);
        unrolled<R>([&](auto r) { sum[at(j)][r] = F::Sums::add(value, vsplat(x + r), sum[at(j)][r]); });
      });
    }
  }
};

// acc[R][64] += x * one part of a panel, `count` of k; from zero where `first`.
template <class F, int R, int Parts, int Part, size_t... J>
__attribute__((noinline)) void packed_part(const typename F::T* w, int count, const float* x, float* acc, bool first,
                                           std::index_sequence<J...>) {
  PartSums<F, R, Parts, Part, J...> part;
  if (first) {
    part.clear();
  } else {
    part.each([&](auto index) {
      constexpr int j = decltype(index)::value;
      unrolled<R>([&](auto r) { part.sum[part.at(j)][r] = F::template take<j>(acc + r * kPanel, kPiece); });
    });
  }
  part.add(w, count, x);
  part.each([&](auto index) {
    constexpr int j = decltype(index)::value;
    unrolled<R>([&](auto r) { F::template put<j>(part.sum[part.at(j)][r], acc + r * kPanel, kPiece); });
  });
}

// The same for a group with its scale: += scale * (x * part), where x ends in minus its sum and the zero points are a row.
template <class F, int R, int Parts, int Part, size_t... J>
__attribute__((noinline)) void packed_group(const typename F::Weight& w, int count, const float* x, float* acc,
                                            bool first, std::index_sequence<J...>) {
  PartSums<F, R, Parts, Part, J...> part;
  part.clear();
  part.add(w.bytes, count, x);
  part.add(w.zero, 1, x + count * R);
  part.each([&](auto index) {
    constexpr int j = decltype(index)::value;
    const Vec scale = F::template scale<j>(w.scale);
    unrolled<R>([&](auto r) {
      float* to = acc + r * kPanel + j * kWidth;
      vstore(to, vfma(part.sum[part.at(j)][r], scale, first ? vzero() : vload(to)));
    });
  });
}

// Calls f.template operator()<Parts, Part>() for the parts that make up `half` 0 or 1 of a panel, or all of it (-1).
template <int R, class Fn>
[[gnu::always_inline]] inline void each_part(int half, const Fn& f) {
  constexpr int parts = parts_for(R);
  if constexpr (parts == 1) {
    if (half < 0) return f(std::integral_constant<int, 1>(), std::integral_constant<int, 0>());
  }
  constexpr std::integral_constant<int, parts < 4 ? 2 : 4> count;
  if constexpr (count == 2) {
    if (half != 1) f(count, std::integral_constant<int, 0>());
    if (half != 0) f(count, std::integral_constant<int, 1>());
  } else {
    if (half != 1) f(count, std::integral_constant<int, 0>()), f(count, std::integral_constant<int, 1>());
    if (half != 0) f(count, std::integral_constant<int, 2>()), f(count, std::integral_constant<int, 3>());
  }
}

// acc[R][64] = x * panel from the packed bytes, all of k. `half` 0 or 1: only that part of 2; -1: all. Where a panel is
// taken in parts, all of them take a piece of k before the next one is read: it stays in the L1 cache.
template <class F, int R>
void packed_tile(typename F::Weight w, int k_count, const float* x, float* acc, int half) {
  constexpr auto vecs = std::make_index_sequence<kVecs>();
  for (int k = 0, count; k < k_count; k += count) {
    if constexpr (F::kGrouped) {
      count = group_size(k, k_count, w.start);
      each_part<R>(half, [&](auto parts, auto part) { packed_group<F, R, parts, part>(w, count, x, acc, k == 0, vecs); });
      w = {w.bytes + count * F::kRow, w.scale + kPanel, w.zero + F::kRow, w.start};
      x += (count + 1) * R;
    } else {
      count = parts_for(R) == 1 && half < 0 ? k_count : std::min(kPackedBlock, k_count - k);
      each_part<R>(half, [&](auto parts, auto part) { packed_part<F, R, parts, part>(w, count, x, acc, k == 0, vecs); });
      w += count * F::kRow;
      x += count * R;
    }
  }
}

// Many rows: the first tile that multiplies a piece of a block decodes it, and leaves floats for the others. A piece is the
// two vectors of a panel that share most of their decoding. Sums lie in the order of vectors until `settle`.
constexpr int kPieces = kVecs / 2;
constexpr int piece_vector(int piece, int i) { return piece / 2 * 4 + piece % 2 + 2 * i; }
constexpr int kSecond = 2 * kWidth;  // from a piece's first vector to its second, among sums and scales

// Rows of a piece: k of a block, or of a group and its zero points.
template <class F>
constexpr int kRows = F::kGrouped ? kGroup + 1 : kBlock;

// A piece's weights from packed bytes, a k after the other. `ahead` is what the thread reads next: fetching it takes as long
// as many multiplications, and hardware does not foresee it.
template <class F, int Piece>
struct Unpacking {
  const typename F::T* w;
  float* floats;
  const char* ahead;

  [[gnu::always_inline]] void next(Vec& a, Vec& b) {
    a = F::template decode<piece_vector(Piece, 0)>(w);
    b = F::template decode<piece_vector(Piece, 1)>(w);
    vstore(floats, a);
    vstore(floats + kWidth, b);
    _mm_prefetch(ahead, _MM_HINT_T1);
    w += F::kRow, floats += kPiece, ahead += F::kRow * sizeof(*w) / kPieces;
  }
  void go_to(const typename F::T* row) { w = row; }
};

// The floats that `Unpacking` has left.
struct Unpacked {
  const float* floats;

  [[gnu::always_inline]] void next(Vec& a, Vec& b) {
    a = vload(floats);
    b = vload(floats + kWidth);
    floats += kPiece;
  }
  void go_to(const void*) {}
};

template <int R, class Sums>
struct PieceSums {
  Vec a[R], b[R];

  [[gnu::always_inline]] void clear() {
    unrolled<R>([&](auto r) { a[r] = b[r] = vzero(); });
  }
  [[gnu::always_inline]] void take(const float* acc) {
    unrolled<R>([&](auto r) { a[r] = vload(acc + r * kPanel), b[r] = vload(acc + r * kPanel + kSecond); });
  }
  [[gnu::always_inline]] void put(float* acc) const {
    unrolled<R>([&](auto r) { vstore(acc + r * kPanel, a[r]), vstore(acc + r * kPanel + kSecond, b[r]); });
  }
  // acc += scale * sums.
  [[gnu::always_inline]] void put_scaled(float* acc, const float* scale, bool first) const {
    unrolled<R>([&](auto r) {
      float *low = acc + r * kPanel, *high = low + kSecond;
      vstore(low, vfma(a[r], vload(scale), first ? vzero() : vload(low)));
      vstore(high, vfma(b[r], vload(scale + kSecond), first ? vzero() : vload(high)));
    });
  }

  // += x * weights, `count` of k.
  template <class Weights>
  [[gnu::always_inline]] void add(Weights& weights, int count, const float* x) {
    for (int k = 0; k < count; ++k, x += R) {
      Vec v, w;
      weights.next(v, w);
      unrolled<R>([&](auto r) {
        const Vec s = vsplat(x + r);
        a[r] = Sums::add(v, s, a[r]);
        b[r] = Sums::add(w, s, b[r]);
      });
    }
  }
};

// acc[R][64] at one piece += x * weights, `count` of k; from zero where `first`.
template <int R, class Sums, class Weights>
__attribute__((noinline)) void block_tile(Weights weights, int count, const float* x, float* acc, bool first) {
  PieceSums<R, Sums> sums;
  if (first)
    sums.clear();
  else
    sums.take(acc);
  sums.add(weights, count, x);
  sums.put(acc);
}

// The same for a group: += scale * (x * weights), of which one more row are its zero points.
template <int R, class Sums, class Weights>
__attribute__((noinline)) void group_tile(Weights weights, int count, const float* x, float* acc, bool first,
                                          const uint8_t* zero, const float* scale) {
  PieceSums<R, Sums> sums;
  sums.clear();
  sums.add(weights, count, x);
  weights.go_to(zero);
  sums.add(weights, 1, x + count * R);
  sums.put_scaled(acc, scale, first);
}

// The scales of a panel's group to floats, in the order of vectors.
template <class F, size_t... J>
void unpack_scale(const uint16_t* scale, float* to, std::index_sequence<J...>) {
  (vstore(to + J * kWidth, F::template scale<J>(scale)), ...);
}

// Rows of sums from the order of vectors to that of outputs.
template <class F, size_t... J>
void settle(float* acc, int rows, std::index_sequence<J...>) {
  if constexpr (!F::kInOrder)
    for (int r = 0; r < rows; ++r, acc += kPanel) {
      const Vec sums[] = {vload(acc + J * kWidth)...};
      (F::template put<J>(sums[J], acc, kPiece), ...);
    }
}

// Calls f.template operator()<R>() for R = rows, 1..Max.
template <int Max, class Fn>
inline void with_rows(int rows, const Fn& f) {
  if constexpr (Max > 1) {
    if (rows != Max) return with_rows<Max - 1>(rows, f);
  }
  f(std::integral_constant<int, Max>());
}

}  // namespace llmc::lin
