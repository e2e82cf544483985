// An engine whose model is a hash of all tokens so far, read back from KV memory through block tables: a wrong table, a
// lost block or a block of another sequence gives other tokens. Ranks meet at the real barrier, rows go to the real
// sampler. tests/unit/runtime/fake_engine.py has the same model in Python, and writes the weights.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "plugins/cpu/rank_barrier.h"
#include "plugins/sampler/cpu.h"

namespace {

struct Weights {
  int32_t nan_token;  // a context that holds it has NaN logits; the model never chooses it
  int32_t step_us;    // how long a step lasts at least
  int32_t vocab_start, vocab_size, vocab;
  int32_t block_size, max_tokens;
  int32_t hang_token;  // a step that is given it does not end before the gate opens; -1: no token does that
};
struct Slot {
  int32_t token, position;
};
struct Engine {
  llmc_rank rank;
  Weights weights;
  int32_t salt;
  llmc::RankComm comm;
  Slot& slot(const llmc_step& step, int32_t seq, int32_t position) const {
    const int32_t block = step.block_tables[int64_t(seq) * step.block_table_stride + position / weights.block_size];
    return reinterpret_cast<Slot*>(rank.kv)[int64_t(block) * weights.block_size + position % weights.block_size];
  }
};

void write_kv(const Engine& e, const llmc_step& step) {
  for (int32_t s = 0; s < step.num_seqs; ++s)
    for (int32_t t = step.query_start[s]; t < step.query_start[s + 1]; ++t)
      e.slot(step, s, step.positions[t]) = {step.ids[t], step.positions[t]};
}

// Minus one when the context holds the token that stands for a broken computation.
int64_t read_kv(const Engine& e, const llmc_step& step, int32_t seq, int32_t last) {
  int64_t state = e.salt;
  for (int32_t position = 0; position <= last; ++position) {
    const Slot& slot = e.slot(step, seq, position);
    if (slot.token == e.weights.nan_token) return -1;
    state = (state * 31 + slot.token + 1 + (slot.position != position) * 777) % 1000003;
  }
  return state;
}

void write_row(const Engine& e, int64_t state, float* row) {
  for (int32_t v = e.weights.vocab_start; v < e.weights.vocab_start + e.weights.vocab_size; ++v)
    row[v] = state < 0 ? NAN : v == e.weights.nan_token ? -1.0f : float(state * (v + 7) % 1009) / 100.0f;
}

// The gate is a file that the environment names; it opens once that is there.
void wait_for_gate() {
  const char* gate = std::getenv("FAKE_GATE");
  while (gate == nullptr || access(gate, F_OK) != 0) usleep(1000);
}

}  // namespace

extern "C" {

int32_t llmc_abi_version(void) { return LLMC_ABI_VERSION; }

void* llmc_create(const llmc_rank* rank, char* err, int32_t err_len) {
  auto* e = new (std::nothrow) Engine{*rank, {}, 0, {}};
  std::memcpy(&e->weights, rank->weights, sizeof(Weights));
  std::memcpy(&e->salt, rank->shared, sizeof(int32_t));
  if (e->weights.block_size < 1) {
    std::snprintf(err, size_t(err_len), "rank %d: block_size is %d", rank->rank, e->weights.block_size);
    delete e;
    return nullptr;
  }
  e->comm = llmc::RankComm(rank->comm, rank->rank, rank->tp, 64);
  return e;
}

int32_t llmc_run(void* handle, const llmc_step* step) {
  auto& e = *static_cast<Engine*>(handle);
  if (step->num_tokens < 1 || step->num_tokens > e.weights.max_tokens) return 1;
  e.rank.arena[0] = 1;
  if (e.weights.step_us) usleep(useconds_t(e.weights.step_us));
  if (std::count(step->ids, step->ids + step->num_tokens, e.weights.hang_token)) wait_for_gate();
  write_kv(e, *step);
  if (!e.comm.wait()) return 2;
  int32_t seq = 0;
  for (int32_t r = 0; r < step->num_rows; ++r) {
    while (step->query_start[seq + 1] <= step->rows[r]) ++seq;
    write_row(e, read_kv(e, *step, seq, step->positions[step->rows[r]]), step->logits + int64_t(r) * e.weights.vocab);
  }
  return e.comm.wait() ? 0 : 2;
}

void llmc_destroy(void* handle) { delete static_cast<Engine*>(handle); }
void llmc_abort(uint8_t* comm) { llmc::comm_abort(comm); }

}  // extern "C"
