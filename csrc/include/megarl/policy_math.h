// The policy loss of one token, and its gradient by the token's logprob, on any device.
//
// Formulas, papers and clamps are those of megarl/algorithms/{losses,kl}.py. Nothing here is
// divided by the number of tokens, and nothing knows of masks: callers skip masked tokens.
// Ratios over exp(88) are inf, and then gradients too, or nan, so that the caller's check of
// the gradient norm stops the run.
#pragma once
#include <math.h>

#if defined(MEGARL_EMU)
#define MEGARL_HD inline
#elif defined(__CUDACC__)
#define MEGARL_HD __host__ __device__ __forceinline__
#else
#define MEGARL_HD inline __attribute__((always_inline))
#endif

namespace megarl {

enum class Objective : int { kPpo = 0, kCispo = 1 };
enum class KlKind : int { kK1 = 1, kK2 = 2, kK3 = 3 };
enum class WeightMetric : int { kRatio = 0, kK1 = 1, kK2 = 2, kK3 = 3 };  // as in KlKind
enum class WeightAgg : int { kMean = 0, kSum = 1, kMax = 2 };

struct PolicySettings {
  float ratio_low, ratio_high;  // 1 - eps_low and 1 + eps_high, added in float64
  float c_clip;                 // <= 0: no dual clip
  float kl_coef;                // 0: no term for the reference policy, `ref` is not used
  KlKind kl_kind;
  Objective objective;
};

// Bounds on the behaviour weight. None: {false, false, kRatio, kMean, -inf, inf}.
struct WeightSettings {
  bool of_sequence;  // what is compared with the bounds is a whole sequence's
  bool clamp;        // to the bounds (kRatio alone); otherwise tokens outside of them weigh 0
  WeightMetric metric;
  WeightAgg agg;  // of_sequence: how it is made of its tokens'
  float lower, upper;
};

struct TokenTerms {
  float prox, advantage;
  float weight;  // of the behaviour policy, after bounds: 0 if dropped, 1 if not decoupled
  float ref;     // used if kl_coef > 0
};

struct TokenLoss {
  float loss, dlogp;
  float ratio;   // exp(logp - prox)
  float ref_kl;  // 0 if kl_coef is 0
  bool clipped, dual_clipped;
};

// A value and its derivative.
struct Term {
  float value, slope;
};

// Estimate of KL(p || q) from gap = log p(x) - log q(x), clamped to [-10, 10]; by log p. The
// slope is 0 where the clamp holds.
MEGARL_HD Term kl_term(float gap, KlKind kind) {
  constexpr float kBound = 10.f;
  float value = gap, slope = 1.f;
  if (kind == KlKind::kK2) {
    value = 0.5f * gap * gap;
    slope = gap;
  } else if (kind == KlKind::kK3) {
    const float held = gap < -2.f * kBound ? -2.f * kBound : gap;  // exp of more overflows
    const float grown = expm1f(-held);
    value = grown + held;
    slope = -grown;
  }
  if (value > kBound) return {kBound, 0.f};
  if (value < -kBound) return {-kBound, 0.f};
  return {value, slope};
}

// log of the behaviour weight. A logprob of -inf on both sides (a token outside top-p) says
// nothing about the weight, and one of -inf on one side is taken the same way.
MEGARL_HD float log_weight(float prox, float behaviour) {
  const float gap = prox - behaviour;
  return fabsf(gap) < INFINITY ? gap : 0.f;  // nan too
}

// What is compared with the bounds, of a weight with this logarithm.
MEGARL_HD float weight_measure(float log_weight, WeightMetric metric) {
  if (metric == WeightMetric::kRatio) return expf(log_weight);
  return kl_term(-log_weight, static_cast<KlKind>(metric)).value;
}

MEGARL_HD float bounded_weight(float weight, float measure, const WeightSettings& settings) {
  if (settings.clamp) {
    const float lower = settings.lower > 0.f ? settings.lower : 0.f;
    const float raised = weight < lower ? lower : weight;
    return raised > settings.upper ? settings.upper : raised;
  }
  return measure >= settings.lower && measure <= settings.upper ? weight : 0.f;
}

// The weight of a token whose bounds are not a sequence's.
MEGARL_HD float token_weight(float log_weight, const WeightSettings& settings) {
  return bounded_weight(expf(log_weight), weight_measure(log_weight, settings.metric), settings);
}

struct Surrogate {
  float value;
  float slope;  // by log ratio (ppo), by logp (cispo)
  bool clipped, dual_clipped;
};

// The objective without behaviour weight and reference policy. `logp` is read for cispo alone.
MEGARL_HD Surrogate surrogate(float ratio, float logp, float advantage,
                              const PolicySettings& settings) {
  const float raised = ratio < settings.ratio_low ? settings.ratio_low : ratio;
  const float bounded = raised > settings.ratio_high ? settings.ratio_high : raised;
  if (settings.objective == Objective::kCispo) {
    const float slope = -advantage * bounded;
    return {slope * logp, slope, bounded != ratio, false};
  }
  const float plain = -advantage * ratio, held = -advantage * bounded;
  const bool clipped = held > plain;
  const float value = clipped ? held : plain;  // nan if plain is
  const float ceiling = -settings.c_clip * advantage;
  const bool dual_clipped = settings.c_clip > 0.f && advantage < 0.f && value > ceiling;
  // A product: 0 times a ratio of inf stays nan. Where both sides of the maximum are equal the
  // ratio is within its bounds, and each passes half of one gradient.
  const float slope = (clipped || dual_clipped ? 0.f : -advantage) * ratio;
  return {dual_clipped ? ceiling : value, slope, clipped && !dual_clipped, dual_clipped};
}

// What a surrogate and the reference policy give together. `mean_weight` multiplies the gradient
// alone: `terms.weight` again where the ratio is the token's own, and the mean weight of the
// sequence where the ratio is the sequence's, since each token is 1 / count of its logarithm.
MEGARL_HD TokenLoss weighed(const Surrogate& s, float ratio, float mean_weight, float logp,
                            const TokenTerms& terms, const PolicySettings& settings) {
  TokenLoss out{s.value * terms.weight, s.slope * mean_weight, ratio, 0.f, s.clipped,
                s.dual_clipped};
  if (settings.kl_coef > 0.f) {
    const Term kl = kl_term(logp - terms.ref, settings.kl_kind);
    out.loss += settings.kl_coef * kl.value;
    out.dlogp += settings.kl_coef * kl.slope;
    out.ref_kl = kl.value;
  }
  return out;
}

// A token whose ratio is its own.
MEGARL_HD TokenLoss policy_token(float logp, const TokenTerms& terms,
                                 const PolicySettings& settings) {
  const float ratio = expf(logp - terms.prox);
  const Surrogate s = surrogate(ratio, logp, terms.advantage, settings);
  return weighed(s, ratio, terms.weight, logp, terms, settings);
}

}  // namespace megarl
