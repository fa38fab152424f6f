#include "megarl/policy_loss.h"

#include "common.h"

namespace megarl::binding {
namespace {

void policy_loss(const Tensor& logp, const Tensor& prox, const Tensor& behaviour,
                 const Tensor& advantages, const MaybeTensor& ref, const MaybeTensor& entropy,
                 const Tensor& mask, const Tensor& cu_seqlens, const Tensor& normaliser,
                 double eps_low, double eps_high, int64_t objective, double c_clip,
                 bool sequence_ratio, bool decoupled, bool bounds_of_sequence, bool bounds_clamp,
                 int64_t bounds_metric, int64_t bounds_agg, double lower, double upper,
                 double kl_coef, int64_t kl_kind, Tensor workspace, Tensor dlogp, Tensor metrics,
                 Tensor loss) {
  const int64_t num_tokens = logp.numel(), num_sequences = cu_seqlens.numel() - 1;
  STD_TORCH_CHECK(num_sequences >= 0, "cu_seqlens must be [n + 1]");
  STD_TORCH_CHECK(!(kl_coef > 0) || ref.has_value(), "kl_coef > 0 needs ref");
  STD_TORCH_CHECK(0 <= objective && objective <= 1 && 0 <= bounds_metric && bounds_metric <= 3 &&
                      0 <= bounds_agg && bounds_agg <= 2 && 1 <= kl_kind && kl_kind <= 3,
                  "a choice is out of range");
  const PolicySettings settings{static_cast<float>(1. - eps_low),
                                static_cast<float>(1. + eps_high),
                                static_cast<float>(c_clip),
                                static_cast<float>(kl_coef),
                                static_cast<KlKind>(kl_kind),
                                static_cast<Objective>(objective)};
  const WeightSettings bounds{bounds_of_sequence,
                              bounds_clamp,
                              static_cast<WeightMetric>(bounds_metric),
                              static_cast<WeightAgg>(bounds_agg),
                              static_cast<float>(lower),
                              static_cast<float>(upper)};
  const int64_t words = workspace.numel(), max_blocks = (words - 1) / kNumPolicySums;
  STD_TORCH_CHECK(max_blocks >= 1, "workspace must be [1 + ", static_cast<int>(kNumPolicySums),
                  " blocks]");
  run(device::policy_loss,
      PolicyLoss{data<float>(logp, num_tokens),
                 data<float>(prox, num_tokens),
                 data<float>(behaviour, num_tokens),
                 data<float>(advantages, num_tokens),
                 data<float>(ref, num_tokens),
                 data<float>(entropy, num_tokens),
                 data<bool>(mask, num_tokens),
                 data<int64_t>(cu_seqlens, num_sequences + 1),
                 data<float>(normaliser, 1),
                 num_tokens,
                 num_sequences,
                 settings,
                 bounds,
                 sequence_ratio,
                 decoupled,
                 data<double>(workspace, words),
                 max_blocks,
                 data<float>(dlogp, num_tokens),
                 data<float>(metrics, kLoss),
                 data<float>(loss, 1)},
      logp);
}

}  // namespace

MEGARL_IMPL(m) { m.impl("policy_loss", TORCH_BOX(&policy_loss)); }

}  // namespace megarl::binding
