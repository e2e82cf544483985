// Where keys and values lie in a block of the paged cache, for one layer. What writes the cache and what reads it share this.
//
//   read in vectors    K [kv_head][head_dim][slot], then V [kv_head][slot][v_dim]
//   read in tiles      of each KV head K [slot / 16][head_dim / 2][slot % 16][2],
//   (AMX, not float)   then V [slot / 32][v_dim / 16][slot % 32 / 2][16][2], in a block of 16 with 16 for 32:
//                      second operands of amx_tiles.h, which are loaded from where they lie; what a head reads is one run
#pragma once
#include <type_traits>

#include "plugins/cpu/fp8.h"

namespace llmc {

// Keys or values in numbers of KV from the layer's first one in a block; block_size is 16, 32, 64, 128 or 256.
template <int KH, int D, int DV, int BS, class KV>
struct BlockLayout {
  using Number = KV;
  static constexpr int kBlockSize = BS;
  static constexpr int kHead = BS * (D + DV);  // numbers of a KV head, where they are one run
  static constexpr bool kTiled = LLMC_TILES && sizeof(KV) <= 2 && D % 32 == 0 && DV % 32 == 0;
  static constexpr float kRead = kTiled ? 1 : kLoaded<KV>;  // what a number that was read must be multiplied by
  static constexpr int kRun = BS < 32 ? BS : 32;  // keys of a tile of values

  static constexpr int64_t key(int head, int slot, int d) {
    if constexpr (kTiled) return int64_t(head) * kHead + slot / 16 * 16 * D + d / 2 * 32 + slot % 16 * 2 + d % 2;
    return (int64_t(head) * D + d) * BS + slot;
  }
  static constexpr int64_t value(int head, int slot, int d) {
    if constexpr (kTiled)
      return int64_t(head) * kHead + BS * D + slot / kRun * kRun * DV + d / 16 * kRun * 16 + slot % kRun / 2 * 32 + d % 16 * 2 +
             slot % 2;
    return int64_t(KH) * D * BS + (int64_t(head) * BS + slot) * DV + d;
  }
};

// Brings line `line` behind `from` near. Inlined: a call that does nothing else g++ drops.
template <_mm_hint To = _MM_HINT_T1>
[[gnu::always_inline]] inline void fetch(const void* from, int line) {
  _mm_prefetch(static_cast<const char*>(from) + 64 * line, To);
}

// Brings what a unit reads in tiles near, a tile's bytes at a time, block after block.
template <class LAYOUT, int COUNT>
class Fetching {
  using KV = typename LAYOUT::Number;
  static constexpr int kNumbers = 512, kLines = kNumbers * sizeof(KV) / 64;  // of a tile
  static constexpr int kTiles = LAYOUT::kHead / kNumbers;                    // of a block

 public:
  Fetching(const KV* const* blocks, int head) : blocks_(blocks), run_(LAYOUT::key(head, 0, 0)) {
    while (block_ < COUNT && !blocks_[block_]) ++block_;
  }

  [[gnu::always_inline]] void tile() {
    if (block_ >= COUNT || !blocks_[block_]) return;
    const KV* from = blocks_[block_] + run_ + tile_ * kNumbers;
    for (int line = 0; line < kLines; ++line) fetch(from, line);
    if (++tile_ == kTiles) ++block_, tile_ = 0;
  }

 private:
  const KV* const* const blocks_;
  const int64_t run_;
  int block_ = 0, tile_ = 0;
};

// What a tile of queries reads of one partition, all numbers relative to its first key.
template <class LAYOUT, int PARTITION>
struct Span {
  using KV = typename LAYOUT::Number;
  static constexpr int BS = LAYOUT::kBlockSize;
  using Fetching = llmc::Fetching<LAYOUT, PARTITION / BS>;

  const KV* blocks[PARTITION / BS];  // by block within the partition; only those from first_group on are set
  const KV* next[PARTITION / BS];    // what the thread reads thereafter: those of its next unit, null where it needs none,
  int next_head;                     // and the KV head
  int first_group, end_group;        // groups of 16 keys that are touched
  int end;                           // one past the last key that is read

  const KV* keys(int head, int key) const { return blocks[key / BS] + LAYOUT::key(head, key % BS, 0); }
  const KV* values(int head, int key) const { return blocks[key / BS] + LAYOUT::value(head, key % BS, 0); }
  // The same key of the next unit, null where it needs none.
  const KV* next_keys(int key) const {
    const KV* block = next[key / BS];
    return block ? block + LAYOUT::key(next_head, key % BS, 0) : nullptr;
  }
};

}  // namespace llmc
