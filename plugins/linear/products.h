// How a target multiplies: what instructions a format's columns go through, by what the compiler is told the target has.
#pragma once
#include <type_traits>

#include "plugins/linear/bf16_dot.h"
#include "plugins/linear/int4_tiles.h"
#include "plugins/linear/int8.h"

namespace llmc::lin {

// The format whose K columns AMX tiles multiply.
template <class F>
struct InTiles : F {};
template <class F>
constexpr bool kInTiles = false;
template <class F>
constexpr bool kInTiles<InTiles<F>> = true;
constexpr int kTileColumns = 32;  // of K: sixteen pairs

// How a target multiplies K columns of a weight in F with an x that X prepares: as they are, or in pairs of bf16.
template <class F, class X>
struct AsTheyAre {
  using Format = F;
  using Input = X;
  static Input input(X x) { return x; }
};

template <class F>
struct PairFormat {
  static constexpr bool kExists = false;
};
#if LLMC_BF16
template <>
struct PairFormat<Bf16> {
  static constexpr bool kExists = true;
  using Format = Bf16Pairs;
};
template <>
struct PairFormat<Fp8> {
  static constexpr bool kExists = true;
  using Format = Fp8Pairs;
};
template <int K, class F, class X>
struct InPairs {
  using Pairs = typename PairFormat<F>::Format;
  using Format = std::conditional_t<LLMC_TILES && K % kTileColumns == 0, InTiles<Pairs>, Pairs>;
  using Input = PairInput<X>;
  static Input input(X x) { return {x}; }
};
template <class X>
struct InQuads {
  using Format = InTiles<Int8Quads>;
  using Input = X;
  static Input input(X x) { return x; }
};
#if LLMC_TILES
template <class>
struct InGroupedPairs {
  using Format = InTiles<Int4Pairs>;
  using Input = GroupedPairs;
  static Input input(Grouped x) { return {x.start}; }
};
#else
template <class X>
using InGroupedPairs = AsTheyAre<Int4, X>;
#endif
template <int K, class F>
constexpr bool kQuads = LLMC_TILES && std::is_same_v<F, Int8> && K % (2 * kTileColumns) == 0;
template <int K, class F, class X>
using Products = std::conditional_t<PairFormat<F>::kExists && K % 2 == 0, InPairs<K, F, X>,
                                    std::conditional_t<kQuads<K, F>, InQuads<X>,
                                    std::conditional_t<std::is_same_v<F, Int4>, InGroupedPairs<X>, AsTheyAre<F, X>>>>;
#else
template <int K, class F, class X>
using Products = AsTheyAre<F, X>;
#endif

}  // namespace llmc::lin
