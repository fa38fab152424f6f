// Advantages of packed sequences, and sums by group; the formulas are in megarl/ops/advantages.py.
#pragma once
#include "megarl/base.h"

namespace megarl {

// Sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]. Bounds outside of [0, num_tokens] are
// moved into it; tokens of no sequence are not written.
struct Sequences {
  const int64_t* cu_seqlens;  // [num_sequences + 1]
  const bool* mask;           // [num_tokens], what is under false is not used
  int64_t num_sequences, num_tokens;
};

// From a sequence's end, over its masked tokens, t' the masked one after t:
//   A_t = r_t + gamma V_t' - V_t + gamma lam A_t',   returns_t = A_t + V_t
struct Gae {
  Sequences in;
  const float* rewards;  // [num_tokens]
  const float* values;   // [num_tokens]
  const bool* no_eos;    // [num_sequences], true: V_t' of the last is the value one token later
  double gamma, lam;
  float* advantages;  // [num_tokens], 0 where the mask is false
  float* returns;     // [num_tokens], likewise
};

// sums[0][g] = the masked tokens of group g, sums[1][g] = the sum over them of x, or of
// (x - centres[g])^2. Added in one order: by sequence, then along `members`.
struct GroupSums {
  Sequences in;
  const float* x;                    // [num_tokens]
  const int64_t* group_of_sequence;  // [num_sequences]; outside of [0, num_groups) is in none
  const int64_t* members;            // [num_sequences], sequences ordered by group
  const int64_t* offsets;            // [num_groups + 1], where a group begins in `members`
  const double* centres;             // [num_groups], or null: x itself
  int64_t num_groups;
  double* partials;  // [num_sequences, 2], what a sequence adds
  double* sums;      // [2, num_groups]
};

// out = (x - total / count) / divisor, leave1out: (x - (total - x) / count) / divisor,
// nan in a sequence of no group, 0 where the mask is false.
struct GroupNormalize {
  Sequences in;
  const float* x;                    // [num_tokens]
  const int64_t* group_of_sequence;  // [num_sequences]
  const double* totals;              // [num_groups]
  const double* counts;              // [num_groups]
  const double* divisors;            // [num_groups]
  int64_t num_groups;
  bool leave1out;
  float* out;  // [num_tokens]
};

namespace cpu {
int gae(const Gae& args, ParallelFor run);
int group_sums(const GroupSums& args, ParallelFor run);
int group_normalize(const GroupNormalize& args, ParallelFor run);
}  // namespace cpu

// 0, or what cudaGetLastError gave.
namespace cuda {
int gae(const Gae& args, void* stream);
int group_sums(const GroupSums& args, void* stream);
int group_normalize(const GroupNormalize& args, void* stream);
}  // namespace cuda

}  // namespace megarl
