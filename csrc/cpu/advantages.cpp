#include "megarl/advantages.h"

#include <algorithm>
#include <limits>

namespace megarl::cpu {
namespace {

struct Range {
  int64_t begin, end;
};

Range range_of(const Sequences& in, int64_t sequence) {
  auto inside = [&](int64_t t) { return std::clamp<int64_t>(t, 0, in.num_tokens); };
  return {inside(in.cu_seqlens[sequence]), inside(in.cu_seqlens[sequence + 1])};
}

// body(sequence) of every sequence; a task has enough tokens to be worth a thread.
template <typename Body>
void each_sequence(const Sequences& in, ParallelFor run, Body&& body) {
  constexpr int64_t kTokens = 16384;
  const int64_t grain = std::max<int64_t>(
      1, in.num_sequences * kTokens / std::max<int64_t>(in.num_tokens, 1));
  parallel_for(run, in.num_sequences, grain, [&](int64_t begin, int64_t end) {
    for (int64_t sequence = begin; sequence < end; ++sequence) body(sequence);
  });
}

}  // namespace

int gae(const Gae& args, ParallelFor run) {
  each_sequence(args.in, run, [&](int64_t sequence) {
    const Range range = range_of(args.in, sequence);
    const double gamma = args.gamma, decay = args.gamma * args.lam;
    double advantage = 0., value = 0.;
    bool is_last = true;
    for (int64_t t = range.end - 1; t >= range.begin; --t) {
      if (!args.in.mask[t]) {
        args.advantages[t] = args.returns[t] = 0.f;
        continue;
      }
      if (is_last && args.no_eos[sequence] && t + 1 < range.end) value = args.values[t + 1];
      is_last = false;
      const double here = args.values[t];
      advantage = args.rewards[t] + gamma * value - here + decay * advantage;
      value = here;
      args.advantages[t] = static_cast<float>(advantage);
      args.returns[t] = static_cast<float>(advantage + here);
    }
  });
  return 0;
}

int group_sums(const GroupSums& args, ParallelFor run) {
  each_sequence(args.in, run, [&](int64_t sequence) {
    const Range range = range_of(args.in, sequence);
    const int64_t group = args.group_of_sequence[sequence];
    const bool in_group = group >= 0 && group < args.num_groups;
    const bool* mask = args.in.mask;
    const float* x = args.x;
    int64_t count = 0;
    double sum = 0.;
    if (args.centres) {
      const double centre = in_group ? args.centres[group] : 0.;
#pragma omp simd reduction(+ : count, sum)
      for (int64_t t = range.begin; t < range.end; ++t) {
        const double gap = x[t] - centre;
        sum += mask[t] ? gap * gap : 0.;
        count += mask[t];
      }
    } else {
#pragma omp simd reduction(+ : count, sum)
      for (int64_t t = range.begin; t < range.end; ++t) {
        sum += mask[t] ? static_cast<double>(x[t]) : 0.;
        count += mask[t];
      }
    }
    args.partials[2 * sequence] = static_cast<double>(count);
    args.partials[2 * sequence + 1] = sum;
  });
  parallel_for(run, args.num_groups, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      double count = 0., sum = 0.;
      for (int64_t k = args.offsets[group]; k < args.offsets[group + 1]; ++k) {
        count += args.partials[2 * args.members[k]];
        sum += args.partials[2 * args.members[k] + 1];
      }
      args.sums[group] = count;
      args.sums[args.num_groups + group] = sum;
    }
  });
  return 0;
}

int group_normalize(const GroupNormalize& args, ParallelFor run) {
  each_sequence(args.in, run, [&](int64_t sequence) {
    const Range range = range_of(args.in, sequence);
    const int64_t group = args.group_of_sequence[sequence];
    double total = std::numeric_limits<double>::quiet_NaN(), count = 1., divisor = 1.;
    if (group >= 0 && group < args.num_groups) {
      total = args.totals[group];
      count = args.counts[group];
      divisor = args.divisors[group];
    }
    const double mean = total / count;
    const bool leave1out = args.leave1out;
    const bool* mask = args.in.mask;
    const float* x = args.x;
    float* out = args.out;
#pragma omp simd
    for (int64_t t = range.begin; t < range.end; ++t) {
      const double value = x[t];
      const double centre = leave1out ? (total - value) / count : mean;
      out[t] = mask[t] ? static_cast<float>((value - centre) / divisor) : 0.f;
    }
  });
  return 0;
}

}  // namespace megarl::cpu
