// A matrix as fp8 codes with a scale for each block of it; the formulas are in megarl/ops/fp8.py.
#pragma once
#include "megarl/base.h"

namespace megarl {

// scale = max(max |x|, 448 * 2^-126) / 448 of each block of 128 x 128; code = e4m3(x / scale)
struct QuantizeFp8Blocks {
  DType dtype;
  const void* x;       // [rows, columns], row_stride elements apart
  int64_t row_stride;
  int64_t rows, columns;
  uint8_t* codes;      // [rows, columns]
  float* scales;       // [ceil(rows / 128), ceil(columns / 128)]
};

constexpr int kFp8Block = 128;
constexpr float kFp8Max = 448.f;
constexpr float kFp8LeastAmax = 448.f * 0x1p-126f;  // gives the least normal scale

namespace cpu {
int quantize_fp8_blocks(const QuantizeFp8Blocks& args, ParallelFor run);
}  // namespace cpu

namespace cuda {
int quantize_fp8_blocks(const QuantizeFp8Blocks& args, void* stream);
}  // namespace cuda

}  // namespace megarl
