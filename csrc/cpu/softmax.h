// One row of logits: its sums, and the gradient to it.
#pragma once
#include <cmath>

#include "megarl/logprob.h"
#include "simd.h"

namespace megarl::cpu {

// As in SoftmaxSums of csrc/cuda: m = max d, s = sum 2^(d - m), t = sum 2^(d - m) (d - m).
struct Sums {
  float m = -kInfinity;
  double s = 0., t = 0.;
};

Sums sum_row_f32(const float* x, const int32_t* keep, int64_t width, float c, bool with_entropy);
Sums sum_row_bf16(const uint16_t* x, const int32_t* keep, int64_t width, float c,
                  bool with_entropy);

// grad_j = p_j (scale + slope log2 p_j), p_j = 2^(x_j c - top - log_s)
struct RowGradient {
  float c, top, log_s, scale, slope;
};

void grad_row_f32(const float* x, float* grad, const int32_t* keep, int64_t width,
                  const RowGradient& g);
void grad_row_bf16(const uint16_t* x, uint16_t* grad, const int32_t* keep, int64_t width,
                   const RowGradient& g);

// Where one row lies; exactly one of f32 and bf16 is set.
struct Row {
  const float* f32 = nullptr;
  const uint16_t* bf16 = nullptr;
  const int32_t* keep;
  float c;        // bits a unit of logit
  int64_t label;  // column, or -1 where it is not in this shard

  Row(const LogitRows& in, int64_t row) {
    if (in.dtype == DType::kBFloat16)
      bf16 = static_cast<const uint16_t*>(in.logits) + row * in.row_stride;
    else
      f32 = static_cast<const float*>(in.logits) + row * in.row_stride;
    keep = in.keep ? in.keep + row * in.keep_stride : nullptr;
    c = in.inv_temperature[row * in.inv_temperature_stride] * kLog2e;
    const int64_t column = in.labels[row] - in.vocab_start;
    label = column >= 0 && column < in.num_valid ? column : -1;
  }

  float at_label() const {
    if (keep && !(keep[label >> 5] >> (label & 31) & 1)) return -kInfinity;
    return f32 ? f32[label] : float_of_bf16(bf16[label]);
  }

  Sums sums(int64_t num_valid, bool with_entropy) const {
    return f32 ? sum_row_f32(f32, keep, num_valid, c, with_entropy)
               : sum_row_bf16(bf16, keep, num_valid, c, with_entropy);
  }

  // Writes columns [0, num_valid) of grad, which may be the row itself; at_label is added at the
  // label, in float32.
  void write_grad(void* grad, int64_t num_valid, const RowGradient& g, float at_label) const;
};

// Where row r of a matrix of the logits' dtype begins.
inline char* row_of(void* matrix, DType dtype, int64_t stride, int64_t r) {
  return static_cast<char*>(matrix) + r * stride * (dtype == DType::kBFloat16 ? 2 : 4);
}

// Zeros columns [begin, end) of a row.
inline void zero_columns(char* row, DType dtype, int64_t begin, int64_t end) {
  const int64_t size = dtype == DType::kBFloat16 ? 2 : 4;
  std::memset(row + begin * size, 0, static_cast<size_t>((end - begin) * size));
}

}  // namespace megarl::cpu
