// Types that the launchers of every device share. No torch, no CUDA.
#pragma once
#include <cstddef>
#include <cstdint>

namespace megarl {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1 };

// Runs body(begin, end, context) over [0, size) cut into ranges of at least `grain`, on the
// caller's threads; returns when all are done.
using ParallelFor = void (*)(int64_t size, int64_t grain,
                             void (*body)(int64_t begin, int64_t end, void* context),
                             void* context);

template <typename Body>
void parallel_for(ParallelFor run, int64_t size, int64_t grain, Body&& body) {
  run(
      size, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<Body*>(context))(begin, end); },
      &body);
}

}  // namespace megarl
