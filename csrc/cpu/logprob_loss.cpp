#include "megarl/logprob_loss.h"

#include "softmax.h"

namespace megarl::cpu {

int logprob_loss(const LogprobLoss& args, ParallelFor run) {
  const LogitRows& in = args.in;
  parallel_for(run, in.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      char* grad = row_of(args.grad, in.dtype, args.grad_stride, r);
      const bool counts = !in.mask || in.mask[r];
      zero_columns(grad, in.dtype, counts ? in.num_valid : 0, in.width);
      if (!counts) {
        args.logp[r] = args.entropy[r] = 0.f;
        continue;
      }
      const Row row(in, r);
      const Sums sums = row.sums(in.num_valid, true);
      const double log_s = std::log2(sums.s), ln2 = 0.6931471805599453;
      const float label = row.label >= 0 && sums.m > -kInfinity
                              ? std::fma(row.at_label(), row.c, -sums.m)
                              : -kInfinity;
      const float logp = static_cast<float>((label - log_s) * ln2);
      args.logp[r] = logp;
      args.entropy[r] = static_cast<float>((log_s - sums.t / sums.s) * ln2);
      const TokenTerms terms{args.prox[r], args.advantages[r], args.weight ? args.weight[r] : 1.f,
                             args.ref ? args.ref[r] : 0.f};
      const float of_logp = policy_token(logp, terms, args.settings).dlogp / *args.num_tokens *
                            in.inv_temperature[r * in.inv_temperature_stride];
      // The row is still in the cache.
      const RowGradient g{row.c, sums.m, static_cast<float>(log_s), -of_logp, 0.f};
      row.write_grad(grad, in.num_valid, g, of_logp);
    }
  });
  return 0;
}

int scale_unless_one(const ScaleUnlessOne& args, ParallelFor run) {
  const float factor = *args.scale;
  if (factor == 1.f) return 0;
  parallel_for(run, args.size, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (args.dtype == DType::kBFloat16) {
        uint16_t& x = static_cast<uint16_t*>(args.x)[i];
        x = bf16_of(float_of_bf16(x) * factor);
      } else {
        static_cast<float*>(args.x)[i] *= factor;
      }
    }
  });
  return 0;
}

}  // namespace megarl::cpu
