#include "megarl/advantages.h"

#include "megarl/device.h"

namespace megarl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 4;  // tokens a thread: 16 bytes of floats
constexpr int kTile = kThreads * kItems;

struct Range {
  int64_t begin, end;
};

__device__ __forceinline__ Range range_of(const Sequences& in, int64_t sequence) {
  auto inside = [&](int64_t t) { return t < 0 ? 0 : t > in.num_tokens ? in.num_tokens : t; };
  return {inside(in.cu_seqlens[sequence]), inside(in.cu_seqlens[sequence + 1])};
}

// ---------------------------------------------------------------- advantages

// What comes from the right: advantage and value of the masked token last seen.
struct State {
  double advantage;
  float value;
};

// What a run of tokens makes of the state: A <- a A + c V + b, V <- value; without a masked token
// it is left alone. Doubles, as a sum of 128k tokens has no room for rounding in 24 bits.
struct Steps {
  double a, b, c;
  float value;
  int any;

  __device__ __forceinline__ State operator()(State s) const {
    if (!any) return s;
    return {a * s.advantage + c * s.value + b, value};
  }

  // One more token, to the left of these.
  __device__ __forceinline__ void prepend(float reward, float at, double gamma, double decay) {
    const double own = static_cast<double>(reward) - at;
    b = any ? decay * b + gamma * value + own : own;
    c = any ? decay * c : gamma;
    a = any ? decay * a : decay;
    value = at;
    any = 1;
  }

  // These, and those of `right` before them.
  __device__ __forceinline__ Steps after(const Steps& right) const {
    if (!right.any) return *this;
    if (!any) return right;
    return {a * right.a, a * right.b + c * right.value + b, a * right.c, value, 1};
  }

  __device__ __forceinline__ Steps of_lane_after(int delta) const {
    return {__shfl_down_sync(kAllLanes, a, delta), __shfl_down_sync(kAllLanes, b, delta),
            __shfl_down_sync(kAllLanes, c, delta), __shfl_down_sync(kAllLanes, value, delta),
            __shfl_down_sync(kAllLanes, any, delta)};
  }
};

// kItems tokens from `first` on. 0 stands where a token is not of the sequence or not masked.
struct Chunk {
  float rewards[kItems], values[kItems];
  uint32_t mask;  // bit j of token j
};

// One sequence, in chunks of kItems tokens. Positions count from `origin`, the last multiple of
// kItems at or before its first token, so that a chunk is 16 aligned bytes where its tensor is.
struct Walk {
  const Gae& args;
  int64_t origin;
  int begin, end;
  bool aligned;

  __device__ __forceinline__ Walk(const Gae& args, int64_t sequence) : args(args) {
    const Range range = range_of(args.in, sequence);
    origin = range.begin / kItems * kItems;
    begin = static_cast<int>(range.begin - origin);
    end = static_cast<int>(range.end - origin);
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    aligned = ((address(args.rewards) | address(args.values) | address(args.advantages) |
                address(args.returns)) & 15u) == 0 &&
              (address(args.in.mask) & 3u) == 0;
  }

  __device__ __forceinline__ bool whole(int first) const {
    return aligned && first >= begin && first + kItems <= end;
  }

  __device__ __forceinline__ uint32_t mask(int first) const {
    const bool* from = args.in.mask + origin + first;
    uint32_t bits = 0;
    if (whole(first)) {
      const uint32_t bytes = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int j = 0; j < kItems; ++j) bits |= (bytes >> (8 * j) & 1u) << j;
    } else {
#pragma unroll
      for (int j = 0; j < kItems; ++j)
        if (first + j >= begin && first + j < end && from[j]) bits |= 1u << j;
    }
    return bits;
  }

  // Nothing is read past `last`, the last masked token.
  __device__ __forceinline__ Chunk load(int first, int last) const {
    Chunk chunk = {};
    if (first > last) return chunk;
    chunk.mask = mask(first);
    const float* rewards = args.rewards + origin + first;
    const float* values = args.values + origin + first;
    if (whole(first)) {
      Vec<float>::unpack(load_once(reinterpret_cast<const uint4*>(rewards)), chunk.rewards);
      Vec<float>::unpack(load_once(reinterpret_cast<const uint4*>(values)), chunk.values);
    } else {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!(chunk.mask >> j & 1u)) continue;
        chunk.rewards[j] = rewards[j];
        chunk.values[j] = values[j];
      }
    }
    return chunk;
  }

  __device__ __forceinline__ void store(int first, const float (&advantages)[kItems],
                                        const float (&returns)[kItems]) const {
    float* to_advantages = args.advantages + origin + first;
    float* to_returns = args.returns + origin + first;
    if (whole(first)) {
      store_once(reinterpret_cast<uint4*>(to_advantages), Vec<float>::pack(advantages));
      store_once(reinterpret_cast<uint4*>(to_returns), Vec<float>::pack(returns));
      return;
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (first + j < begin || first + j >= end) continue;
      to_advantages[j] = advantages[j];
      to_returns[j] = returns[j];
    }
  }

  // The last masked token, or -1; every thread of the block gets it.
  __device__ __forceinline__ int last_masked() const {
    MEGARL_SHARED(int, of_warp, [kWarps]);
    const int thread = threadIdx.x;
    for (int tile = (end - 1) / kTile * kTile; tile >= 0; tile -= kTile) {
      const uint32_t bits = mask(tile + thread * kItems);
      int last = -1;
#pragma unroll
      for (int j = 0; j < kItems; ++j)
        if (bits >> j & 1u) last = tile + thread * kItems + j;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes >>= 1)
        last = max(last, __shfl_xor_sync(kAllLanes, last, lanes));
      if ((thread & 31) == 0) of_warp[thread >> 5] = last;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) last = max(last, of_warp[w]);
      if (last >= 0) return last;
      __syncthreads();
    }
    return -1;
  }
};

// A block walks one sequence from its end, a tile at a time. In a tile each thread makes the Steps
// of its own tokens; a scan from the right gives it the state that it begins with.
__global__ void __launch_bounds__(kThreads, 4) gae_kernel(Gae args) {
  const Walk walk(args, blockIdx.x);
  if (walk.begin >= walk.end) return;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const double gamma = args.gamma, decay = args.gamma * args.lam;
  const int last = walk.last_masked();
  State carry{0., 0.f};
  if (args.no_eos[blockIdx.x] && last >= 0 && last + 1 < walk.end)
    carry.value = args.values[walk.origin + last + 1];

  // Two of them: a warp may be a tile ahead of another that still reads.
  MEGARL_SHARED(Steps, of_warp, [2][kWarps]);
  int first = (walk.end - 1) / kTile * kTile + thread * kItems;
  Chunk chunk = walk.load(first, last);
  for (int turn = 0; first >= 0; first -= kTile, turn ^= 1) {
    // The loads of the tile to come, while this one is scanned.
    const Chunk next = first >= kTile ? walk.load(first - kTile, last) : Chunk{};
    Steps steps{1., 0., 0., 0.f, 0};
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j)
      if (chunk.mask >> j & 1u) steps.prepend(chunk.rewards[j], chunk.values[j], gamma, decay);
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const Steps right = steps.of_lane_after(delta);
      if (lane + delta < 32) steps = steps.after(right);
    }
    if (lane == 0) of_warp[turn][warp] = steps;
    const Steps between = steps.of_lane_after(1);
    __syncthreads();
    State state = carry;
    for (int w = kWarps - 1; w >= 0; --w) {
      if (w == warp) state = carry;
      carry = of_warp[turn][w](carry);
    }
    if (lane < 31) state = between(state);
    float advantages[kItems], returns[kItems];
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      const bool counts = chunk.mask >> j & 1u;
      if (counts) {
        const float value = chunk.values[j];
        const double delta = chunk.rewards[j] + gamma * state.value - value;
        state = {delta + decay * state.advantage, value};
      }
      advantages[j] = counts ? static_cast<float>(state.advantage) : 0.f;
      returns[j] = counts ? static_cast<float>(state.advantage + state.value) : 0.f;
    }
    walk.store(first, advantages, returns);
    chunk = next;
  }
}

// ---------------------------------------------------------------- groups

struct Pair {
  double count, sum;
};

// The sum over the block, in one order; thread 0 alone gets it.
__device__ __forceinline__ Pair sum_block(Pair mine) {
  MEGARL_SHARED(Pair, of_warp, [kWarps]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    mine.count += __shfl_xor_sync(kAllLanes, mine.count, lanes);
    mine.sum += __shfl_xor_sync(kAllLanes, mine.sum, lanes);
  }
  const int thread = threadIdx.x;
  if ((thread & 31) == 0) of_warp[thread >> 5] = mine;
  __syncthreads();
  if (thread == 0) {
    for (int w = 1; w < kWarps; ++w) {
      mine.count += of_warp[w].count;
      mine.sum += of_warp[w].sum;
    }
  }
  return mine;
}

// A block a sequence.
template <bool kSquares>
__global__ void __launch_bounds__(kThreads) sequence_sums_kernel(GroupSums args) {
  const Range range = range_of(args.in, blockIdx.x);
  const int64_t group = args.group_of_sequence[blockIdx.x];
  const bool in_group = group >= 0 && group < args.num_groups;
  double centre = 0.;
  if constexpr (kSquares) centre = in_group ? args.centres[group] : 0.;
  int count = 0;
  double sum = 0.;
#pragma unroll 4
  for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kThreads) {
    const bool counts = args.in.mask[t];
    const double value = args.x[t];
    const double term = kSquares ? (value - centre) * (value - centre) : value;
    sum += counts ? term : 0.;
    count += counts;
  }
  const Pair all = sum_block({static_cast<double>(count), sum});
  if (threadIdx.x == 0) {
    args.partials[2 * static_cast<int64_t>(blockIdx.x)] = all.count;
    args.partials[2 * static_cast<int64_t>(blockIdx.x) + 1] = all.sum;
  }
}

// A block a group.
__global__ void __launch_bounds__(kThreads) group_sums_kernel(GroupSums args) {
  const int64_t group = blockIdx.x, end = args.offsets[group + 1];
  Pair mine{0., 0.};
  for (int64_t k = args.offsets[group] + threadIdx.x; k < end; k += kThreads) {
    const double* partial = args.partials + 2 * args.members[k];
    mine.count += partial[0];
    mine.sum += partial[1];
  }
  mine = sum_block(mine);
  if (threadIdx.x == 0) {
    args.sums[group] = mine.count;
    args.sums[args.num_groups + group] = mine.sum;
  }
}

// gridDim.y blocks a sequence.
template <bool kLeave1Out>
__global__ void __launch_bounds__(kThreads) normalize_kernel(GroupNormalize args) {
  const Range range = range_of(args.in, blockIdx.x);
  const int64_t group = args.group_of_sequence[blockIdx.x];
  double total = __uint_as_float(0x7fc00000u), count = 1., divisor = 1.;
  if (group >= 0 && group < args.num_groups) {
    total = args.totals[group];
    count = args.counts[group];
    divisor = args.divisors[group];
  }
  const double mean = total / count;
  const int64_t first = range.begin + blockIdx.y * kThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t t = first; t < range.end; t += static_cast<int64_t>(gridDim.y) * kThreads) {
    const double value = args.x[t];
    const double centre = kLeave1Out ? (total - value) / count : mean;
    args.out[t] = args.in.mask[t] ? static_cast<float>((value - centre) / divisor) : 0.f;
  }
}

}  // namespace

int gae(const Gae& args, void* stream) {
  if (args.in.num_sequences == 0) return 0;
  MEGARL_LAUNCH(gae_kernel, dim3(args.in.num_sequences), dim3(kThreads), 0, stream, args);
  return static_cast<int>(cudaGetLastError());
}

int group_sums(const GroupSums& args, void* stream) {
  const dim3 sequences(args.in.num_sequences), block(kThreads);
  if (args.in.num_sequences > 0 && args.centres) {
    MEGARL_LAUNCH(sequence_sums_kernel<true>, sequences, block, 0, stream, args);
  } else if (args.in.num_sequences > 0) {
    MEGARL_LAUNCH(sequence_sums_kernel<false>, sequences, block, 0, stream, args);
  }
  if (args.num_groups > 0)
    MEGARL_LAUNCH(group_sums_kernel, dim3(args.num_groups), block, 0, stream, args);
  return static_cast<int>(cudaGetLastError());
}

int group_normalize(const GroupNormalize& args, void* stream) {
  if (args.in.num_sequences == 0) return 0;
  // Few long sequences are cut into enough blocks for a whole GPU, and short ones left alone.
  constexpr int64_t kBlocks = 1024, kTokensOfBlock = 4 * kThreads;
  const int64_t n = args.in.num_sequences, mean_length = args.in.num_tokens / n;
  const int64_t parts = min((kBlocks + n - 1) / n, 1 + mean_length / kTokensOfBlock);
  const dim3 grid(n, parts), block(kThreads);
  if (args.leave1out) {
    MEGARL_LAUNCH(normalize_kernel<true>, grid, block, 0, stream, args);
  } else {
    MEGARL_LAUNCH(normalize_kernel<false>, grid, block, 0, stream, args);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace megarl::cuda
