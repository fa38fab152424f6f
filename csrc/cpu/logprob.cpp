#include "megarl/logprob.h"

#include <algorithm>

#include "softmax.h"

namespace megarl::cpu {
namespace {

constexpr int kBlock = 2048;  // columns at a time: 8 KiB of floats stay in the first cache

// Columns whose bit is 0 become -inf.
MEGARL_INLINE void drop(float* x, const int32_t* keep, int64_t first, int count) {
  for (int i = 0; i < count; ++i) {
    const int64_t column = first + i;
    if (!(keep[column >> 5] >> (column & 31) & 1)) x[i] = -kInfinity;
  }
}

template <typename T>
MEGARL_INLINE Sums sum_row(const T* x, const int32_t* keep, int64_t width, float c,
                           bool with_entropy) {
  Sums sums;
  float f[kBlock];
  for (int64_t first = 0; first < width; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, width - first));
    load(x + first, f, count);
    if (keep) drop(f, keep, first, count);
    float top = -kInfinity;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < count; ++i) top = top > f[i] ? top : f[i];
    top *= c;
    if (top > sums.m) {
      const double gap = static_cast<double>(sums.m) - top;
      const double scale = std::exp2(gap);
      sums.t = sums.s > 0. ? scale * (sums.t + gap * sums.s) : 0.;
      sums.s *= scale;
      sums.m = top;
    }
    if (sums.m == -kInfinity) {
      // Nothing so far, unless it is nan: a maximum passes nan by.
      for (int i = 0; i < count; ++i) sums.s += f[i] != f[i] ? f[i] : 0.f;
      continue;
    }
    float s = 0.f, t = 0.f;
    if (with_entropy) {
#pragma omp simd reduction(+ : s, t)
      for (int i = 0; i < count; ++i) {
        const float d = f[i] * c - sums.m;
        const float e = exp2_of(d);
        s += e;
        t += e * (d < -1e30f ? -1e30f : d);  // 0 * -inf is nan
      }
    } else {
#pragma omp simd reduction(+ : s)
      for (int i = 0; i < count; ++i) s += exp2_of(f[i] * c - sums.m);
    }
    sums.s += s;
    sums.t += t;
  }
  return sums;
}

template <typename T>
MEGARL_INLINE void grad_row(const T* x, T* grad, const int32_t* keep, int64_t width,
                            const RowGradient& g) {
  float f[kBlock];
  for (int64_t first = 0; first < width; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, width - first));
    load(x + first, f, count);
    if (keep) drop(f, keep, first, count);
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const float d = f[i] * g.c - g.top - g.log_s;
      f[i] = exp2_of(d) * (g.scale + g.slope * (d < -1e30f ? -1e30f : d));
    }
    store(f, grad + first, count);
  }
}

}  // namespace

MEGARL_CLONES Sums sum_row_f32(const float* x, const int32_t* keep, int64_t width, float c,
                               bool with_entropy) {
  return sum_row(x, keep, width, c, with_entropy);
}
MEGARL_CLONES Sums sum_row_bf16(const uint16_t* x, const int32_t* keep, int64_t width, float c,
                                bool with_entropy) {
  return sum_row(x, keep, width, c, with_entropy);
}

MEGARL_CLONES void grad_row_f32(const float* x, float* grad, const int32_t* keep, int64_t width,
                                const RowGradient& g) {
  grad_row(x, grad, keep, width, g);
}
MEGARL_CLONES void grad_row_bf16(const uint16_t* x, uint16_t* grad, const int32_t* keep,
                                 int64_t width, const RowGradient& g) {
  grad_row(x, grad, keep, width, g);
}

void Row::write_grad(void* grad, int64_t num_valid, const RowGradient& g, float at_label) const {
  // Of the label before its logit may be written over, and rounded once.
  float label_grad = 0.f;
  if (label >= 0) {
    const float d = this->at_label() * g.c - g.top - g.log_s;
    label_grad = exp2_of(d) * (g.scale + g.slope * std::max(d, -1e30f)) + at_label;
  }
  if (f32) {
    float* out = static_cast<float*>(grad);
    grad_row_f32(f32, out, keep, num_valid, g);
    if (label >= 0) out[label] = label_grad;
  } else {
    uint16_t* out = static_cast<uint16_t*>(grad);
    grad_row_bf16(bf16, out, keep, num_valid, g);
    if (label >= 0) out[label] = bf16_of(label_grad);
  }
}

int logprob_stats(const LogprobStats& args, ParallelFor run) {
  const LogitRows& in = args.in;
  parallel_for(run, in.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (in.mask && !in.mask[r]) continue;
      const Row row(in, r);
      const Sums sums = row.sums(in.num_valid, args.with_entropy);
      float* parts = args.parts + 4 * r;
      parts[0] = sums.m;
      parts[1] = static_cast<float>(sums.s);
      parts[2] = static_cast<float>(sums.t);
      parts[3] = row.label >= 0 && sums.m > -kInfinity
                     ? std::fma(row.at_label(), row.c, -sums.m)
                     : -kInfinity;
    }
  });
  return 0;
}

int logprob_combine(const LogprobCombine& args, ParallelFor run) {
  parallel_for(run, args.rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const bool counts = !args.mask || args.mask[r];
      float top = -kInfinity;
      double s = 0., t = 0., label = -kInfinity;
      for (int64_t k = 0; counts && k < args.tp; ++k)
        top = std::max(top, args.parts[4 * (k * args.rows + r)]);
      for (int64_t k = 0; counts && k < args.tp; ++k) {
        const float* part = args.parts + 4 * (k * args.rows + r);
        if (part[0] == -kInfinity && part[1] == 0.f) continue;  // nothing of this shard counts
        const double gap = static_cast<double>(part[0]) - top;
        const double scale = std::exp2(gap);
        s += scale * part[1];
        t += scale * (part[2] + gap * part[1]);
        label = std::max(label, gap + part[3]);
      }
      const double log_s = std::log2(s), ln2 = 0.6931471805599453;
      args.logp[r] = counts ? static_cast<float>((label - log_s) * ln2) : 0.f;
      args.entropy[r] =
          counts && args.with_entropy ? static_cast<float>((log_s - t / s) * ln2) : 0.f;
      args.log_z[2 * r] = counts ? top : 0.f;
      args.log_z[2 * r + 1] = counts ? static_cast<float>(log_s) : 0.f;
    }
  });
  return 0;
}

int logprob_grad(const LogprobGrad& args, ParallelFor run) {
  const LogitRows& in = args.in;
  parallel_for(run, in.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      char* grad = row_of(args.grad, in.dtype, args.grad_stride, r);
      const bool counts = !in.mask || in.mask[r];
      zero_columns(grad, in.dtype, counts ? in.num_valid : 0, in.width);
      if (!counts) continue;
      const Row row(in, r);
      const float inv_temperature = in.inv_temperature[r * in.inv_temperature_stride];
      const float of_logp = args.grad_logp[r] * inv_temperature;
      const float of_entropy = args.grad_entropy ? args.grad_entropy[r] * inv_temperature : 0.f;
      const RowGradient g{row.c, args.log_z[2 * r], args.log_z[2 * r + 1],
                          -of_logp - of_entropy * args.entropy[r], -of_entropy * kLn2};
      row.write_grad(grad, in.num_valid, g, of_logp);
    }
  });
  return 0;
}

}  // namespace megarl::cpu
