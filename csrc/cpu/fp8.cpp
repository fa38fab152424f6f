#include "megarl/fp8.h"

#include <algorithm>

#include "simd.h"

namespace megarl::cpu {

// To nearest even, saturating; nan is 0x7f.
MEGARL_INLINE uint8_t e4m3_of(float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffffu;
  // Under 2^-6 codes are multiples of 2^-9, which is what 2^14 + |x| is rounded to.
  const uint32_t small = bits_of(float_of(size) + 16384.f) - 0x46800000u;
  const uint32_t rounded = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t large = rounded < 0x7eu ? rounded : 0x7eu;
  const uint32_t finite = (size < 0x3c800000u ? small : large) | (bits >> 24 & 0x80u);
  return static_cast<uint8_t>(size > 0x7f800000u ? 0x7fu : finite);
}

// Bits of the largest |x|; nan is larger than all else.
template <typename T>
MEGARL_INLINE uint32_t amax_bits(const T* x, int count) {
  float f[kFp8Block];
  load(x, f, count);
  uint32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int i = 0; i < count; ++i) {
    const uint32_t size = bits_of(f[i]) & 0x7fffffffu;
    top = top > size ? top : size;
  }
  return top;
}

template <typename T>
MEGARL_INLINE float quantize_block(const T* x, int64_t stride, int rows, int columns,
                                   uint8_t* codes, int64_t codes_stride) {
  uint32_t top = bits_of(kFp8LeastAmax);
  for (int r = 0; r < rows; ++r) {
    const uint32_t of_row = amax_bits(x + r * stride, columns);
    top = top > of_row ? top : of_row;
  }
  const float scale = float_of(top) / kFp8Max;
  for (int r = 0; r < rows; ++r) {
    float f[kFp8Block];
    load(x + r * stride, f, columns);
    uint8_t* out = codes + r * codes_stride;
#pragma omp simd
    for (int i = 0; i < columns; ++i) out[i] = e4m3_of(f[i] / scale);
  }
  return scale;
}

MEGARL_CLONES float quantize_block_f32(const float* x, int64_t stride, int rows, int columns,
                                       uint8_t* codes, int64_t codes_stride) {
  return quantize_block(x, stride, rows, columns, codes, codes_stride);
}
MEGARL_CLONES float quantize_block_bf16(const uint16_t* x, int64_t stride, int rows, int columns,
                                        uint8_t* codes, int64_t codes_stride) {
  return quantize_block(x, stride, rows, columns, codes, codes_stride);
}

int quantize_fp8_blocks(const QuantizeFp8Blocks& args, ParallelFor run) {
  const int64_t down = (args.rows + kFp8Block - 1) / kFp8Block;
  const int64_t across = (args.columns + kFp8Block - 1) / kFp8Block;
  parallel_for(run, down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b / across * kFp8Block, column = b % across * kFp8Block;
      const int rows = static_cast<int>(std::min<int64_t>(kFp8Block, args.rows - row));
      const int columns = static_cast<int>(std::min<int64_t>(kFp8Block, args.columns - column));
      const int64_t at = row * args.row_stride + column;
      uint8_t* codes = args.codes + row * args.columns + column;
      args.scales[b] =
          args.dtype == DType::kFloat32
              ? quantize_block_f32(static_cast<const float*>(args.x) + at, args.row_stride, rows,
                                   columns, codes, args.columns)
              : quantize_block_bf16(static_cast<const uint16_t*>(args.x) + at, args.row_stride,
                                    rows, columns, codes, args.columns);
    }
  });
  return 0;
}

}  // namespace megarl::cpu
