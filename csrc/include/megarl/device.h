// What lets a kernel compile as CUDA (nvcc) and, for its tests, as plain C++ (csrc/emu).
//
//   MEGARL_SHARED(float, sums, [32]);        static shared memory
//   MEGARL_DYNAMIC_SHARED(ring);             the launch's dynamic shared memory, unsigned char*
//   MEGARL_LAUNCH(kernel, grid, block, shared_bytes, stream, args...)
//   MEGARL_LAUNCH_CLUSTER(kernel, cluster, grid, block, shared_bytes, stream, args...)
#pragma once
#include "megarl/base.h"

#if defined(MEGARL_EMU)
#include "../../emu/cuemu.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#define MEGARL_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define MEGARL_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define MEGARL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define MEGARL_LAUNCH_CLUSTER(kernel, cluster, grid, block, shared_bytes, stream, ...) \
  megarl::launch_cluster(kernel, cluster, grid, block, shared_bytes, stream, __VA_ARGS__)
#endif

namespace megarl {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr unsigned kAllLanes = 0xffffffffu;

struct bf16_t {
  uint16_t bits;
};

// 2^x to 2 ulp; results under 2^-126 are 0.
__device__ __forceinline__ float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Two floats rounded to nearest even, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
#if defined(__CUDA_ARCH__)
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
#else
  auto rounded = [](float x) -> uint32_t {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return rounded(low) | (rounded(high) << 16);
#endif
}

// A cluster is blocks that run at once and reach each other's shared memory: sm_90 and later,
// `grid.x` a multiple of its size (8 runs everywhere, 16 where the card allows it). Under sm_90
// these three are those of a cluster of one block, and a launch with more is an error.
__device__ __forceinline__ int cluster_rank() {
#if defined(MEGARL_EMU)
  return emu::device.current->block->rank;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// Every thread of every block of the cluster; what was written before is seen after, in global
// memory and in any block's shared memory. One more is due before a block ends that others read.
__device__ __forceinline__ void cluster_sync([[maybe_unused]] int line = __builtin_LINE()) {
#if defined(MEGARL_EMU)
  emu::wait(emu::Wait::kCluster, line);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#elif defined(__CUDA_ARCH__)
  __syncthreads();
#endif
}

// Where block `rank` of the cluster has what `mine` points to in this block's shared memory.
// That block must have begun: a cluster_sync() comes before the first use.
template <typename T>
__device__ __forceinline__ T* on_rank(T* mine, int rank) {
#if defined(MEGARL_EMU)
  return emu::on_rank(mine, rank);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;"
      : "=l"(address)
      : "l"(reinterpret_cast<uint64_t>(mine)), "r"(static_cast<unsigned>(rank)));
  return reinterpret_cast<T*>(address);
#else
  return mine;
#endif
}

#if defined(__CUDACC__) && !defined(MEGARL_EMU)
// Behind MEGARL_LAUNCH_CLUSTER; errors are left to cudaGetLastError, as those of a plain launch.
template <typename... Parameters, typename... Args>
void launch_cluster(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block,
                    size_t shared_bytes, void* stream, const Args&... args) {
  constexpr size_t kSharedByDefault = 48 * 1024;
  if (shared_bytes > kSharedByDefault)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(shared_bytes));
  if (cluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args...);
}
#endif

// 16 bytes that are read or written once: they pass the caches by.
__device__ __forceinline__ uint4 load_once(const uint4* from) { return __ldcs(from); }
__device__ __forceinline__ void store_once(uint4* to, uint4 value) { __stcs(to, value); }

// A vector is the 16 bytes that one thread loads at once, as floats.
template <typename T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int kSize = 4;
  static __device__ __forceinline__ void unpack(const uint4& q, float* f) {
    f[0] = __uint_as_float(q.x);
    f[1] = __uint_as_float(q.y);
    f[2] = __uint_as_float(q.z);
    f[3] = __uint_as_float(q.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    return uint4{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                 __float_as_uint(f[3])};
  }
  static __device__ __forceinline__ float get(const float* p) { return *p; }
  static __device__ __forceinline__ void put(float* p, float value) { *p = value; }
};

template <>
struct Vec<bf16_t> {
  static constexpr int kSize = 8;
  static __device__ __forceinline__ void unpack(const uint4& q, float* f) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      f[2 * k] = __uint_as_float(words[k] << 16);
      f[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    return uint4{pack_bf16x2(f[0], f[1]), pack_bf16x2(f[2], f[3]), pack_bf16x2(f[4], f[5]),
                 pack_bf16x2(f[6], f[7])};
  }
  static __device__ __forceinline__ float get(const bf16_t* p) {
    return __uint_as_float(static_cast<uint32_t>(p->bits) << 16);
  }
  static __device__ __forceinline__ void put(bf16_t* p, float value) {
    p->bits = static_cast<uint16_t>(pack_bf16x2(value, 0.f));
  }
};

// Elements before the first 16-byte boundary at or after `p`, at most `size`.
template <typename T>
__device__ __forceinline__ int elements_to_boundary(const T* p, int size) {
  const int bytes = static_cast<int>(-reinterpret_cast<uintptr_t>(p) & 15u);
  const int elements = bytes / static_cast<int>(sizeof(T));
  return elements < size ? elements : size;
}

}  // namespace megarl
