#include "megarl/logprob.h"

#include "common.h"

namespace megarl::binding {
namespace {

LogitRows rows_of(const Tensor& logits, const Tensor& labels, const Tensor& inv_temperature,
                  const MaybeTensor& mask, const MaybeTensor& keep, int64_t vocab_start,
                  int64_t num_valid) {
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1),
                  "logits must be [T, V/tp] with columns side by side");
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(0 <= num_valid && num_valid <= width && width < (int64_t{1} << 31),
                  "num_valid is outside of the logits");
  const int64_t words = (width + 31) / 32;
  const int64_t temperatures = inv_temperature.numel() == 1 ? 1 : rows;
  return {dtype_of(logits),
          logits.data_ptr(),
          logits.stride(0),
          data<int64_t>(labels, rows),
          data<float>(inv_temperature, temperatures),
          temperatures == 1 ? 0 : 1,
          data<bool>(mask, rows),
          data<int32_t>(keep, rows * words),
          words,
          rows,
          width,
          num_valid,
          vocab_start};
}

void logprob_stats(const Tensor& logits, const Tensor& labels, const Tensor& inv_temperature,
                   const MaybeTensor& mask, const MaybeTensor& keep, int64_t vocab_start,
                   int64_t num_valid, bool with_entropy, Tensor parts) {
  const LogitRows in =
      rows_of(logits, labels, inv_temperature, mask, keep, vocab_start, num_valid);
  run(device::logprob_stats, LogprobStats{in, with_entropy, data<float>(parts, 4 * in.rows)},
      logits);
}

void logprob_combine(const Tensor& parts, const MaybeTensor& mask, bool with_entropy, Tensor logp,
                     Tensor entropy, Tensor log_z) {
  STD_TORCH_CHECK(parts.dim() == 3 && parts.size(2) == 4, "parts must be [tp, T, 4]");
  const int64_t tp = parts.size(0), rows = parts.size(1);
  run(device::logprob_combine,
      LogprobCombine{data<float>(parts, 4 * tp * rows), data<bool>(mask, rows), tp, rows,
                     with_entropy, data<float>(logp, rows), data<float>(entropy, rows),
                     data<float>(log_z, 2 * rows)},
      parts);
}

void logprob_grad(const Tensor& logits, const Tensor& labels, const Tensor& inv_temperature,
                  const MaybeTensor& mask, const MaybeTensor& keep, int64_t vocab_start,
                  int64_t num_valid, const Tensor& log_z, const Tensor& entropy,
                  const Tensor& grad_logp, const MaybeTensor& grad_entropy, Tensor grad) {
  const LogitRows in =
      rows_of(logits, labels, inv_temperature, mask, keep, vocab_start, num_valid);
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == in.rows && grad.size(1) == in.width &&
                      (in.width <= 1 || grad.stride(1) == 1) && dtype_of(grad) == in.dtype,
                  "grad must be like logits");
  run(device::logprob_grad,
      LogprobGrad{in, data<float>(log_z, 2 * in.rows), data<float>(entropy, in.rows),
                  data<float>(grad_logp, in.rows), data<float>(grad_entropy, in.rows),
                  grad.data_ptr(), grad.stride(0)},
      logits);
}

}  // namespace

MEGARL_IMPL(m) {
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats));
  m.impl("logprob_combine", TORCH_BOX(&logprob_combine));
  m.impl("logprob_grad", TORCH_BOX(&logprob_grad));
}

}  // namespace megarl::binding
