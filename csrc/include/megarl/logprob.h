// Token logprob and entropy over a sharded vocabulary; the formulas are in megarl/ops/logprob.py.
//
// Exponentials are powers of 2: with c = log2(e) / temperature, x_j c is logit j in bits.
#pragma once
#include "megarl/base.h"

namespace megarl {

// What names the rows: the same in forward and gradient.
struct LogitRows {
  DType dtype;
  const void* logits;            // [rows, width], row_stride elements apart, any alignment
  int64_t row_stride;
  const int64_t* labels;         // [rows], of the whole vocabulary
  const float* inv_temperature;  // [rows], or one number if inv_temperature_stride is 0
  int64_t inv_temperature_stride;
  const bool* mask;              // [rows], rows under false are skipped; or null: all count
  const int32_t* keep;           // [rows, (width + 31) / 32], bit j of word k keeps column
  int64_t keep_stride;           //   32 k + j; or null: all are kept
  int64_t rows, width;
  int64_t num_valid;             // columns at or past it are padding
  int64_t vocab_start;           // label of column 0
};

// parts[row] = { m, s, t, l }: m = max_j x_j c, s = sum_j 2^(x_j c - m),
// t = sum_j 2^(x_j c - m) (x_j c - m), l = x_label c - m, or -inf where the label is not here.
// A shard without a column to count gives { -inf, 0, 0, -inf }; skipped rows are not written.
struct LogprobStats {
  LogitRows in;
  bool with_entropy;  // false leaves t at 0
  float* parts;       // [rows, 4]
};

// Merges the parts of tp shards.
struct LogprobCombine {
  const float* parts;  // [tp, rows, 4]
  const bool* mask;    // as in LogitRows; skipped rows get 0 everywhere
  int64_t tp, rows;
  bool with_entropy;
  float* logp;     // [rows], nats
  float* entropy;  // [rows], nats; 0 without entropy
  float* log_z;    // [rows, 2]: m and log2 s of the whole row; their sum would lose bits of m
};

// grad_j = ( g_logp (1[j = label] - p_j) - g_entropy p_j (log p_j + H) ) / temperature
struct LogprobGrad {
  LogitRows in;
  const float* log_z;         // [rows, 2]
  const float* entropy;       // [rows]
  const float* grad_logp;     // [rows]
  const float* grad_entropy;  // [rows] or null
  void* grad;                 // [rows, width] in the logits' dtype; may be the logits themselves
  int64_t grad_stride;
};

namespace cpu {
int logprob_stats(const LogprobStats& args, ParallelFor run);
int logprob_combine(const LogprobCombine& args, ParallelFor run);
int logprob_grad(const LogprobGrad& args, ParallelFor run);
}  // namespace cpu

// 0, or what cudaGetLastError gave.
namespace cuda {
int logprob_stats(const LogprobStats& args, void* stream);
int logprob_combine(const LogprobCombine& args, void* stream);
int logprob_grad(const LogprobGrad& args, void* stream);
}  // namespace cuda

}  // namespace megarl
