// Registers the launchers with torch by its stable ABI: one library serves every torch >= 2.10.
//
// Each binding is compiled once a library, with
//   MEGARL_DEVICE     cpu or cuda, the launchers' namespace
//   MEGARL_KEY        CPU or CUDA, torch's dispatch key
//   MEGARL_NAMESPACE  megarl, or megarl_emu: the CUDA kernels on CPU tensors under csrc/emu
// The schemas are in megarl/ops. Shapes and dtypes are checked there; here is only what makes a
// wrong call memory-safe.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "megarl/base.h"
#include "megarl/errors.h"

#if defined(MEGARL_WITH_CUDA)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#define MEGARL_EXPAND_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define MEGARL_IMPL(m) MEGARL_EXPAND_IMPL(MEGARL_NAMESPACE, MEGARL_KEY, m)

namespace megarl::binding {

namespace device = megarl::MEGARL_DEVICE;
using torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;
using MaybeTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& x) {
  const auto type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "expected float32 or bfloat16");
  return type == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

template <typename T>
constexpr ScalarType scalar_type();
template <>
constexpr ScalarType scalar_type<float>() { return ScalarType::Float; }
template <>
constexpr ScalarType scalar_type<double>() { return ScalarType::Double; }
template <>
constexpr ScalarType scalar_type<bool>() { return ScalarType::Bool; }
template <>
constexpr ScalarType scalar_type<int32_t>() { return ScalarType::Int; }
template <>
constexpr ScalarType scalar_type<int64_t>() { return ScalarType::Long; }
template <>
constexpr ScalarType scalar_type<uint8_t>() { return ScalarType::Byte; }

// The data of a contiguous tensor of `numel` elements.
template <typename T>
T* data(const Tensor& x, int64_t numel) {
  STD_TORCH_CHECK(x.scalar_type() == scalar_type<T>() && x.numel() == numel && x.is_contiguous(),
                  "expected ", numel, " contiguous elements, got ", x.numel());
  return static_cast<T*>(x.data_ptr());
}
template <typename T>
T* data(const MaybeTensor& x, int64_t numel) {
  return x.has_value() ? data<T>(*x, numel) : nullptr;
}

// Calls a launcher where `on` lies, and turns its status into an error.
template <typename Args>
void run(int (*launcher)(const Args&, ParallelFor), const Args& args, const Tensor&) {
  const int status = launcher(args, [](int64_t size, int64_t grain,
                                       void (*body)(int64_t, int64_t, void*), void* context) {
    torch::stable::parallel_for(0, size, grain,
                                [=](int64_t begin, int64_t end) { body(begin, end, context); });
  });
  STD_TORCH_CHECK(status == 0, "kernel failed with status ", status);
}
#if defined(MEGARL_WITH_CUDA)
template <typename Args>
void run(int (*launcher)(const Args&, void*), const Args& args, const Tensor& on) {
  torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream);
  const int status = launcher(args, stream);
  STD_TORCH_CHECK(status == 0, megarl::cuda::error_text(status));
}
#elif defined(MEGARL_EMU)
template <typename Args>
void run(int (*launcher)(const Args&, void*), const Args& args, const Tensor&) {
  const int status = launcher(args, nullptr);
  STD_TORCH_CHECK(status == 0, megarl::cuda::error_text(status));
}
#endif

}  // namespace megarl::binding
