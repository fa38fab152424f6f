#include "megarl/policy_loss.h"

#include <algorithm>
#include <vector>

namespace megarl::cpu {
namespace {

constexpr int64_t kChunk = 4096;  // tokens

void apply(const PolicyLoss& args, TokenRange tokens, const SequenceTerms& sequence,
           double (&sums)[kNumPolicySums]) {
  const float inverse = 1.f / *args.normaliser;
  for (int64_t t = tokens.begin; t < tokens.end; ++t)
    args.dlogp[t] = add_token(args, t, sequence, inverse, sums);
}

}  // namespace

int policy_loss(const PolicyLoss& args, ParallelFor run) {
  const bool by_sequence = args.by_sequence();
  const int64_t parts =
      by_sequence ? args.num_sequences : (args.num_tokens + kChunk - 1) / kChunk;
  // Of each part its own sums, added in order: the same bits with any number of threads.
  struct Sums {
    double of[kNumPolicySums] = {};
  };
  std::vector<Sums> sums(static_cast<size_t>(parts));
  const int64_t mean_tokens = parts ? std::max<int64_t>(1, args.num_tokens / parts) : 1;
  parallel_for(run, parts, std::max<int64_t>(1, kChunk / mean_tokens),
               [&](int64_t begin, int64_t end) {
                 for (int64_t k = begin; k < end; ++k) {
                   TokenRange tokens{k * kChunk, std::min((k + 1) * kChunk, args.num_tokens)};
                   SequenceTerms sequence{};
                   if (by_sequence) {
                     tokens = sequence_tokens(args, k);
                     SequenceSums of_sequence;
                     for (int64_t t = tokens.begin; t < tokens.end; ++t) of_sequence.add(args, t);
                     sequence = SequenceTerms(of_sequence, args);
                   }
                   apply(args, tokens, sequence, sums[static_cast<size_t>(k)].of);
                 }
               });
  for (int i = 0; i < kNumPolicySums; ++i) {
    double sum = 0.;
    for (const Sums& part : sums) sum += part.of[i];
    put_sum(args, i, sum);
  }
  return 0;
}

}  // namespace megarl::cpu
