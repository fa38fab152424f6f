#include "softmax.cuh"

namespace megarl::cuda {
namespace {

// 8 blocks an SM at 32 registers; while one block merges, the others keep the loads coming.
constexpr int kThreads = 256;
constexpr int kAhead = 4;

template <typename T, bool kEntropy, bool kKeep>
__global__ void __launch_bounds__(kThreads) stats_kernel(LogprobStats args) {
  const int64_t row_index = blockIdx.x;
  if (args.in.mask && !args.in.mask[row_index]) return;
  const Row<T> row(args.in, row_index);
  const int thread = threadIdx.x;
  SoftmaxSums sums = sum_row<T, kEntropy, kKeep, kAhead>(row, thread, kThreads);
  sums.merge_warp<kEntropy>();
  MEGARL_SHARED(SoftmaxSums, of_warp, [kThreads / 32]);
  if ((thread & 31) == 0) of_warp[thread >> 5] = sums;
  __syncthreads();
  if (thread == 0) {
    for (int k = 1; k < kThreads / 32; ++k) sums.merge<kEntropy>(of_warp[k]);
    float label = -INFINITY;
    if (row.label >= 0 && sums.m > -INFINITY)
      label = fmaf(row.template value<kKeep>(row.label), row.c, -sums.m);
    reinterpret_cast<float4*>(args.parts)[row_index] = float4{sums.m, sums.s, sums.t, label};
  }
}

__global__ void __launch_bounds__(kThreads) combine_kernel(LogprobCombine args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.rows) return;
  float2 log_z{0.f, 0.f};
  float logp = 0.f, entropy = 0.f;
  if (!args.mask || args.mask[row]) {
    const float4* parts = reinterpret_cast<const float4*>(args.parts) + row;
    float top = -INFINITY;
    for (int64_t k = 0; k < args.tp; ++k) top = fmaxf(top, parts[k * args.rows].x);
    double s = 0., t = 0., label = -INFINITY;
    for (int64_t k = 0; k < args.tp; ++k) {
      const float4 part = parts[k * args.rows];
      const double gap = static_cast<double>(part.x) - top;
      if (part.x == -INFINITY && part.y == 0.f) continue;  // nothing of this shard counts
      const double scale = exp2(gap);
      s += scale * part.y;
      t += scale * (part.z + gap * part.y);
      label = fmax(label, gap + part.w);
    }
    const double log_s = log2(s);
    logp = static_cast<float>((label - log_s) * 0.6931471805599453);
    if (args.with_entropy) entropy = static_cast<float>((log_s - t / s) * 0.6931471805599453);
    log_z = float2{top, static_cast<float>(log_s)};
  }
  args.logp[row] = logp;
  args.entropy[row] = entropy;
  reinterpret_cast<float2*>(args.log_z)[row] = log_z;
}

// A block of threads does kAhead vectors a thread of one row, or zeros what counts nothing.
template <typename T, bool kEntropy, bool kKeep>
__global__ void __launch_bounds__(kThreads, 6) grad_kernel(LogprobGrad args) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t row_index = blockIdx.x;
  const bool counts = !args.in.mask || args.in.mask[row_index];
  Row<T> row(args.in, row_index);
  T* grad = static_cast<T*>(args.grad) + row_index * args.grad_stride;
  // Vectors need both pointers at 16-byte boundaries for the same column.
  const bool congruent =
      ((reinterpret_cast<uintptr_t>(row.x) ^ reinterpret_cast<uintptr_t>(grad)) & 15u) == 0;
  const int width = static_cast<int>(args.in.width);
  const int head = congruent ? elements_to_boundary(row.x, width) : 0;
  const int num_vectors = congruent ? (width - head) / kSize : 0;
  const int num_valid = counts ? row.num_valid : 0;
  const float inv_temperature = args.in.inv_temperature[row_index * args.in.inv_temperature_stride];
  const float2 log_z = reinterpret_cast<const float2*>(args.log_z)[row_index];
  const RowGradient<kEntropy> gradient(row.c, row.label, log_z.x, log_z.y, args.entropy[row_index],
                                       args.grad_logp[row_index] * inv_temperature,
                                       kEntropy ? args.grad_entropy[row_index] * inv_temperature : 0.f);

  auto one = [&](int column) {
    const bool valid = column < num_valid;
    Vec<T>::put(grad + column, valid ? gradient(row.template value<kKeep>(column), column) : 0.f);
  };

  const uint4* from = reinterpret_cast<const uint4*>(row.x + head);
  uint4* to = reinterpret_cast<uint4*>(grad + head);
  const int first = blockIdx.y * (kThreads * kAhead) + threadIdx.x;
  uint4 loaded[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int i = first + k * kThreads;
    if (i < num_vectors && head + i * kSize < num_valid) loaded[k] = load_once(from + i);
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int i = first + k * kThreads;
    if (i >= num_vectors) continue;
    const int column = head + i * kSize;
    float f[kSize] = {};
    if (column < num_valid) {
      Vec<T>::unpack(loaded[k], f);
      if constexpr (kKeep) drop(f, keep_bits(row.keep, row.words, column));
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        f[j] = column + j < num_valid ? gradient(f[j], column + j) : 0.f;
    }
    store_once(to + i, Vec<T>::pack(f));
  }
  if (blockIdx.y == 0) {
    for (int column = threadIdx.x; column < head; column += kThreads) one(column);
    for (int column = head + num_vectors * kSize + threadIdx.x; column < width; column += kThreads)
      one(column);
  }
}

// Calls launch(std::true_type or false_type...) for the run-time flags.
template <typename Launch>
void with_flags(bool entropy, bool keep, Launch&& launch) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (entropy) {
    keep ? launch(Yes{}, Yes{}) : launch(Yes{}, No{});
  } else {
    keep ? launch(No{}, Yes{}) : launch(No{}, No{});
  }
}

template <typename T>
int stats(const LogprobStats& args, void* stream) {
  with_flags(args.with_entropy, args.in.keep, [&](auto entropy, auto keep) {
    MEGARL_LAUNCH((stats_kernel<T, entropy(), keep()>), dim3(args.in.rows), dim3(kThreads), 0,
                  stream, args);
  });
  return static_cast<int>(cudaGetLastError());
}

template <typename T>
int grad(const LogprobGrad& args, void* stream) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * kAhead * Vec<T>::kSize;
  const int64_t blocks = (args.in.width + per_block - 1) / per_block;
  const dim3 grid(args.in.rows, blocks > 0 ? blocks : 1);
  with_flags(args.grad_entropy, args.in.keep, [&](auto entropy, auto keep) {
    MEGARL_LAUNCH((grad_kernel<T, entropy(), keep()>), grid, dim3(kThreads), 0, stream, args);
  });
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int logprob_stats(const LogprobStats& args, void* stream) {
  if (args.in.rows == 0) return 0;
  return args.in.dtype == DType::kBFloat16 ? stats<bf16_t>(args, stream)
                                           : stats<float>(args, stream);
}

int logprob_combine(const LogprobCombine& args, void* stream) {
  if (args.rows == 0) return 0;
  const dim3 grid((args.rows + kThreads - 1) / kThreads);
  MEGARL_LAUNCH(combine_kernel, grid, dim3(kThreads), 0, stream, args);
  return static_cast<int>(cudaGetLastError());
}

int logprob_grad(const LogprobGrad& args, void* stream) {
  if (args.in.rows == 0 || args.in.width == 0) return 0;
  return args.in.dtype == DType::kBFloat16 ? grad<bf16_t>(args, stream)
                                           : grad<float>(args, stream);
}

}  // namespace megarl::cuda
