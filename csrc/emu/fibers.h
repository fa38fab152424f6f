// Blocks of threads as fibers on one CPU thread: who runs next, what waits for what, and what is
// wrong with it. What it finds is told in cuemu.h, which gives it CUDA's names.
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

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

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
  size_t ended = 0;  // fibers
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

// Where block `rank` of this cluster has what `mine` is in this block's shared memory.
template <typename T>
T* on_rank(T* mine, int rank) {
  Block& here = *device.current->block;
  if (rank < 0 || rank >= static_cast<int>(device.cluster->size())) {
    fail("no block " + std::to_string(rank) + " in the cluster");
    return mine;
  }
  Block& there = *(*device.cluster)[static_cast<size_t>(rank)];
  if (there.ended == there.fibers.size()) fail("shared memory of a block that has ended");
  const auto at = reinterpret_cast<uintptr_t>(mine);
  auto moved = [&](std::vector<unsigned char>& from, std::vector<unsigned char>& to) -> T* {
    const auto start = reinterpret_cast<uintptr_t>(aligned(from));
    if (at < start || at >= start + from.size() - kSharedAlign) return nullptr;
    if (to.empty()) to.assign(from.size(), 0xff);  // not yet declared over there
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(aligned(to)) + (at - start));
  };
  if (T* found = moved(here.dynamic, there.dynamic)) return found;
  for (auto& [key, memory] : here.shared)
    if (T* found = moved(memory, there.shared[key])) return found;
  fail("on_rank of what is not in shared memory");
  return mine;
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

// The compiler's checks of alignment and of array bounds end in SIGILL (build.py asks for them).
inline void on_bad_access(int signal, siginfo_t* info, void*) {
  char text[96];
  std::snprintf(text, sizeof text, "access outside of a buffer at %p", info->si_addr);
  fail(signal == SIGILL ? "misaligned access, or index outside of an array" : text);
  setcontext(&device.scheduler);
}

// Fibers in the order of their next turns. Threads at random seldom let one warp or one block run
// far ahead of the others, which is what shows a missing barrier; so these are drawn as well.
inline void shuffle_order(std::vector<std::unique_ptr<Block>>& blocks,
                          std::vector<Fiber*>& order) {
  std::vector<std::pair<std::tuple<uint64_t, uint64_t, uint64_t>, Fiber*>> keyed;
  const uint64_t how = device.random() % 4;  // 0: threads, 1, 2: whole warps, 3: whole blocks
  for (auto& block : blocks) {
    const uint64_t of_block = how == 3 ? device.random() : 0;
    uint64_t of_warp = 0;
    for (Fiber& fiber : block->fibers) {
      if (fiber.lane == 0) of_warp = how ? device.random() : 0;
      keyed.push_back({{of_block, of_warp, device.random()}, &fiber});
    }
  }
  std::sort(keyed.begin(), keyed.end());
  order.clear();
  for (auto& [key, fiber] : keyed) order.push_back(fiber);
}

// Shared memory goes with its block: who reads it later reads NaN.
inline void end(Block& block) {
  if (++block.ended < block.fibers.size()) return;
  for (auto& [key, memory] : block.shared) std::fill(memory.begin(), memory.end(), 0xff);
  std::fill(block.dynamic.begin(), block.dynamic.end(), 0xff);
}

// All blocks of one cluster, to their end or the first error.
__attribute__((noinline)) inline void run_cluster(std::vector<std::unique_ptr<Block>>& blocks) {
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
  std::vector<Fiber*> order;
  for (;;) {
    shuffle_order(blocks, order);
    bool progress = false;
    size_t done = 0;
    for (Fiber* fiber : order) {
      if (!fiber->done && fiber->wait == Wait::kNothing) {
        device.current = fiber;
        swapcontext(&device.scheduler, &fiber->context);
        if (!device.error.empty()) return;
        if (fiber->done) end(*fiber->block);
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

// What the driver would refuse, or nullptr.
inline const char* wrong_launch(unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads) return "launch of nothing";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return "launch: grid too large";
  if (threads > 1024 || block.z > 64) return "launch: more than 1024 threads a block";
  if (shared_bytes > 227 * 1024) return "launch: more than 227 KiB of shared memory";
  if (!cluster || cluster > 16 || grid.x % cluster) return "launch: cluster does not fit the grid";
  return nullptr;
}

template <typename Kernel, typename... Args>
void launch(Kernel kernel, unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes,
            Args... args) {
  if (!device.error.empty()) return;
  if (const char* wrong = wrong_launch(cluster, grid, block, shared_bytes)) return fail(wrong);
  const char* seed = std::getenv("MEGARL_EMU_SEED");
  device.random.seed((seed ? std::strtoull(seed, nullptr, 10) : 0) * 7919 + device.launches++);
  device.body = [&] { kernel(args...); };
  device.block_size = block;
  device.grid_size = grid;
  struct sigaction handler = {}, before_segv, before_bus, before_ill;
  handler.sa_sigaction = on_bad_access;
  handler.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &handler, &before_segv);
  sigaction(SIGBUS, &handler, &before_bus);
  sigaction(SIGILL, &handler, &before_ill);

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
      b.ended = 0;
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
  sigaction(SIGILL, &before_ill, nullptr);
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
