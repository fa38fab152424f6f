// Copies from global to shared memory that the hardware makes on its own (sm_90 on).
//
// One thread asks; every thread may wait. Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "megarl/device.h"

namespace megarl::cuda {

#if defined(MEGARL_EMU)

struct Arrival {
  uint64_t state;
};
inline void arrival_init(Arrival*) {}
inline void arrival_fence() {}
inline void bulk_load(void* to, const void* from, uint32_t bytes, Arrival*) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) & 15u)
    emu::fail("bulk copy that is not aligned");
  std::memcpy(to, from, bytes);
}
inline void wait_for(Arrival*) {}

#elif defined(__CUDACC__)

struct Arrival {
  uint64_t state;  // an mbarrier
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// For one load; by one thread, before arrival_fence and a __syncthreads.
__device__ __forceinline__ void arrival_init(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)));
#endif
}

__device__ __forceinline__ void arrival_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  const uint32_t barrier = shared_address(arrival);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// The first load's bytes are in shared memory.
__device__ __forceinline__ void wait_for(Arrival* arrival) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(shared_address(arrival))
      : "memory");
#endif
}

#endif

}  // namespace megarl::cuda
