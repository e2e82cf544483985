// AMX's tiles are more state than Linux keeps for a thread unasked. Comes in: nothing. Goes out: whether code that uses
// tiles may run; true where this code uses none.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

namespace llmc {

// For the whole process, threads that run already and later ones; asking twice does no harm. errno says why not.
inline bool tiles_allowed() {
#ifdef __AMX_TILE__
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA (asm/prctl.h, Linux 5.16)
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return true;
#endif
}

}  // namespace llmc
