// The C ABI between an engine's compiled code and whoever runs it. Plain C types only; the runtime mirrors these
// structs with ctypes (runtime/native.py, native_sampler.py) and refuses a library whose llmc_abi_version() differs.
#pragma once
#include <stdint.h>

#define LLMC_ABI_VERSION 4

// What a rank keeps for life. All pointers are 64-byte aligned at least.
typedef struct llmc_rank {
  int32_t rank, tp;
  int32_t threads;            // worker threads, this process's calling thread included
  int32_t reserved;
  const uint8_t* weights;     // this rank's weights member, mapped
  const uint8_t* shared;      // weights that all ranks share, mapped
  uint8_t* arena;             // activations; size from the manifest
  uint8_t* kv;                // KV pool: num_blocks blocks for every layer, layouts in plugins/{paged,latent}_attention
  int64_t num_blocks;
  uint8_t* state;             // recurrent states: num_slots slots of every layer, layout in plugins/cpu/recurrent.h
  int64_t num_slots;
  uint8_t* comm;              // memory shared by all ranks, zeroed before the first create; size from the manifest
} llmc_rank;

// One step. All arrays live in memory that every rank sees.
typedef struct llmc_step {
  int32_t num_tokens;         // T, 1..max of the profile
  int32_t num_seqs;
  int32_t num_rows;           // S: rows whose logits are wanted (may be 0)
  int32_t block_table_stride; // row length of block_tables
  const int32_t* ids;         // [T]
  const int32_t* positions;   // [T]
  const int32_t* query_start; // [num_seqs + 1]
  const int32_t* context_len; // [num_seqs], this step's tokens included
  const int32_t* block_tables;// [num_seqs, block_table_stride]
  const int32_t* state_slots; // [num_seqs] each sequence's slot; no two share one
  const int32_t* rows;        // [S] token index of each wanted row
  float* logits;              // [S, vocab]; each rank writes its own columns
  int64_t* stamps;            // [launches + 1] when each launch began and the last ended, in ns; NULL: the step is not timed
} llmc_step;

// One row to sample. Token history is given so that the sampler keeps no state.
typedef struct llmc_sampling {
  float temperature;          // 0 means greedy
  float top_p, min_p;         // 1 and 0 switch off
  int32_t top_k;              // 0 switches off
  float repetition_penalty, presence_penalty, frequency_penalty;  // 1, 0, 0 switch off
  int32_t num_logprobs;       // -1: none wanted; otherwise that many alternatives beside the sampled one
  uint64_t seed;              // the request's seed
  uint64_t counter;           // number of tokens the request has generated so far: random number = f(seed, counter)
  const int32_t* prompt;      // [num_prompt] (repetition penalty covers prompt and output, the others output only)
  int32_t num_prompt;
  int32_t num_output;
  const int32_t* output;      // [num_output]
  const int32_t* bias_ids;    // [num_bias]
  const float* bias;          // [num_bias]
  int32_t num_bias;
  int32_t num_banned;         // ids whose logits become -inf (min_tokens keeps stop ids away)
  const int32_t* banned;
} llmc_sampling;

typedef struct llmc_sampled {
  int32_t token;              // -1: the row held NaN or +inf, or no candidate was left
  float logprob;              // log-softmax of the raw logits (before temperature and truncation) at token
  int32_t rank;               // 1-based rank of token in the raw logits; both 0 unless num_logprobs >= 0
  int32_t reserved;
} llmc_sampled;

// How numbers are multiplied (plugins/cpu/products.py): floats one by one; INT8 in pairs of 16 bits, which vpmaddwd or
// vpdpwssd takes; bf16 in pairs, which vdpbf16ps takes; AMX's tiles.
enum { LLMC_FLOATS = 0, LLMC_INT8_PAIRS, LLMC_BF16_PAIRS, LLMC_BF16_TILES, LLMC_INT8_TILES };

#pragma GCC visibility push(default)  // the rest of an engine's code is compiled hidden
#ifdef __cplusplus
extern "C" {
#endif
int32_t llmc_abi_version(void);
// NULL with a message in err (never longer than err_len) on failure.
void* llmc_create(const llmc_rank* rank, char* err, int32_t err_len);
// 0 on success; 1: T or another count outside the compiled ranges; 2: another rank did not answer in time or has failed.
int32_t llmc_run(void* handle, const llmc_step* step);
void llmc_destroy(void* handle);
// Marks the shared memory so that every waiting rank gives up (returns 2) at once.
void llmc_abort(uint8_t* comm);
// Samples n rows. logits: [n, vocab] raw fp32, not modified; scratch: vocab floats and vocab int32.
// top_ids and top_logprobs: [n, top_stride], filled for rows with num_logprobs > 0, best first.
void llmc_sample(const float* logits, int32_t n, int32_t vocab, const llmc_sampling* params, llmc_sampled* out,
                 int32_t* top_ids, float* top_logprobs, int32_t top_stride, float* scratch, int32_t* scratch_ids);
// This machine's limits, as this code's instructions and this many threads reach them: bytes a second of reading `bytes`
// bytes at `data` (64-byte aligned) once, and operations a second of `count` rounds of products of one kind, a
// multiplication and an addition counting as two. 0: this code has no such instructions.
double llmc_read_rate(const uint8_t* data, int64_t bytes, int32_t threads);
double llmc_product_rate(int32_t products, int64_t count, int32_t threads);
#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
