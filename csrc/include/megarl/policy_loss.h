// The policy loss of packed sequences, its gradient and its metrics in one call; the formulas are
// in megarl/algorithms/losses.py.
#pragma once
#include "megarl/base.h"
#include "megarl/policy_math.h"

namespace megarl {

// Sums over the tokens under the mask: the metrics in their order, and the loss.
enum PolicySum : int {
  kImportanceWeight,
  kClipRatio,
  kClipHighRatio,
  kDualClipRatio,
  kKl,
  kBehaveWeight,
  kBehaveWeightSq,
  kBehaveKl,
  kBehaveMasked,
  kRefKl,
  kEntropy,
  kLoss,
  kNumPolicySums
};

struct PolicyLoss {
  const float *logp, *prox;
  const float* behaviour;  // [num_tokens]; not read unless decoupled
  const float* advantages;
  const float *ref, *entropy;  // [num_tokens] or null
  const bool* mask;            // values under false are not used
  const int64_t* cu_seqlens;   // [num_sequences + 1], read where a sequence has a part of its own
  const float* normaliser;     // [1], N
  int64_t num_tokens, num_sequences;
  PolicySettings settings;
  WeightSettings bounds;
  bool sequence_ratio, decoupled;
  // 8 bytes that are 0, and are left so, and max_blocks rows of kNumPolicySums float64. More
  // blocks are not launched; the order of sums depends on it.
  void* workspace;
  int64_t max_blocks;
  float* dlogp;     // [num_tokens], of loss / N; 0 under a false mask
  float* metrics;   // [kLoss], sums / N; those that have no meaning here are 0
  float* loss;      // [1]

  MEGARL_HD bool by_sequence() const { return sequence_ratio || (decoupled && bounds.of_sequence); }
};

// Sums over the masked tokens of one sequence, and what they make of the sequence.
struct SequenceSums {
  double count = 0., log_ratio = 0., advantage = 0., measure = 0., weight = 0.;
  float highest = -INFINITY;  // measure

  MEGARL_HD void add(const PolicyLoss& args, int64_t token) {
    if (!args.mask[token]) return;
    const float prox = args.prox[token];
    count += 1.;
    log_ratio += args.logp[token] - prox;
    advantage += args.advantages[token];
    if (!args.decoupled) return;
    const WeightSettings& bounds = args.bounds;
    const float log_w = log_weight(prox, args.behaviour[token]);
    if (!bounds.of_sequence) {
      weight += token_weight(log_w, bounds);
      return;
    }
    // A ratio is aggregated in logarithms.
    const bool is_ratio = bounds.metric == WeightMetric::kRatio;
    const float of_token = is_ratio ? log_w : weight_measure(log_w, bounds.metric);
    measure += of_token;
    highest = of_token > highest ? of_token : highest;
    weight += expf(log_w);
  }

  MEGARL_HD void merge(const SequenceSums& other) {
    count += other.count;
    log_ratio += other.log_ratio;
    advantage += other.advantage;
    measure += other.measure;
    weight += other.weight;
    highest = other.highest > highest ? other.highest : highest;
  }
};

struct SequenceTerms {
  float ratio, advantage;
  float weight;       // kRatio: of every token
  bool is_kept;       // other metrics: tokens have their own weight, or 0
  float mean_weight;  // over the masked tokens

  SequenceTerms() = default;
  MEGARL_HD SequenceTerms(const SequenceSums& sums, const PolicyLoss& args)
      : ratio(1.f), advantage(0.f), weight(1.f), is_kept(true), mean_weight(1.f) {
    const double count = sums.count > 0. ? sums.count : 1.;
    ratio = expf(static_cast<float>(sums.log_ratio / count));
    advantage = static_cast<float>(sums.advantage / count);
    if (!args.decoupled) return;
    mean_weight = static_cast<float>(sums.weight / count);
    const WeightSettings& bounds = args.bounds;
    if (!bounds.of_sequence) return;
    const float measure = bounds.agg == WeightAgg::kMax   ? sums.highest
                          : bounds.agg == WeightAgg::kSum ? static_cast<float>(sums.measure)
                                                          : static_cast<float>(sums.measure / count);
    if (bounds.metric == WeightMetric::kRatio) {
      const float w = expf(measure);
      weight = mean_weight = bounded_weight(w, w, bounds);
    } else {
      is_kept = bounded_weight(1.f, measure, bounds) > 0.f;
      if (!is_kept) mean_weight = 0.f;
    }
  }
};

// Adds a token to `sums`, still to be divided by N; returns dlogp, with 1 / N = `inverse` in it.
// `sequence` is read where a sequence has a part of its own.
MEGARL_HD float add_token(const PolicyLoss& args, int64_t token, const SequenceTerms& sequence,
                          float inverse, double (&sums)[kNumPolicySums]) {
  if (!args.mask[token]) return 0.f;
  const float logp = args.logp[token];
  TokenTerms terms{args.prox[token], args.advantages[token], 1.f, 0.f};
  float sampler = terms.prox;
  if (args.settings.kl_coef > 0.f) terms.ref = args.ref[token];
  if (args.decoupled) {
    sampler = args.behaviour[token];
    const float log_w = log_weight(terms.prox, sampler);
    if (!args.bounds.of_sequence) {
      terms.weight = token_weight(log_w, args.bounds);
    } else if (args.bounds.metric == WeightMetric::kRatio) {
      terms.weight = sequence.weight;
    } else {
      terms.weight = sequence.is_kept ? expf(log_w) : 0.f;
    }
    sums[kBehaveWeight] += terms.weight;
    sums[kBehaveWeightSq] += static_cast<double>(terms.weight) * terms.weight;
    sums[kBehaveKl] += kl_term(sampler - terms.prox, KlKind::kK3).value;
    sums[kBehaveMasked] += terms.weight == 0.f ? 1. : 0.;
  }
  TokenLoss out;
  if (args.sequence_ratio) {
    const Surrogate s = surrogate(sequence.ratio, logp, sequence.advantage, args.settings);
    out = weighed(s, sequence.ratio, sequence.mean_weight, logp, terms, args.settings);
  } else {
    out = policy_token(logp, terms, args.settings);
  }
  sums[kLoss] += out.loss;
  sums[kImportanceWeight] += out.ratio;
  sums[kClipRatio] += out.clipped ? 1. : 0.;
  sums[kClipHighRatio] += out.clipped && out.ratio > args.settings.ratio_high ? 1. : 0.;
  sums[kDualClipRatio] += out.dual_clipped ? 1. : 0.;
  sums[kKl] += kl_term(sampler - logp, KlKind::kK3).value;
  sums[kRefKl] += out.ref_kl;
  if (args.entropy) sums[kEntropy] += args.entropy[token];
  return out.dlogp * inverse;
}

// The tokens of a sequence; never outside of the buffers, whatever cu_seqlens says.
struct TokenRange {
  int64_t begin, end;
};
MEGARL_HD TokenRange sequence_tokens(const PolicyLoss& args, int64_t sequence) {
  const int64_t begin = args.cu_seqlens[sequence], end = args.cu_seqlens[sequence + 1];
  return {begin > 0 ? begin : 0, end < args.num_tokens ? end : args.num_tokens};
}

// Sum i, divided by N, where it belongs. nan where the sequences are not all of the tokens, some
// of which then have no gradient.
MEGARL_HD void put_sum(const PolicyLoss& args, int i, double sum) {
  const bool covered = !args.by_sequence() ||
                       (args.cu_seqlens[0] == 0 &&
                        args.cu_seqlens[args.num_sequences] == args.num_tokens);
  float* out = i == kLoss ? args.loss : args.metrics + i;
  *out = covered ? static_cast<float>(sum / static_cast<double>(*args.normaliser)) : NAN;
}

namespace cpu {
int policy_loss(const PolicyLoss& args, ParallelFor run);
}
// 0, or what cudaGetLastError gave.
namespace cuda {
int policy_loss(const PolicyLoss& args, void* stream);
}

}  // namespace megarl
