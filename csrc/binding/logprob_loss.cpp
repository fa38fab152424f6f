#include "megarl/logprob_loss.h"

#include "logit_rows.h"

namespace megarl::binding {
namespace {

void logprob_loss(const Tensor& logits, const Tensor& labels, const Tensor& inverse_temperature,
                  const MaybeTensor& mask, const MaybeTensor& keep, int64_t num_valid,
                  const Tensor& prox, const Tensor& advantages, const MaybeTensor& weight,
                  const MaybeTensor& ref, const Tensor& num_tokens, double ratio_low,
                  double ratio_high, double c_clip, double kl_coef, int64_t kl_kind,
                  int64_t objective, int64_t cluster, Tensor logp, Tensor entropy, Tensor grad) {
  const LogitRows in = logit_rows(logits, labels, inverse_temperature, mask, keep, 0, num_valid);
  check_grad(grad, in);
  const PolicySettings settings{
      static_cast<float>(ratio_low), static_cast<float>(ratio_high), static_cast<float>(c_clip),
      static_cast<float>(kl_coef),   static_cast<KlKind>(kl_kind),   static_cast<Objective>(objective)};
  run(device::logprob_loss,
      LogprobLoss{in, data<float>(prox, in.rows), data<float>(advantages, in.rows),
                  data<float>(weight, in.rows), data<float>(ref, in.rows),
                  data<float>(num_tokens, 1), settings, data<float>(logp, in.rows),
                  data<float>(entropy, in.rows), grad.data_ptr(), grad.stride(0), cluster},
      logits);
}

void scale_unless_one(const Tensor& scale, Tensor x) {
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  run(device::scale_unless_one,
      ScaleUnlessOne{dtype_of(x), data<float>(scale, 1), x.data_ptr(), x.numel()}, x);
}

}  // namespace

MEGARL_IMPL(m) {
  m.impl("logprob_loss", TORCH_BOX(&logprob_loss));
  m.impl("scale_unless_one", TORCH_BOX(&scale_unless_one));
}

}  // namespace megarl::binding
