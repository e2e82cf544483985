// How fast this machine reads memory and multiplies: the limits that `llmc bench` holds an engine's speed against.
//
// Comes in: memory, a number of threads. Goes out: rates. It stands in every engine because whoever runs one has no
// compiler, and because a limit is meant for the instructions that the engine itself is made of: products are added by the
// same functions as in linear layers.
#include "plugins/cpu/amx_permission.h"
#include "plugins/cpu/amx_tiles.h"
#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"
#include "plugins/linear/bf16_dot.h"
#include "plugins/linear/int8.h"

#include <vector>

namespace llmc {
namespace {

constexpr int kStep = 64;  // floats

struct alignas(64) Result {
  float value;
};

struct Reads {
  const float* data;
  int64_t steps;
  std::vector<Result> results;

  static void work(void* what, int tid) {
    auto& r = *static_cast<Reads*>(what);
    const Share mine = share(r.steps, tid, int(r.results.size()));
    Lanes total[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (int64_t i = mine.first; i < mine.last; ++i) {
      __builtin_prefetch(r.data + i * kStep + 1024);
      for (int j = 0; j < 4; ++j) total[j] = total[j] + load(r.data + i * kStep + j * kLanes);
    }
    r.results[tid].value = sum(total[0] + total[1] + (total[2] + total[3]));
  }
};

// From here on the compiler does not know what a vector holds, if it is one of its own: wider ones are arrays (tests/emulated).
template <class Vec>
inline void forget(Vec& v) {
  if constexpr (sizeof v <= __BIGGEST_ALIGNMENT__) __asm__ volatile("" : "+v"(v));
}

// Products of vectors in chains that do not wait for one another: more than latency times units, and no more than there are
// registers. `Each`: products of one of a vector's lanes.
template <class Sums, int Each>
struct VectorProducts {
  static constexpr int kChains = 12;
  static constexpr int64_t kOperations = int64_t(kChains) * lin::kWidth * Each * 2;  // of a round
  struct alignas(64) Operands {  // zeros: none takes longer than another
    float sum[kChains][lin::kWidth], weight[lin::kWidth], x[lin::kWidth];
  };
  int64_t count;
  std::vector<Operands> operands;

  VectorProducts(int64_t rounds, int threads) : count(rounds), operands(size_t(threads)) {}

  static void work(void* what, int tid) {
    auto& p = *static_cast<VectorProducts*>(what);
    Operands& own = p.operands[tid];
    const lin::Vec x = lin::vload(own.x);
    lin::Vec weight = lin::vload(own.weight), chain[kChains];
    for (int i = 0; i < kChains; ++i) chain[i] = lin::vload(own.sum[i]);
    for (int64_t k = 0; k < p.count; ++k)
      for (int i = 0; i < kChains; ++i) {
        forget(weight);  // or one product would be made for many sums
        chain[i] = Sums::add(weight, x, chain[i]);
      }
    for (int i = 0; i < kChains; ++i) lin::vstore(own.sum[i], chain[i]);
  }
};

#if LLMC_TILES
// Products in tiles, of which none waits for another.
template <class Words>
struct TileProducts {
  static constexpr int kEach = Words::kWhole ? 4 : 2;  // products of a word
  static constexpr int64_t kOperations = 4 * int64_t(amx::kSide) * amx::kSide * amx::kSide * kEach * 2;  // of a round
  int64_t count;

  TileProducts(int64_t rounds, int) : count(rounds / 16 + 1) {}  // a round takes longer than one of vectors

  static void work(void* what, int) {
    alignas(64) static const float zeros[amx::kTileWords] = {};
    amx::TileShapes shapes;
    shapes.set_piece(amx::kBlockRows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, amx::kTileBytes);
    _tile_loadd(5, zeros, amx::kTileBytes);
    _tile_loadd(6, zeros, amx::kTileBytes);
    _tile_loadd(7, zeros, amx::kTileBytes);
    for (int64_t k = 0; k < static_cast<TileProducts*>(what)->count; ++k) {
      LLMC_TILE_PRODUCT(Words, 0, 4, 6);
      LLMC_TILE_PRODUCT(Words, 1, 4, 7);
      LLMC_TILE_PRODUCT(Words, 2, 5, 6);
      LLMC_TILE_PRODUCT(Words, 3, 5, 7);
    }
  }
};
#endif

// Seconds of `work` on that many threads, which have started before.
double seconds(Pool::Work work, void* what, int threads) {
  Pool pool(threads);
  pool.run([](void*, int) {}, nullptr);
  const int64_t start = clock_ns();
  pool.run(work, what);
  return double(clock_ns() - start) * 1e-9;
}

// Operations a second of products of one kind.
template <class Products>
double rate(int64_t count, int threads) {
  Products products(count, threads);
  return double(products.count) * threads * Products::kOperations / seconds(Products::work, &products, threads);
}

}  // namespace
}  // namespace llmc

extern "C" double llmc_read_rate(const uint8_t* data, int64_t bytes, int32_t threads) {
  llmc::Reads reads{reinterpret_cast<const float*>(data), bytes / int64_t(llmc::kStep * sizeof(float)),
                    std::vector<llmc::Result>(size_t(threads))};
  const double read = double(reads.steps) * llmc::kStep * sizeof(float);
  return read / llmc::seconds(llmc::Reads::work, &reads, threads);
}

extern "C" double llmc_product_rate(int32_t products, int64_t count, int32_t threads) {
  using namespace llmc;
  switch (products) {
    case LLMC_FLOATS: return rate<VectorProducts<lin::FloatSums, 1>>(count, threads);
    case LLMC_INT8_PAIRS: return rate<VectorProducts<lin::WholeSums, 2>>(count, threads);
#if LLMC_BF16
    case LLMC_BF16_PAIRS: return rate<VectorProducts<lin::PairSums, 2>>(count, threads);
#endif
#if LLMC_TILES
    // Tiles are allowed: an engine that may not use them is refused before it is measured.
    case LLMC_BF16_TILES: return tiles_allowed() ? rate<TileProducts<amx::Bf16Words>>(count, threads) : 0;
    case LLMC_INT8_TILES: return tiles_allowed() ? rate<TileProducts<amx::Int8Words>>(count, threads) : 0;
#endif
    default: return 0;
  }
}
