// The first arguments of every op that reads logits.
#pragma once
#include "common.h"
#include "megarl/logprob.h"

namespace megarl::binding {

inline LogitRows logit_rows(const Tensor& logits, const Tensor& labels,
                            const Tensor& inverse_temperature, const MaybeTensor& mask,
                            const MaybeTensor& keep, int64_t vocab_start, int64_t num_valid) {
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1),
                  "logits must be [T, V/tp] with columns side by side");
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(0 <= num_valid && num_valid <= width && width < (int64_t{1} << 31),
                  "num_valid is outside of the logits");
  const int64_t words = (width + 31) / 32;
  const int64_t temperatures = inverse_temperature.numel() == 1 ? 1 : rows;
  return {dtype_of(logits),
          logits.data_ptr(),
          logits.stride(0),
          data<int64_t>(labels, rows),
          data<float>(inverse_temperature, temperatures),
          temperatures == 1 ? 0 : 1,
          data<bool>(mask, rows),
          data<int32_t>(keep, rows * words),
          words,
          rows,
          width,
          num_valid,
          vocab_start};
}

// `grad` must be as the logits are, apart from its strides of rows.
inline void check_grad(const Tensor& grad, const LogitRows& in) {
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == in.rows && grad.size(1) == in.width &&
                      (in.width <= 1 || grad.stride(1) == 1) && dtype_of(grad) == in.dtype,
                  "grad must be like logits");
}

}  // namespace megarl::binding
