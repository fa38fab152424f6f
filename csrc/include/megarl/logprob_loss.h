// Logprob, entropy, policy loss and its gradient to the logits, from one read of the logits.
//
// For a vocabulary that is whole on this rank, and a loss that is a sum over tokens; formulas in
// megarl/ops/logprob_loss.py.
#pragma once
#include "megarl/logprob.h"
#include "megarl/policy_math.h"

namespace megarl {

struct LogprobLoss {
  LogitRows in;              // all columns of the vocabulary; vocab_start is 0
  const float* prox;         // [rows]
  const float* advantages;   // [rows]
  const float* weight;       // [rows] of the behaviour policy, bounded; null: 1
  const float* ref;          // [rows] or null
  const float* num_tokens;   // [], N
  PolicySettings settings;
  float* logp;     // [rows], nats; 0 where masked
  float* entropy;  // [rows], nats; 0 where masked
  void* grad;      // [rows, width] of loss / N; may be the logits themselves
  int64_t grad_stride;
  int64_t cluster;  // CUDA: most blocks that share a row; 1 reads a row twice, 0 is the best
};

// x *= scale, unless scale is 1: then x is not touched.
struct ScaleUnlessOne {
  DType dtype;
  const float* scale;  // []
  void* x;             // [size], contiguous
  int64_t size;
};

namespace cpu {
int logprob_loss(const LogprobLoss& args, ParallelFor run);
int scale_unless_one(const ScaleUnlessOne& args, ParallelFor run);
}  // namespace cpu
namespace cuda {
int logprob_loss(const LogprobLoss& args, void* stream);
int scale_unless_one(const ScaleUnlessOne& args, void* stream);
}  // namespace cuda

}  // namespace megarl
