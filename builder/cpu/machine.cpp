// How fast this machine reads memory and multiplies: the limits that `llmc bench` holds an engine's speed against.
//
// Comes in: memory, a number of threads. Goes out: rates. It stands in every engine because whoever runs one has no
// compiler, and because a limit is meant for the instructions that the engine itself is made of.
#include "plugins/cpu/amx_permission.h"
#include "plugins/cpu/amx_tiles.h"
#include "plugins/cpu/lanes.h"
#include "plugins/cpu/runtime.h"

#include <vector>

namespace llmc {
namespace {

// Chains of multiply-adds that do not wait for one another: more than latency times units, no more than registers.
constexpr int kChains = LLMC_WIDE ? 12 : 6;
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

struct Multiplies {
  int64_t count;
  std::vector<Result> results;

  static void work(void* what, int tid) {
    auto& m = *static_cast<Multiplies*>(what);
    Lanes chain[kChains];
    for (int i = 0; i < kChains; ++i) chain[i] = iota() + splat(float(i));
    for (int64_t k = 0; k < m.count; ++k)
      for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], splat(0.999f), splat(0.001f));
    for (int i = 1; i < kChains; ++i) chain[0] = chain[0] + chain[i];
    m.results[tid].value = sum(chain[0]);
  }
};

#if LLMC_TILES
// Products of bf16 in tiles, of which none waits for another.
struct TileProducts {
  int64_t count;

  static constexpr int64_t kOperations = 4 * int64_t(amx::kSide) * amx::kSide * amx::kPiece * 2;  // of a round
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
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
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

}  // namespace
}  // namespace llmc

extern "C" double llmc_read_rate(const uint8_t* data, int64_t bytes, int32_t threads) {
  llmc::Reads reads{reinterpret_cast<const float*>(data), bytes / int64_t(llmc::kStep * sizeof(float)),
                    std::vector<llmc::Result>(size_t(threads))};
  const double read = double(reads.steps) * llmc::kStep * sizeof(float);
  return read / llmc::seconds(llmc::Reads::work, &reads, threads);
}

extern "C" double llmc_multiply_rate(int64_t count, int32_t threads) {
#if LLMC_TILES
  llmc::tiles_allowed();  // they are: an engine that may not use tiles is refused before it is measured
  llmc::TileProducts products{count / 16 + 1};  // a round takes longer than one of vectors
  return double(products.count) * threads * products.kOperations /
         llmc::seconds(llmc::TileProducts::work, &products, threads);
#else
  llmc::Multiplies multiplies{count, std::vector<llmc::Result>(size_t(threads))};
  const double operations = double(count) * threads * llmc::kChains * llmc::kLanes * 2;
  return operations / llmc::seconds(llmc::Multiplies::work, &multiplies, threads);
#endif
}
