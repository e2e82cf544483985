// AMX's tiles for a machine without them: what kernels use of AMX-TILE, AMX-BF16, AMX-INT8 and GFNI, by the operations of Intel's
// manual.
// Shapes that the instructions refuse stop the process. After avx512.h, where `EMULATE_AMX` asks for it.
#pragma once
#ifdef EMULATE_AMX

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "avx512.h"

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd

namespace llmc {

struct Tiles8 {
  bool configured = false;
  int rows[8], row_bytes[8];
  uint8_t data[8][16][64];

  void need(bool met) const {
    if (!configured || !met) __builtin_trap();
  }
  void need_product(int sum, int a, int b) const {
    need(rows[sum] == rows[a] && row_bytes[sum] == row_bytes[b] && row_bytes[a] == 4 * rows[b]);
    need(sum != a && sum != b && a != b);
  }
};
inline thread_local Tiles8 tiles_of_thread;

inline void _tile_loadconfig(const void* config) {
  Tiles8& t = tiles_of_thread;
  const auto* bytes = static_cast<const uint8_t*>(config);
  t = Tiles8();
  t.configured = true;
  t.need(bytes[0] == 1);
  for (int i = 0; i < 8; ++i) {
    uint16_t width;
    std::memcpy(&width, bytes + 16 + 2 * i, 2);
    t.rows[i] = bytes[48 + i], t.row_bytes[i] = width;
    t.need(width <= 64 && t.rows[i] <= 16 && (width == 0) == (t.rows[i] == 0));
  }
}
inline void _tile_release() { tiles_of_thread.configured = false; }
inline void _tile_zero(int tile) {
  tiles_of_thread.need(true);
  std::memset(tiles_of_thread.data[tile], 0, sizeof tiles_of_thread.data[tile]);
}
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  Tiles8& t = tiles_of_thread;
  llmc::_tile_zero(tile);
  for (int r = 0; r < t.rows[tile]; ++r)
    std::memcpy(t.data[tile][r], static_cast<const uint8_t*>(from) + r * stride, size_t(t.row_bytes[tile]));
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
  const Tiles8& t = tiles_of_thread;
  t.need(true);
  for (int r = 0; r < t.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.data[tile][r], size_t(t.row_bytes[tile]));
}

// Even and odd columns are summed apart, each from zero and in order; then the two, and that onto the sum.
inline void _tile_dpbf16ps(int sum, int a, int b) {
  Tiles8& t = tiles_of_thread;
  t.need_product(sum, a, b);
  for (int m = 0; m < t.rows[sum]; ++m)
    for (int n = 0; n < t.row_bytes[sum] / 4; ++n) {
      float part[2] = {0, 0}, total;
      for (int k = 0; k < t.rows[b]; ++k)
        for (int i = 0; i < 2; ++i) {
          uint16_t x, y;
          std::memcpy(&x, t.data[a][m] + 4 * k + 2 * i, 2);
          std::memcpy(&y, t.data[b][k] + 4 * n + 2 * i, 2);
          part[i] = fused(of_bf16(x), of_bf16(y), part[i]);
        }
      std::memcpy(&total, t.data[sum][m] + 4 * n, 4);
      total = flushed(flushed(total) + flushed(part[0] + part[1]));
      std::memcpy(t.data[sum][m] + 4 * n, &total, 4);
    }
}

inline void _tile_dpbssd(int sum, int a, int b) {
  Tiles8& t = tiles_of_thread;
  t.need_product(sum, a, b);
  for (int m = 0; m < t.rows[sum]; ++m)
    for (int n = 0; n < t.row_bytes[sum] / 4; ++n) {
      int32_t total;
      std::memcpy(&total, t.data[sum][m] + 4 * n, 4);
      for (int k = 0; k < t.rows[b]; ++k)
        for (int i = 0; i < 4; ++i) total += int8_t(t.data[a][m][4 * k + i]) * int8_t(t.data[b][k][4 * n + i]);
      std::memcpy(t.data[sum][m] + 4 * n, &total, 4);
    }
}

// ---- bytes, and GFNI, which every processor with AMX has

EMULATED __m512i _mm512_max_epu8(__m512i a, __m512i b) {
  return map<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return x > y ? x : y; });
}
EMULATED __m512i _mm512_mask_blend_epi8(__mmask64 m, __m512i a, __m512i b) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b);
  return each<__m512i, uint8_t>([&](int i) { return m >> i & 1 ? y.at[i] : x.at[i]; });
}
// From the lower and the upper eight bytes of each sixteen, a byte of a, then one of b.
EMULATED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b);
  return each<__m512i, uint8_t>([&](int i) { return (i % 2 ? y : x).at[i / 16 * 16 + i % 16 / 2]; });
}
EMULATED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  const auto x = elements<uint8_t>(a), y = elements<uint8_t>(b);
  return each<__m512i, uint8_t>([&](int i) { return (i % 2 ? y : x).at[i / 16 * 16 + 8 + i % 16 / 2]; });
}
EMULATED __m512i _mm512_set1_epi64(long long x) { return each<__m512i, int64_t>([=](int) { return x; }); }
EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
  const auto x = elements<int64_t>(a), i = elements<int64_t>(index);
  return each<__m512i, int64_t>([&](int l) { return x.at[i.at[l] & 7]; });
}
// Bit i of a byte: whether row 7 - i of its eight bytes of a and the byte have an odd number of bits in common, and bit i of b.
EMULATED __m512i _mm512_gf2p8affine_epi64_epi8(__m512i x, __m512i a, int b) {
  const auto bytes = elements<uint8_t>(x), rows = elements<uint8_t>(a);
  return each<__m512i, uint8_t>([&](int l) {
    int y = b;
    for (int i = 0; i < 8; ++i) y ^= __builtin_parity(rows.at[l / 8 * 8 + 7 - i] & bytes.at[l]) << i;
    return uint8_t(y);
  });
}

// Linux's answer to a process that asks for tiles; with EMULATE_NO_TILES in its environment it is no.
template <class... Args>
inline long syscall(long number, Args... args) {
  if (number != SYS_arch_prctl) return ::syscall(number, args...);
  errno = EPERM;
  return std::getenv("EMULATE_NO_TILES") ? -1 : 0;
}

}  // namespace llmc

#endif
