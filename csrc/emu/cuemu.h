// CUDA on a CPU, for the tests of kernels: every thread of a block is a fiber.
//
// A fiber runs until it waits: at a barrier or in a warp operation. Fibers, and blocks, run in
// random order (MEGARL_EMU_SEED, and a count of launches). Found, and told by cudaGetLastError:
//   - a barrier or warp operation that some threads of its block or warp never reach, or reach
//     at another line of the source;
//   - an access outside of every buffer, where buffers end at guard pages;
//   - an index outside of an array of shared memory whose size is known;
//   - a 16-byte access that is not aligned;
//   - shared memory of another block of the cluster, where that block has ended;
//   - a launch that a driver would refuse.
// Shared memory begins as NaN, and ends so. Not modelled: the order of memory operations between barriers, so
// a race is found only where some order of whole fibers shows it, and everything about speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __cluster_dims__(...)

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
using cudaStream_t = void*;
using cudaError_t = int;
using std::max;
using std::min;

#define threadIdx (emu::device.current->thread)
#define blockIdx (emu::device.current->block->index)
#define blockDim (emu::device.block_size)
#define gridDim (emu::device.grid_size)
#define __syncthreads() emu::wait(emu::Wait::kBlock, __LINE__)
#define __syncwarp(...) emu::wait(emu::Wait::kWarp, __LINE__)
#define __shfl_sync(mask, value, lane) emu::shuffle(value, lane, __LINE__)
#define __shfl_xor_sync(mask, value, bits) \
  emu::shuffle(value, emu::device.current->lane ^ (bits), __LINE__)
#define __shfl_up_sync(mask, value, delta) \
  emu::shuffle(value, emu::device.current->lane - static_cast<int>(delta), __LINE__)
#define __shfl_down_sync(mask, value, delta) \
  emu::shuffle(value, emu::device.current->lane + static_cast<int>(delta), __LINE__)
#define __ballot_sync(mask, value) emu::ballot(value, __LINE__)
#define __threadfence() ((void)0)
#define cudaGetLastError() emu::take_error()
#define cudaGetErrorString(code) emu::error_text(code)

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (by & 31));
}
template <typename T>
T __ldcs(const T* p) {
  return *emu::checked(p);
}
template <typename T>
T __ldg(const T* p) {
  return *emu::checked(p);
}
template <typename T>
void __stcs(T* p, T value) {
  *const_cast<T*>(emu::checked(p)) = value;
}
template <typename T>
T atomicAdd(T* p, T value) {
  T before = *p;
  *p = before + value;
  return before;
}

#define MEGARL_SHARED(type, name, ...) \
  auto& name = emu::shared<type __VA_ARGS__>(__FILE__, __LINE__)
#define MEGARL_DYNAMIC_SHARED(name) unsigned char* name = emu::dynamic_shared()
#define MEGARL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  emu::launch(kernel, 1, grid, block, shared_bytes, __VA_ARGS__)
#define MEGARL_LAUNCH_CLUSTER(kernel, cluster, grid, block, shared_bytes, stream, ...) \
  emu::launch(kernel, cluster, grid, block, shared_bytes, __VA_ARGS__)
