#include "megarl/policy_loss.h"

#include "megarl/device.h"

namespace megarl::cuda {
namespace {

constexpr int kFewThreads = 256;   // of a block: tokens alone, or short sequences
constexpr int kManyThreads = 768;  // sequences of more than kLongTokens on average
constexpr int64_t kLongTokens = 4096;

// Every lane of a warp gets the sum of all; the order is the same in each.
__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1) x += __shfl_xor_sync(kAllLanes, x, bits);
  return x;
}

// What the block's threads have of a sequence -> all of it, in every thread.
template <int kThreads>
__device__ __forceinline__ SequenceSums sum_of_block(SequenceSums mine) {
  constexpr int kWarps = kThreads / 32;
  MEGARL_SHARED(SequenceSums, of_warp, [kWarps]);
  mine.count = sum_of_warp(mine.count);
  mine.log_ratio = sum_of_warp(mine.log_ratio);
  mine.advantage = sum_of_warp(mine.advantage);
  mine.measure = sum_of_warp(mine.measure);
  mine.weight = sum_of_warp(mine.weight);
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1)
    mine.highest = fmaxf(mine.highest, __shfl_xor_sync(kAllLanes, mine.highest, bits));
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = mine;
  __syncthreads();
  mine = of_warp[0];
  for (int k = 1; k < kWarps; ++k) mine.merge(of_warp[k]);
  __syncthreads();  // the next sequence writes there again
  return mine;
}

// Writes the sums of this block; the block that is last to do so adds up those of all, in the
// order of the blocks, and leaves the counter at 0 for the next launch.
template <int kThreads>
__device__ __forceinline__ void finish(const PolicyLoss& args, double (&sums)[kNumPolicySums]) {
  constexpr int kWarps = kThreads / 32;
  MEGARL_SHARED(double, of_warp, [kWarps][kNumPolicySums]);
  MEGARL_SHARED(bool, is_last, [1]);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int blocks = gridDim.x;
  unsigned* counter = static_cast<unsigned*>(args.workspace);
  double* rows = static_cast<double*>(args.workspace) + 1;  // [kNumPolicySums, blocks]
#pragma unroll
  for (int i = 0; i < kNumPolicySums; ++i) {
    const double sum = sum_of_warp(sums[i]);
    if (lane == 0) of_warp[warp][i] = sum;
  }
  __syncthreads();
  if (thread < kNumPolicySums) {
    double sum = 0.;
    for (int k = 0; k < kWarps; ++k) sum += of_warp[k][thread];
    rows[thread * blocks + blockIdx.x] = sum;
    __threadfence();
  }
  __syncthreads();
  if (thread == 0) is_last[0] = atomicAdd(counter, 1u) == static_cast<unsigned>(blocks) - 1u;
  __syncthreads();
  if (!is_last[0]) return;
  __threadfence();
  const volatile double* all = rows;  // other blocks wrote it
  for (int i = warp; i < kNumPolicySums; i += kWarps) {
    double sum = 0.;
    for (int k = lane; k < blocks; k += 32) sum += all[i * blocks + k];
    sum = sum_of_warp(sum);
    if (lane == 0) put_sum(args, i, sum);
  }
  if (thread == 0) *counter = 0u;
}

// A block takes every gridDim.x-th stretch of as many tokens as it has threads.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kManyThreads / kThreads) token_kernel(PolicyLoss args) {
  const float inverse = 1.f / *args.normaliser;
  double sums[kNumPolicySums] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < args.num_tokens;
       t += step)
    args.dlogp[t] = add_token(args, t, SequenceTerms{}, inverse, sums);
  finish<kThreads>(args, sums);
}

// A block takes every gridDim.x-th sequence, and reads it twice.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kManyThreads / kThreads) sequence_kernel(PolicyLoss args) {
  const float inverse = 1.f / *args.normaliser;
  double sums[kNumPolicySums] = {};
  for (int64_t k = blockIdx.x; k < args.num_sequences; k += gridDim.x) {
    const TokenRange tokens = sequence_tokens(args, k);
    SequenceSums mine;
    for (int64_t t = tokens.begin + threadIdx.x; t < tokens.end; t += kThreads) mine.add(args, t);
    const SequenceTerms sequence(sum_of_block<kThreads>(mine), args);
    for (int64_t t = tokens.begin + threadIdx.x; t < tokens.end; t += kThreads)
      args.dlogp[t] = add_token(args, t, sequence, inverse, sums);
  }
  finish<kThreads>(args, sums);
}

}  // namespace

int policy_loss(const PolicyLoss& args, void* stream) {
  const bool by_sequence = args.by_sequence();
  const int64_t parts =
      by_sequence ? args.num_sequences : (args.num_tokens + kFewThreads - 1) / kFewThreads;
  // Of the sizes alone, so that the order of sums does not depend on the card.
  const int64_t blocks = parts < 1 ? 1 : parts < args.max_blocks ? parts : args.max_blocks;
  if (!by_sequence) {
    MEGARL_LAUNCH(token_kernel<kFewThreads>, dim3(blocks), dim3(kFewThreads), 0, stream, args);
  } else if (args.num_tokens <= kLongTokens * args.num_sequences) {
    MEGARL_LAUNCH(sequence_kernel<kFewThreads>, dim3(blocks), dim3(kFewThreads), 0, stream, args);
  } else {
    MEGARL_LAUNCH(sequence_kernel<kManyThreads>, dim3(blocks), dim3(kManyThreads), 0, stream,
                  args);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace megarl::cuda
