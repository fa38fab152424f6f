// CUDA on a CPU, for the tests of kernels: every thread of a block is a fiber.
//
// A fiber runs until it waits: at a barrier or in a warp operation. Fibers, and blocks, run in
// random order (MEGARL_EMU_SEED, and a count of launches). Found, and told by cudaGetLastError:
//   - a barrier or warp operation that some threads of its block or warp never reach, or reach
//     at another line of the source;
//   - an access outside of every buffer, where buffers end at guard pages;
//   - a 16-byte access that is not aligned.
// Shared memory begins as NaN. Not modelled: the order of memory operations between barriers, so
// a race is found only where some order of whole fibers shows it, and everything about speed.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __cluster_dims__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
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

namespace emu {

enum class Wait { kNothing, kWarp, kBlock, kCluster };

struct Block;
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  dim3 thread;
  int lane = 0, warp = 0;
  bool done = false;
  Wait wait = Wait::kNothing;
  int line = 0;
  uint64_t slot = 0;
};

struct Block {
  dim3 index;
  int rank = 0;  // in its cluster
  std::vector<Fiber> fibers;
  std::map<std::pair<const void*, int>, std::vector<unsigned char>> shared;
  std::vector<unsigned char> dynamic;
};

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kSharedAlign = 128;

struct Device {
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::vector<std::unique_ptr<Block>>* cluster = nullptr;
  std::function<void()> body;
  dim3 block_size, grid_size;
  std::string error;
  uint64_t launches = 0;
  std::mt19937_64 random;
};
inline Device device;

inline void fail(const std::string& why) {
  if (device.error.empty()) device.error = "cuemu: " + why;
}

inline void* aligned(std::vector<unsigned char>& memory) {
  auto at = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<void*>((at + kSharedAlign - 1) / kSharedAlign * kSharedAlign);
}

// The block's own copy of the variable declared at FILE:LINE; bytes of 0xff are NaN.
template <typename T>
T& shared(const char* file, int line, Block* block = device.current->block) {
  auto& memory = block->shared[{file, line}];
  if (memory.empty()) memory.assign(sizeof(T) + kSharedAlign, 0xff);
  return *static_cast<T*>(aligned(memory));
}

inline unsigned char* dynamic_shared() {
  return static_cast<unsigned char*>(aligned(device.current->block->dynamic));
}

inline void wait(Wait what, int line) {
  Fiber* me = device.current;
  me->wait = what;
  me->line = line;
  swapcontext(&me->context, &device.scheduler);
  device.current = me;
}

inline void enter() {
  device.body();
  device.current->done = true;
  setcontext(&device.scheduler);
}

// Lets fibers that wait for each other go on. `everyone` must all wait for `what` at one line.
inline bool release(const std::vector<Fiber*>& everyone, Wait what, const char* name) {
  int waiting = 0, finished = 0, line = 0;
  for (Fiber* fiber : everyone) {
    if (fiber->done) {
      ++finished;
    } else if (fiber->wait == what) {
      if (waiting && fiber->line != line) {
        fail(std::string(name) + " reached at line " + std::to_string(line) + " by some and " +
             std::to_string(fiber->line) + " by others");
        return false;
      }
      line = fiber->line;
      ++waiting;
    }
  }
  if (!waiting || waiting + finished < static_cast<int>(everyone.size())) return false;
  if (finished) {
    fail(std::string(name) + " at line " + std::to_string(line) + ": " +
         std::to_string(finished) + " threads ended without it");
    return false;
  }
  for (Fiber* fiber : everyone) fiber->wait = Wait::kNothing;
  return true;
}

inline void on_bad_access(int, siginfo_t* info, void*) {
  char text[96];
  std::snprintf(text, sizeof text, "access outside of a buffer at %p", info->si_addr);
  fail(text);
  setcontext(&device.scheduler);
}

// All blocks of one cluster, to their end or the first error.
inline void run_cluster(std::vector<std::unique_ptr<Block>>& blocks) {
  device.cluster = &blocks;
  std::vector<Fiber*> all;
  std::vector<std::vector<Fiber*>> of_block, of_warp;
  for (auto& block : blocks) {
    of_block.emplace_back();
    for (Fiber& fiber : block->fibers) {
      all.push_back(&fiber);
      of_block.back().push_back(&fiber);
      if (fiber.lane == 0) of_warp.emplace_back();
      of_warp.back().push_back(&fiber);
    }
  }
  auto order = all;
  for (;;) {
    std::shuffle(order.begin(), order.end(), device.random);
    bool progress = false;
    size_t done = 0;
    for (Fiber* fiber : order) {
      if (!fiber->done && fiber->wait == Wait::kNothing) {
        device.current = fiber;
        swapcontext(&device.scheduler, &fiber->context);
        if (!device.error.empty()) return;
        progress = true;
      }
      done += fiber->done;
    }
    if (done == all.size()) return;
    for (auto& warp : of_warp) progress |= release(warp, Wait::kWarp, "warp operation");
    for (auto& block : of_block) progress |= release(block, Wait::kBlock, "__syncthreads");
    progress |= release(all, Wait::kCluster, "cluster barrier");
    if (!device.error.empty()) return;
    if (!progress) return fail("deadlock: threads wait for different things");
  }
}

template <typename Kernel, typename... Args>
void launch(Kernel kernel, unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes,
            Args... args) {
  if (!device.error.empty()) return;
  const char* seed = std::getenv("MEGARL_EMU_SEED");
  device.random.seed((seed ? std::strtoull(seed, nullptr, 10) : 0) * 7919 + device.launches++);
  device.body = [&] { kernel(args...); };
  device.block_size = block;
  device.grid_size = grid;
  struct sigaction handler = {}, before_segv, before_bus;
  handler.sa_sigaction = on_bad_access;
  handler.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &handler, &before_segv);
  sigaction(SIGBUS, &handler, &before_bus);

  const unsigned threads = block.x * block.y * block.z;
  const uint64_t clusters = uint64_t(grid.x) * grid.y * grid.z / cluster;
  std::vector<std::unique_ptr<Block>> blocks;
  for (unsigned k = 0; k < cluster; ++k) {
    blocks.push_back(std::make_unique<Block>());
    blocks.back()->fibers.resize(threads);
    for (Fiber& fiber : blocks.back()->fibers) fiber.stack.reset(new char[kStackBytes]);
  }
  std::vector<uint64_t> sequence(clusters);
  for (uint64_t i = 0; i < clusters; ++i) sequence[i] = i;
  std::shuffle(sequence.begin(), sequence.end(), device.random);
  for (uint64_t which : sequence) {
    for (unsigned k = 0; k < cluster; ++k) {
      Block& b = *blocks[k];
      const uint64_t i = which * cluster + k;
      b.index = dim3(i % grid.x, i / grid.x % grid.y, i / (uint64_t(grid.x) * grid.y));
      b.rank = static_cast<int>(k);
      b.shared.clear();
      b.dynamic.assign(shared_bytes + kSharedAlign, 0xff);
      for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = b.fibers[t];
        fiber.block = &b;
        fiber.thread = dim3(t % block.x, t / block.x % block.y, t / (block.x * block.y));
        fiber.lane = t % 32;
        fiber.warp = t / 32;
        fiber.done = false;
        fiber.wait = Wait::kNothing;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = &device.scheduler;
        makecontext(&fiber.context, enter, 0);
      }
    }
    run_cluster(blocks);
    if (!device.error.empty()) break;
  }
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
}

// `value` of lane `from` of this warp; a lane outside of it gives the caller's own.
template <typename T>
T shuffle(T value, int from, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Fiber* me = device.current;
  std::memcpy(&me->slot, &value, sizeof(T));
  wait(Wait::kWarp, line);
  T result = value;
  if (from >= 0 && from < 32) {
    const size_t index = static_cast<size_t>(me->warp) * 32 + from;
    if (index < me->block->fibers.size())
      std::memcpy(&result, &me->block->fibers[index].slot, sizeof(T));
  }
  wait(Wait::kWarp, line);
  return result;
}

inline unsigned ballot(bool value, int line) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= shuffle(unsigned(value), lane, line) << lane;
  return bits;
}

template <typename T>
const T* checked(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) fail("misaligned access");
  return p;
}

inline int take_error() { return device.error.empty() ? 0 : 1; }

// The text of the last error, which is thereby taken.
inline const char* error_text(int) {
  static std::string text;
  text.swap(device.error);
  device.error.clear();
  return text.c_str();
}

}  // namespace emu

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
