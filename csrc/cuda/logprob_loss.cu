#include "megarl/logprob_loss.h"

#include "bulk.cuh"
#include "softmax.cuh"

namespace megarl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;
constexpr int kWarps = kThreads / 32;
constexpr int kChunkBytes = 16384;  // of one bulk load
constexpr int kMaxChunks = 13;      // 208 KiB: what a block of sm_90 can have beside its statics
constexpr int kGoodBytes = 40960;   // of a block's share of a row: five blocks an SM

struct RowSums {
  float m, s, t, label;  // as in LogprobStats
};

__device__ __forceinline__ RowSums merged(const RowSums& a, const RowSums& b) {
  SoftmaxSums sums, other;
  sums.m = a.m, sums.s = a.s, sums.t = a.t;
  other.m = b.m, other.s = b.s, other.t = b.t;
  sums.merge<true>(other);
  const float of_a = a.label == -INFINITY ? -INFINITY : a.label + (a.m - sums.m);
  const float of_b = b.label == -INFINITY ? -INFINITY : b.label + (b.m - sums.m);
  return {sums.m, sums.s, sums.t, fmaxf(of_a, of_b)};
}

// From a row's sums to its results; `writes` is true for one thread a row.
__device__ __forceinline__ RowGradient<false> finish_row(const LogprobLoss& args, int64_t row,
                                                         const RowSums& sums, float c, int label,
                                                         bool writes) {
  const float log_s = log2f(sums.s);
  const float logp = (sums.label - log_s) * kLn2;
  TokenTerms terms{args.prox[row], args.advantages[row], args.weight ? args.weight[row] : 1.f,
                   args.ref ? args.ref[row] : 0.f};
  const float grad = policy_token(logp, terms, args.settings).dlogp / *args.num_tokens;
  if (writes) {
    args.logp[row] = logp;
    args.entropy[row] = (log_s - sums.t / sums.s) * kLn2;
  }
  const float inv_temperature = args.in.inv_temperature[row * args.in.inv_temperature_stride];
  return {c, label, sums.m, log_s, 0.f, grad * inv_temperature, 0.f};
}

template <typename T>
__device__ __forceinline__ void zero_row(const LogprobLoss& args, int64_t row, int begin, int end) {
  T* grad = static_cast<T*>(args.grad) + row * args.grad_stride;
  for (int column = begin + threadIdx.x; column < end; column += kThreads)
    Vec<T>::put(grad + column, 0.f);
}

// The sums of a block's threads, for all of them. `of_warp` is shared, [kWarps].
__device__ __forceinline__ SoftmaxSums merge_block(SoftmaxSums sums, SoftmaxSums* of_warp) {
  sums.merge_warp<true>();
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = sums;
  __syncthreads();
  sums = of_warp[0];
#pragma unroll
  for (int k = 1; k < kWarps; ++k) sums.merge<true>(of_warp[k]);
  return sums;
}

// One block a row, which it reads twice: the second time mostly from the L2 cache.
template <typename T, bool kKeep>
__global__ void __launch_bounds__(kThreads, 4) row_kernel(LogprobLoss args) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t row_index = blockIdx.x;
  const int width = static_cast<int>(args.in.width);
  if (args.in.mask && !args.in.mask[row_index]) {
    if (threadIdx.x == 0) args.logp[row_index] = args.entropy[row_index] = 0.f;
    return zero_row<T>(args, row_index, 0, width);
  }
  const Row<T> row(args.in, row_index);
  MEGARL_SHARED(SoftmaxSums, of_warp, [kWarps]);
  const SoftmaxSums sums =
      merge_block(sum_row<T, true, kKeep, kAhead>(row, threadIdx.x, kThreads), of_warp);
  RowSums whole{sums.m, sums.s, sums.t, -INFINITY};
  if (row.label >= 0 && sums.m > -INFINITY)
    whole.label = fmaf(row.template value<kKeep>(row.label), row.c, -sums.m);
  // The label's logit is read by all before one of them writes over it.
  __syncthreads();
  const RowGradient<false> gradient =
      finish_row(args, row_index, whole, row.c, row.label, threadIdx.x == 0);

  T* grad = static_cast<T*>(args.grad) + row_index * args.grad_stride;
  const bool congruent =
      ((reinterpret_cast<uintptr_t>(row.x) ^ reinterpret_cast<uintptr_t>(grad)) & 15u) == 0;
  const int head = congruent ? row.head : 0;
  const int num_vectors = congruent ? row.num_vectors : 0;
  const uint4* from = reinterpret_cast<const uint4*>(row.x + head);
  uint4* to = reinterpret_cast<uint4*>(grad + head);
  for (int i = threadIdx.x; i < num_vectors; i += kThreads) {
    float f[kSize];
    Vec<T>::unpack(from[i], f);
    const int column = head + i * kSize;
    if constexpr (kKeep) drop(f, keep_bits(row.keep, row.words, column));
#pragma unroll
    for (int j = 0; j < kSize; ++j) f[j] = gradient(f[j], column + j);
    store_once(to + i, Vec<T>::pack(f));
  }
  auto one = [&](int column) {
    Vec<T>::put(grad + column, gradient(row.template value<kKeep>(column), column));
  };
  for (int column = threadIdx.x; column < head; column += kThreads) one(column);
  for (int column = head + num_vectors * kSize + threadIdx.x; column < row.num_valid;
       column += kThreads)
    one(column);
  zero_row<T>(args, row_index, row.num_valid, width);
}

// A cluster of blocks a row. Each holds `share` columns in shared memory, so the row is read
// once; what passes between the blocks is four numbers.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4) cluster_kernel(LogprobLoss args, int share) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kMaxBlocks = 8;
  const int blocks = static_cast<int>(args.cluster);
  const int rank = cluster_rank();
  const int64_t row_index = blockIdx.x / blocks;
  const Row<T> row(args.in, row_index);
  const int width = static_cast<int>(args.in.width);
  const int begin = min(rank * share, width), end = min(begin + share, width);
  if (args.in.mask && !args.in.mask[row_index]) {  // the same for the whole cluster
    if (rank == 0 && threadIdx.x == 0) args.logp[row_index] = args.entropy[row_index] = 0.f;
    return zero_row<T>(args, row_index, begin, end);
  }
  const int count = max(0, min(share, row.num_valid - begin));
  const int whole = count / kSize;                     // vectors that the hardware brings
  const int padded = (count + kSize - 1) / kSize;      // and the last one, filled up with -inf
  const uint32_t bytes = static_cast<uint32_t>(whole) * 16u;
  const int chunks = static_cast<int>((bytes + kChunkBytes - 1) / kChunkBytes);

  MEGARL_DYNAMIC_SHARED(buffer);
  MEGARL_SHARED(Arrival, arrivals, [kMaxChunks]);
  MEGARL_SHARED(SoftmaxSums, of_warp, [kWarps]);
  MEGARL_SHARED(RowSums, of_block, [kMaxBlocks]);
  if (threadIdx.x == 0) {
    for (int k = 0; k < chunks; ++k) arrival_init(&arrivals[k]);
    arrival_fence();
  }
  __syncthreads();
  const T* x = row.x + begin;
  if (threadIdx.x == 0) {
    for (int k = 0; k < chunks; ++k) {
      const uint32_t at = static_cast<uint32_t>(k) * kChunkBytes;
      const uint32_t size = min(static_cast<uint32_t>(kChunkBytes), bytes - at);
      bulk_load(buffer + at, reinterpret_cast<const unsigned char*>(x) + at, size, &arrivals[k]);
    }
  }
  T* held = reinterpret_cast<T*>(buffer);
  for (int j = whole * kSize + threadIdx.x; j < padded * kSize; j += kThreads)
    Vec<T>::put(held + j, j < count ? Vec<T>::get(x + j) : -INFINITY);
  cluster_sync();  // and every block of the cluster has begun, so its memory can be written to

  const uint4* vectors = reinterpret_cast<const uint4*>(buffer);
  constexpr int kChunkVectors = kChunkBytes / 16;
  SoftmaxSums sums;
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    // kThreads divides kChunkVectors: all threads pass from one chunk to the next together.
    const int k = i / kChunkVectors;
    if (k < chunks) wait_for(&arrivals[k]);
    float f[kSize];
    Vec<T>::unpack(vectors[i], f);
    sums.add<true>(f, row.c);
  }
  sums = merge_block(sums, of_warp);
  const int label = row.label - begin;
  if (threadIdx.x < static_cast<unsigned>(blocks)) {
    RowSums mine{sums.m, sums.s, sums.t, -INFINITY};
    if (row.label >= 0 && label >= 0 && label < count) {
      if (label / kSize < whole) wait_for(&arrivals[label / kSize / kChunkVectors]);
      if (sums.m > -INFINITY) mine.label = fmaf(Vec<T>::get(held + label), row.c, -sums.m);
    }
    *on_rank(&of_block[rank], static_cast<int>(threadIdx.x)) = mine;
  }
  cluster_sync();
  RowSums all = of_block[0];
  for (int k = 1; k < blocks; ++k) all = merged(all, of_block[k]);
  const RowGradient<false> gradient = finish_row(args, row_index, all, row.c, row.label,
                                                 rank == 0 && threadIdx.x == 0);

  T* grad = static_cast<T*>(args.grad) + row_index * args.grad_stride + begin;
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    float f[kSize];
    Vec<T>::unpack(vectors[i], f);
#pragma unroll
    for (int j = 0; j < kSize; ++j) f[j] = gradient(f[j], begin + i * kSize + j);
    if (i < whole) {
      store_once(reinterpret_cast<uint4*>(grad) + i, Vec<T>::pack(f));
    } else {
      for (int j = 0; j < kSize; ++j)
        if (i * kSize + j < count) Vec<T>::put(grad + i * kSize + j, f[j]);
    }
  }
  zero_row<T>(args, row_index, begin + count, end);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(const float* scale, T* x, int64_t size) {
  const float factor = *scale;
  if (factor == 1.f) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < size; i += step)
    Vec<T>::put(x + i, Vec<T>::get(x + i) * factor);
}

#if defined(MEGARL_EMU)
int best_cluster() { return 8; }
#else
// 8 where this device has clusters, else 1.
int best_cluster() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9 ? 8 : 1;
}
#endif

// Blocks a row; 1 where clusters cannot do it.
template <typename T>
int cluster_of(const LogprobLoss& args) {
  const int64_t bytes = args.in.width * static_cast<int64_t>(sizeof(T));
  const bool aligned = (reinterpret_cast<uintptr_t>(args.in.logits) |
                        reinterpret_cast<uintptr_t>(args.grad) | args.in.row_stride * sizeof(T) |
                        args.grad_stride * sizeof(T)) % 16 == 0;
  const int most = args.cluster ? static_cast<int>(args.cluster) : best_cluster();
  if (!aligned || args.in.keep) return 1;
  int blocks = 1;
  while (blocks < most && bytes > static_cast<int64_t>(blocks) * kGoodBytes) blocks *= 2;
  blocks = blocks < 2 ? min(2, most) : blocks;
  return bytes / blocks + 16 > static_cast<int64_t>(kMaxChunks) * kChunkBytes ? 1 : blocks;
}

template <typename T>
int launch(LogprobLoss args, void* stream) {
  args.cluster = cluster_of<T>(args);
  const dim3 block(kThreads);
  if (args.cluster == 1) {
    const dim3 grid(args.in.rows);
    if (args.in.keep) {
      MEGARL_LAUNCH((row_kernel<T, true>), grid, block, 0, stream, args);
    } else {
      MEGARL_LAUNCH((row_kernel<T, false>), grid, block, 0, stream, args);
    }
    return static_cast<int>(cudaGetLastError());
  }
  const int64_t quantum = args.cluster * Vec<T>::kSize;
  const int share = static_cast<int>((args.in.width + quantum - 1) / quantum) * Vec<T>::kSize;
  const dim3 grid(args.in.rows * args.cluster);
  MEGARL_LAUNCH_CLUSTER((cluster_kernel<T>), args.cluster, grid, block, share * sizeof(T), stream,
                        args, share);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int logprob_loss(const LogprobLoss& args, void* stream) {
  if (args.in.rows == 0) return 0;
  return args.in.dtype == DType::kBFloat16 ? launch<bf16_t>(args, stream)
                                           : launch<float>(args, stream);
}

int scale_unless_one(const ScaleUnlessOne& args, void* stream) {
  if (args.size == 0) return 0;
  const int64_t blocks = (args.size + kThreads * 8 - 1) / (kThreads * 8);
  const dim3 grid(blocks < 4096 ? blocks : 4096), block(kThreads);
  if (args.dtype == DType::kBFloat16) {
    MEGARL_LAUNCH(scale_kernel<bf16_t>, grid, block, 0, stream, args.scale,
                  static_cast<bf16_t*>(args.x), args.size);
  } else {
    MEGARL_LAUNCH(scale_kernel<float>, grid, block, 0, stream, args.scale,
                  static_cast<float*>(args.x), args.size);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace megarl::cuda
