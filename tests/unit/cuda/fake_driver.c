// A driver without a GPU, for tests: enough of libcuda.so.1 for cuda-python to load cubins and "launch" them. Memory of
// the device is memory of the host. Everything that matters is a line in the file that FAKE_CUDA_LOG names, or in a file
// for each process where that is a folder and ends with a slash; arguments of a launch are read as the cubin's own
// parameter table says. FAKE_CUDA_SM, FAKE_CUDA_DRIVER and FAKE_CUDA_GPUS say what machine it is; FAKE_CUDA_FREE how
// much memory is free, in bytes; FAKE_CUDA_GRAPHS how many ready graphs fit into it. A copy to the host of
// FAKE_CUDA_LOST bytes fails. Refused as by a driver: more dynamic shared memory than a function was allowed, grids and
// blocks beyond the limits of the architecture, another number of threads than the kernel was compiled for.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
typedef struct { const uint8_t* image; int number; } Module;
typedef struct { Module* module; char name[256]; int count; int size[64]; unsigned threads, shared; } Function;
typedef struct { int number; } Graph;

enum { FREE_SHARED = 48 << 10, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

static int capturing, graphs, ready_graphs, modules;

static long long setting(const char* name, long long otherwise) {
  const char* text = getenv(name);
  return text ? atoll(text) : otherwise;
}

static void say(const char* format, ...) {
  const char* path = getenv("FAKE_CUDA_LOG");
  char own[4096];
  if (path && *path && path[strlen(path) - 1] == '/') {
    snprintf(own, sizeof own, "%s%d", path, (int)getpid());
    path = own;
  }
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  if (capturing) fputs("captured ", file);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

// For other libraries that use the GPU (fake_nccl.c).
void fake_driver_note(const char* line) { say("%s", line); }

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int* version) { *version = (int)setting("FAKE_CUDA_DRIVER", 13000); return 0; }
Result cuDeviceGetCount(int* count) { *count = (int)setting("FAKE_CUDA_GPUS", 1); return 0; }
Result cuDeviceGet(int* device, int number) { *device = number; return 0; }
Result cuDeviceGetName(char* name, int size, int device) { snprintf(name, (size_t)size, "Fake %d", device); return 0; }
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int sm = (int)setting("FAKE_CUDA_SM", 90);
  *value = attribute == 75 ? sm / 10 : attribute == 76 ? sm % 10 : 1;
  return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)(device + 1); return 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
Result cuCtxSynchronize(void) { say("synchronize"); return 0; }
Result cuCtxSetCurrent(void* context) { say("device %d", (int)(intptr_t)context - 1); return 0; }
Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  *total = (size_t)80 << 30;
  *free = (size_t)setting("FAKE_CUDA_FREE", (long long)70 << 30);
  return 0;
}

Result cuMemAlloc_v2(uint64_t* address, size_t size) {
  void* memory = NULL;
  if (posix_memalign(&memory, 256, size)) return 2;
  *address = (uint64_t)memory;
  say("alloc %llx %zu", (unsigned long long)*address, size);
  return 0;
}
Result cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  if (posix_memalign(address, 4096, size)) return 2;
  memset(*address, 0, size);
  say("pinned %llx %zu", (unsigned long long)(uintptr_t)*address, size);
  return 0;
}
Result cuMemHostRegister_v2(void* address, size_t size, unsigned flags) {
  if ((uintptr_t)address % 4096 || size % 4096) return 1;
  say("register %llx %zu", (unsigned long long)(uintptr_t)address, size);
  return 0;
}
Result cuMemcpyHtoD_v2(uint64_t device, const void* host, size_t size) {
  memcpy((void*)device, host, size);
  say("fill %llx %zu", (unsigned long long)device, size);
  return 0;
}
Result cuMemcpyHtoDAsync_v2(uint64_t device, const void* host, size_t size, void* stream) {
  if (!capturing) memcpy((void*)device, host, size);
  say("upload %llx %llx %zu", (unsigned long long)device, (unsigned long long)(uintptr_t)host, size);
  return 0;
}
Result cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t size, void* stream) {
  if (size == (size_t)setting("FAKE_CUDA_LOST", -1)) return 700;
  if (!capturing) memcpy(host, (void*)device, size);
  say("download %llx %llx %zu", (unsigned long long)(uintptr_t)host, (unsigned long long)device, size);
  return 0;
}

typedef struct {
  size_t sx, sy; int stype; const void* shost; uint64_t sdev; void* sarray; size_t spitch;
  size_t dx, dy; int dtype; void* dhost; uint64_t ddev; void* darray; size_t dpitch;
  size_t width, height;
} Copy2D;
Result cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) {
  if (c->stype != 2 || c->dtype != 1) return 1;
  for (size_t row = 0; !capturing && row < c->height; ++row)
    memcpy((char*)c->dhost + row * c->dpitch, (char*)c->sdev + row * c->spitch, c->width);
  say("rows %llx %zu %llx %zu %zu %zu", (unsigned long long)(uintptr_t)c->dhost, c->dpitch, (unsigned long long)c->sdev,
      c->spitch, c->width, c->height);
  return 0;
}

Result cuStreamCreate(void** stream, unsigned flags) { *stream = (void*)0x5; return 0; }
Result cuStreamSynchronize(void* stream) { return capturing ? 900 : 0; }
Result cuStreamBeginCapture_v2(void* stream, int mode) { say("begin"); capturing = 1; return 0; }
Result cuStreamEndCapture(void* stream, void** graph) {
  capturing = 0;
  Graph* made = malloc(sizeof *made);
  made->number = graphs++;
  say("end %d", made->number);
  *graph = made;
  return 0;
}
Result cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
  if (ready_graphs >= setting("FAKE_CUDA_GRAPHS", 1 << 30)) {
    say("full");
    return OUT_OF_MEMORY;
  }
  ++ready_graphs;
  Graph* made = malloc(sizeof *made);
  *made = *(Graph*)graph;
  *ready = made;
  return 0;
}
Result cuGraphDestroy(void* graph) { free(graph); return 0; }
Result cuGraphExecDestroy(void* ready) {
  say("drop %d", ((Graph*)ready)->number);
  --ready_graphs;
  free(ready);
  return 0;
}
Result cuGraphLaunch(void* ready, void* stream) { say("replay %d", ((Graph*)ready)->number); return 0; }
Result cuEventCreate(void** event, unsigned flags) { *event = (void*)0x6; return 0; }
Result cuEventRecord(void* event, void* stream) { return 0; }
Result cuEventElapsedTime_v2(float* ms, void* from, void* to) { *ms = 0.25f; return 0; }
Result cuEventElapsedTime(float* ms, void* from, void* to) { *ms = 0.25f; return 0; }

Result cuModuleLoadData(void** module, const void* image) {
  if (memcmp(image, "\177ELF\2", 5)) return 200;
  Module* made = malloc(sizeof *made);
  made->image = image;
  // The caller may let go of its bytes: the end of an ELF file is behind its table of sections.
  uint64_t table; uint16_t width, count;
  memcpy(&table, made->image + 0x28, 8); memcpy(&width, made->image + 0x3A, 2); memcpy(&count, made->image + 0x3C, 2);
  size_t end = table + (size_t)width * count;
  for (int i = 0; i < count; ++i) {
    uint32_t kind; uint64_t offset, size;
    memcpy(&kind, made->image + table + i * width + 4, 4);
    memcpy(&offset, made->image + table + i * width + 0x18, 8); memcpy(&size, made->image + table + i * width + 0x20, 8);
    if (kind != 8 && offset + size > end) end = offset + size;
  }
  uint8_t* own = malloc(end);
  memcpy(own, image, end);
  made->image = own;
  made->number = modules++;
  *module = made;
  return 0;
}

// Ordinal and size of each parameter stand in the attributes 0x17 of the section .nv.info.<kernel>, threads in 0x10.
static int read_parameters(Function* function) {
  const uint8_t* b = function->module->image;
  uint64_t table; uint16_t width, count, names;
  memcpy(&table, b + 0x28, 8); memcpy(&width, b + 0x3A, 2); memcpy(&count, b + 0x3C, 2); memcpy(&names, b + 0x3E, 2);
  uint64_t strings;
  memcpy(&strings, b + table + (size_t)names * width + 0x18, 8);
  char wanted[300];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", function->name);
  for (int i = 0; i < count; ++i) {
    const uint8_t* header = b + table + (size_t)i * width;
    uint32_t name; uint64_t offset, size;
    memcpy(&name, header, 4); memcpy(&offset, header + 0x18, 8); memcpy(&size, header + 0x20, 8);
    if (strcmp((const char*)b + strings + name, wanted)) continue;
    for (uint64_t at = offset; at + 4 <= offset + size;) {
      uint16_t bytes;
      memcpy(&bytes, b + at + 2, 2);
      if (b[at] == 4 && b[at + 1] == 0x17) {
        uint16_t ordinal; uint32_t word;
        memcpy(&ordinal, b + at + 8, 2); memcpy(&word, b + at + 12, 4);
        if (ordinal >= 64) return 1;
        function->size[ordinal] = (int)(word >> 18);
        if (ordinal + 1 > function->count) function->count = ordinal + 1;
      }
      if (b[at] == 4 && b[at + 1] == 0x10) {
        uint32_t threads[3];
        memcpy(threads, b + at + 4, 12);
        function->threads = threads[0] * threads[1] * threads[2];
      }
      at += 4 + (b[at] == 4 ? bytes : 0);
    }
    return 0;
  }
  return 1;
}

Result cuModuleGetFunction(void** function, void* module, const char* name) {
  Function* made = calloc(1, sizeof *made);
  made->module = module;
  snprintf(made->name, sizeof made->name, "%s", name);
  if (read_parameters(made)) return 500;
  made->shared = FREE_SHARED;
  *function = made;
  return 0;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  const int sm = (int)setting("FAKE_CUDA_SM", 90);
  const int most = (sm == 80 ? 163 : sm == 90 || sm == 100 ? 227 : 99) << 10;
  if (attribute != 8 || value < 0 || value > most) return INVALID_VALUE;
  ((Function*)function)->shared = (unsigned)value;
  say("shared %d %d", ((Function*)function)->module->number, value);
  return 0;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** arguments, void** extra) {
  const Function* f = function;
  if (!gx || !gy || !gz || gx > 0x7FFFFFFF || gy > 65535 || gz > 65535) return INVALID_VALUE;
  if (bx * by * bz != f->threads || bx * by * bz > 1024 || shared > f->shared) return INVALID_VALUE;
  char text[4096];
  int used = 0;
  for (int i = 0; i < f->count; ++i) {
    uint64_t value = 0;
    memcpy(&value, arguments[i], (size_t)f->size[i]);
    used += snprintf(text + used, sizeof text - (size_t)used, " %d:%llx", f->size[i], (unsigned long long)value);
  }
  say("launch %d %s %u,%u,%u %u,%u,%u %u%s", f->module->number, f->name, gx, gy, gz, bx, by, bz, shared, text);
  return 0;
}

Result cuGetErrorName(int error, const char** text) { *text = "CUDA_ERROR"; return 0; }
Result cuGetErrorString(int error, const char** text) { *text = "the fake driver refuses"; return 0; }
Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, versioned);
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
