// The library beside kernels that run on a GPU: the sampler, and the machine's limits. It has no steps of its own.
#include "plugins/cpu/abi.h"

extern "C" int32_t llmc_abi_version(void) { return LLMC_ABI_VERSION; }
