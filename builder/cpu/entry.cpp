// The C ABI of one rank: what the runtime calls. Everything that differs between models stands in the generated engine.h.
//
// Comes in: the rank's memory, then steps. Goes out: logits. A step is run by all threads of the rank at once; a step that
// the code was not compiled for is refused before anything is written.
#include "engine.h"
#include "limits.h"
#include "plugins/cpu/amx_permission.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <xmmintrin.h>

namespace llmc {
namespace {

constexpr int kMaxThreads = 1024;
// Subnormals count (E4M3 weights are decoded through them) and rounding is to nearest, whatever the process has set.
constexpr unsigned kFloatingPoint = 0x1F80;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};

struct Engine {
  llmc_rank rank;
  std::unique_ptr<uint8_t, Free> scratch;
  RankComm comm;
  Pool pool;
  Ctx ctx;
  const Range* range = nullptr;

  Engine(const llmc_rank& r, std::unique_ptr<uint8_t, Free> memory)
      : rank(r), scratch(std::move(memory)), comm(r.comm, r.rank, r.tp, kSlotBytes), pool(r.threads) {
    ctx.rank = &rank;
    ctx.threads = rank.threads;
    ctx.pool = &pool;
    ctx.comm = &comm;
    ctx.scratch_memory = scratch.get();
    ctx.shared_scratch = whole_pages(kSharedScratch);
    ctx.thread_scratch = whole_pages(kThreadScratch);
  }

  static void work(void* engine, int tid) {
    const Engine& e = *static_cast<Engine*>(engine);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kFloatingPoint);
    e.range->step(e.ctx, tid);
    _mm_setcsr(before);
  }
};

// What is wrong with the memory that a rank is given; empty when nothing is.
struct Message {
  char text[256] = "";

  __attribute__((format(printf, 2, 3))) bool say(const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return false;
  }
};

bool check_pointer(const void* p, int64_t bytes, const char* name, Message& message) {
  if (bytes > 0 && !p) return message.say("%s is null; this rank needs %lld bytes", name, static_cast<long long>(bytes));
  if (reinterpret_cast<uintptr_t>(p) % 64) return message.say("%s does not start on a 64-byte boundary", name);
  return true;
}

bool check_slots(const llmc_rank& r, Message& message) {
  if (kStateSlotBytes && r.num_slots < 1)
    return message.say("num_slots is %lld; one at least is needed", static_cast<long long>(r.num_slots));
  return check_pointer(r.state, kStateSlotBytes * r.num_slots, "state", message);
}

bool check(const llmc_rank& r, Message& message) {
  if (r.rank != kRank || r.tp != kRanks)
    return message.say("this code is rank %d of %d, not rank %d of %d", kRank, kRanks, r.rank, r.tp);
  if (r.threads < 1 || r.threads > kMaxThreads)
    return message.say("threads is %d; 1 to %d can run a rank", r.threads, kMaxThreads);
  if (r.num_blocks < 1) return message.say("num_blocks is %lld; one at least is needed", static_cast<long long>(r.num_blocks));
  return check_pointer(r.weights, kWeightsBytes, "weights", message) &&
         check_pointer(r.shared, kSharedBytes, "shared", message) &&
         check_pointer(r.arena, kArenaBytes, "arena", message) &&
         check_pointer(r.kv, kBlockBytes * r.num_blocks, "kv", message) &&
         check_slots(r, message) && check_pointer(r.comm, kRanks > 1 ? kCommHeaderBytes : 0, "comm", message);
}

const Range* find_range(const llmc_step& step) {
  for (const Range& range : kRanges)
    if (step.num_tokens >= range.min && step.num_tokens <= range.max) return &range;
  return nullptr;
}

// Whether kernels stay within tables, cache and scratch: ids are rows of the embedding, sequences cover the tokens, each
// token stands at its position, blocks cover the sequences, and states have a slot.
bool check_sequences(const llmc_step& step, const llmc_rank& rank) {
  if (step.num_seqs < 1 || step.num_seqs > kMaxSequences || step.query_start[0] != 0) return false;
  for (int s = 0; s < step.num_seqs; ++s) {
    const int count = step.query_start[s + 1] - step.query_start[s], context = step.context_len[s];
    if (count < 1 || context < count || context > kMaxContext) return false;
    const int64_t blocks = (context + kBlockSize - 1) / kBlockSize;
    if (blocks > step.block_table_stride) return false;
    const int32_t* table = step.block_tables + int64_t(s) * step.block_table_stride;
    for (int64_t b = 0; b < blocks; ++b)
      if (table[b] < 0 || table[b] >= rank.num_blocks) return false;
    if (kStateSlotBytes && (step.state_slots[s] < 0 || step.state_slots[s] >= rank.num_slots)) return false;
    for (int t = step.query_start[s]; t < step.query_start[s + 1]; ++t)
      if (step.positions[t] != context - step.query_start[s + 1] + t) return false;
  }
  return step.query_start[step.num_seqs] == step.num_tokens;
}

bool check_ids(const llmc_step& step) {
  for (int t = 0; t < step.num_tokens; ++t)
    if (step.ids[t] < 0 || step.ids[t] >= kVocabulary) return false;
  return true;
}

bool check_rows(const llmc_step& step, int most) {
  if (step.num_rows < 0 || step.num_rows > most) return false;
  for (int i = 0; i < step.num_rows; ++i)
    if (step.rows[i] < 0 || step.rows[i] >= step.num_tokens) return false;
  return true;
}

}  // namespace
}  // namespace llmc

using llmc::Engine;

extern "C" int32_t llmc_abi_version(void) { return LLMC_ABI_VERSION; }

extern "C" void* llmc_create(const llmc_rank* rank, char* err, int32_t err_len) {
  llmc::Message message;
  const auto fail = [&] {
    if (err && err_len > 0) snprintf(err, size_t(err_len), "%s", message.text);
    return nullptr;
  };
  if (!llmc::check(*rank, message)) return fail();
  if (!llmc::tiles_allowed()) {
    message.say("Linux does not let this process use AMX's tiles (arch_prctl ARCH_REQ_XCOMP_PERM: %s); it takes Linux 5.16 "
                "and a sandbox that allows the call; a plan for cpu:x86-64-v4-bf16 needs neither", std::strerror(errno));
    return fail();
  }
  const int64_t bytes = llmc::scratch_bytes(llmc::whole_pages(llmc::kSharedScratch),
                                            llmc::whole_pages(llmc::kThreadScratch), rank->threads);
  std::unique_ptr<uint8_t, llmc::Free> scratch(
      static_cast<uint8_t*>(std::aligned_alloc(llmc::kScratchAlign, size_t(bytes + llmc::kScratchAlign))));
  if (!scratch) {
    message.say("no memory for %lld bytes of scratch", static_cast<long long>(bytes));
    return fail();
  }
  try {
    return new Engine(*rank, std::move(scratch));
  } catch (const std::exception& error) {
    message.say("cannot start %d threads: %s", rank->threads, error.what());
    return fail();
  }
}

extern "C" int32_t llmc_run(void* handle, const llmc_step* step) {
  Engine& engine = *static_cast<Engine*>(handle);
  if (engine.comm.failed()) return 2;
  const llmc::Range* range = llmc::find_range(*step);
  if (!range || !llmc::check_ids(*step) || !llmc::check_rows(*step, range->rows) ||
      !llmc::check_sequences(*step, engine.rank))
    return 1;
  engine.range = range;
  engine.ctx.step = step;
  if (step->stamps) step->stamps[0] = llmc::clock_ns();
  engine.pool.run(Engine::work, &engine);
  if (step->stamps) step->stamps[range->launches] = llmc::clock_ns();
  return engine.comm.failed() ? 2 : 0;
}

extern "C" void llmc_destroy(void* handle) { delete static_cast<Engine*>(handle); }

extern "C" void llmc_abort(uint8_t* comm) { llmc::comm_abort(comm); }
