#include "megarl/advantages.h"

#include <limits>

#include "common.h"

namespace megarl::binding {
namespace {

Sequences sequences(const Tensor& cu_seqlens, const Tensor& mask) {
  const int64_t num_bounds = cu_seqlens.numel(), num_tokens = mask.numel();
  STD_TORCH_CHECK(num_bounds > 0, "cu_seqlens must be [n + 1]");
  STD_TORCH_CHECK(num_tokens < std::numeric_limits<int32_t>::max() - 65536,
                  "positions are 32 bits, got ", num_tokens, " tokens");
  return {data<int64_t>(cu_seqlens, num_bounds), data<bool>(mask, num_tokens), num_bounds - 1,
          num_tokens};
}

void gae(const Tensor& rewards, const Tensor& values, const Tensor& mask, const Tensor& cu_seqlens,
         const Tensor& no_eos, double gamma, double lam, Tensor advantages, Tensor returns) {
  const Sequences in = sequences(cu_seqlens, mask);
  const int64_t num_tokens = in.num_tokens;
  run(device::gae,
      Gae{in, data<float>(rewards, num_tokens), data<float>(values, num_tokens),
          data<bool>(no_eos, in.num_sequences), gamma, lam, data<float>(advantages, num_tokens),
          data<float>(returns, num_tokens)},
      rewards);
}

void group_sums(const Tensor& x, const Tensor& mask, const Tensor& cu_seqlens,
                const Tensor& group_of_sequence, const Tensor& members, const Tensor& offsets,
                const MaybeTensor& centres, Tensor partials, Tensor sums) {
  const Sequences in = sequences(cu_seqlens, mask);
  const int64_t n = in.num_sequences, num_groups = offsets.numel() - 1;
  STD_TORCH_CHECK(num_groups >= 0, "offsets must be [num_groups + 1]");
  run(device::group_sums,
      GroupSums{in, data<float>(x, in.num_tokens), data<int64_t>(group_of_sequence, n),
                data<int64_t>(members, n), data<int64_t>(offsets, num_groups + 1),
                data<double>(centres, num_groups), num_groups, data<double>(partials, 2 * n),
                data<double>(sums, 2 * num_groups)},
      x);
}

void group_normalize(const Tensor& x, const Tensor& mask, const Tensor& cu_seqlens,
                     const Tensor& group_of_sequence, const Tensor& totals, const Tensor& counts,
                     const Tensor& divisors, bool leave1out, Tensor out) {
  const Sequences in = sequences(cu_seqlens, mask);
  const int64_t num_groups = totals.numel();
  run(device::group_normalize,
      GroupNormalize{in, data<float>(x, in.num_tokens),
                     data<int64_t>(group_of_sequence, in.num_sequences),
                     data<double>(totals, num_groups), data<double>(counts, num_groups),
                     data<double>(divisors, num_groups), num_groups, leave1out,
                     data<float>(out, in.num_tokens)},
      x);
}

}  // namespace

MEGARL_IMPL(m) {
  m.impl("gae", TORCH_BOX(&gae));
  m.impl("group_sums", TORCH_BOX(&group_sums));
  m.impl("group_normalize", TORCH_BOX(&group_normalize));
}

}  // namespace megarl::binding
