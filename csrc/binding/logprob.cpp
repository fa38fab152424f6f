#include "megarl/logprob.h"

#include "logit_rows.h"

namespace megarl::binding {
namespace {

void logprob_stats(const Tensor& logits, const Tensor& labels, const Tensor& inverse_temperature,
                   const MaybeTensor& mask, const MaybeTensor& keep, int64_t vocab_start,
                   int64_t num_valid, bool with_entropy, Tensor parts) {
  const LogitRows in =
      logit_rows(logits, labels, inverse_temperature, mask, keep, vocab_start, num_valid);
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

void logprob_grad(const Tensor& logits, const Tensor& labels, const Tensor& inverse_temperature,
                  const MaybeTensor& mask, const MaybeTensor& keep, int64_t vocab_start,
                  int64_t num_valid, const Tensor& log_z, const Tensor& entropy,
                  const Tensor& grad_logp, const MaybeTensor& grad_entropy, Tensor grad) {
  const LogitRows in =
      logit_rows(logits, labels, inverse_temperature, mask, keep, vocab_start, num_valid);
  check_grad(grad, in);
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
