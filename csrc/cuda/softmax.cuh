// Sums of exponentials in bits, as one pass over a row builds them up and as parts of a row merge.
#pragma once
#include <type_traits>

#include "megarl/device.h"
#include "megarl/logprob.h"

namespace megarl::cuda {

// m = max d, s = sum 2^(d - m), t = sum 2^(d - m) (d - m) over the values d seen so far.
struct SoftmaxSums {
  float m = -INFINITY, s = 0.f, t = 0.f;

  // Moves the reference from m to `top` >= m.
  template <bool kEntropy>
  __device__ __forceinline__ void raise(float top) {
    const float scale = fast_exp2(m - top);
    if constexpr (kEntropy) t = s > 0.f ? scale * (t + (m - top) * s) : 0.f;
    s *= scale;
    m = top;
  }

  // Logits f of which those at -inf count nothing; c is bits a unit of logit.
  template <bool kEntropy, int kSize>
  __device__ __forceinline__ void add(const float (&f)[kSize], float c) {
    float top = f[0];
#pragma unroll
    for (int j = 1; j < kSize; ++j) top = fmaxf(top, f[j]);
    top *= c;
    if (top > m) raise<kEntropy>(top);  // seldom taken after the first vectors of a row
    if (m == -INFINITY) return;
    float sum = 0.f, weighted = 0.f;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float d = fmaf(f[j], c, -m);
      const float e = fast_exp2(d);
      sum += e;
      // 0 * -inf is nan: a column at -inf is given a finite distance.
      if constexpr (kEntropy) weighted = fmaf(e, fmaxf(d, -1e30f), weighted);
    }
    s += sum;
    if constexpr (kEntropy) t += weighted;
  }

  template <bool kEntropy>
  __device__ __forceinline__ void merge(SoftmaxSums other) {
    if (other.m == -INFINITY && !(other.s != other.s)) return;
    if (other.m > m) {
      raise<kEntropy>(other.m);
    } else {
      other.raise<kEntropy>(m);
    }
    s += other.s;
    if constexpr (kEntropy) t += other.t;
  }

  // Every lane of a warp gets the sums of all.
  template <bool kEntropy>
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int bits = 16; bits > 0; bits >>= 1) {
      SoftmaxSums other;
      other.m = __shfl_xor_sync(kAllLanes, m, bits);
      other.s = __shfl_xor_sync(kAllLanes, s, bits);
      if constexpr (kEntropy) other.t = __shfl_xor_sync(kAllLanes, t, bits);
      merge<kEntropy>(other);
    }
  }
};

// Bits keep[column .. column + size) of a row, the first in bit 0. `words` is the row's length.
__device__ __forceinline__ uint32_t keep_bits(const int32_t* keep, int words, int column) {
  const int word = column >> 5;
  const uint32_t low = static_cast<uint32_t>(keep[word]);
  const uint32_t high = word + 1 < words ? static_cast<uint32_t>(keep[word + 1]) : 0u;
  return __funnelshift_r(low, high, static_cast<uint32_t>(column & 31));
}

template <int kSize>
__device__ __forceinline__ void drop(float (&f)[kSize], uint32_t kept) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) f[j] = kept >> j & 1u ? f[j] : -INFINITY;
}

// One row of LogitRows: where its vectors lie, and the scalars before and after them.
template <typename T>
struct Row {
  const T* x;
  int num_valid, head, num_vectors, words;
  const int32_t* keep;
  float c;    // bits a unit of logit
  int label;  // column of the label, or -1 where it is not in this shard

  __device__ __forceinline__ Row(const LogitRows& in, int64_t row) {
    x = static_cast<const T*>(in.logits) + row * in.row_stride;
    num_valid = static_cast<int>(in.num_valid);
    head = elements_to_boundary(x, num_valid);
    num_vectors = (num_valid - head) / Vec<T>::kSize;
    words = static_cast<int>((in.width + 31) / 32);
    keep = in.keep ? in.keep + row * in.keep_stride : nullptr;
    c = in.inv_temperature[row * in.inv_temperature_stride] * kLog2e;
    const int64_t column = in.labels[row] - in.vocab_start;
    label = column >= 0 && column < num_valid ? static_cast<int>(column) : -1;
  }

  __device__ __forceinline__ int tail_start() const { return head + num_vectors * Vec<T>::kSize; }

  template <bool kKeep>
  __device__ __forceinline__ float value(int column) const {
    if constexpr (kKeep) {
      if (!(keep[column >> 5] >> (column & 31) & 1)) return -INFINITY;
    }
    return Vec<T>::get(x + column);
  }
};

// The columns of `row` that fall to `thread` of `num_threads`, kAhead loads before their first use.
template <typename T, bool kEntropy, bool kKeep, int kAhead>
__device__ __forceinline__ SoftmaxSums sum_row(const Row<T>& row, int thread, int num_threads) {
  constexpr int kSize = Vec<T>::kSize;
  SoftmaxSums sums;
  const uint4* vectors = reinterpret_cast<const uint4*>(row.x + row.head);
  for (int first = thread; first < row.num_vectors; first += kAhead * num_threads) {
    uint4 loaded[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = first + k * num_threads;
      if (i < row.num_vectors) loaded[k] = load_once(vectors + i);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = first + k * num_threads;
      if (i < row.num_vectors) {
        float f[kSize];
        Vec<T>::unpack(loaded[k], f);
        if constexpr (kKeep) drop(f, keep_bits(row.keep, row.words, row.head + i * kSize));
        sums.add<kEntropy>(f, row.c);
      }
    }
  }
  // At most kSize - 1 columns before the vectors and as many after them.
  const int tail = row.num_valid - row.tail_start();
  if (thread < row.head) {
    const float f[1] = {row.template value<kKeep>(thread)};
    sums.add<kEntropy>(f, row.c);
  }
  if (thread < tail) {
    const float f[1] = {row.template value<kKeep>(row.tail_start() + thread)};
    sums.add<kEntropy>(f, row.c);
  }
  return sums;
}

// d logits of one column: what is the same for a whole row, computed once.
template <bool kEntropy>
struct RowGradient {
  float c, top, log_s, scale, slope, at_label;
  int label;

  // top + log_s is log2 Z; both gradients already divided by the temperature.
  __device__ __forceinline__ RowGradient(float c, int label, float top, float log_s, float entropy,
                                         float grad_logp, float grad_entropy)
      : c(c), top(top), log_s(log_s), scale(-grad_logp), slope(0.f), at_label(grad_logp),
        label(label) {
    if constexpr (kEntropy) {
      scale = fmaf(-grad_entropy, entropy, scale);
      slope = -grad_entropy * kLn2;
    }
  }

  __device__ __forceinline__ float operator()(float x, int column) const {
    const float d = fmaf(x, c, -top) - log_s;  // log2 p
    const float p = fast_exp2(d);
    float factor = scale;
    if constexpr (kEntropy) factor = fmaf(slope, fmaxf(d, -1e30f), scale);
    const float grad = p * factor;
    return column == label ? grad + at_label : grad;
  }
};

}  // namespace megarl::cuda
