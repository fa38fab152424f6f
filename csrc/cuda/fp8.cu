#include "megarl/fp8.h"

#include "megarl/device.h"

namespace megarl::cuda {
namespace {

constexpr int kThreads = 512;

// The larger; nan if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a || a > b ? a : b;
#endif
}

// To nearest even, saturating; nan is 0x7f. sm_89 and later have an instruction for it.
[[maybe_unused]] __device__ __forceinline__ uint32_t e4m3_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  uint32_t code;
  if (size < 0x3c800000u) {
    // Under 2^-6 codes are multiples of 2^-9, which is what 2^14 + |x| is rounded to.
    code = __float_as_uint(__uint_as_float(size) + 16384.f) - 0x46800000u;
  } else {
    code = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    code = code < 0x7eu ? code : 0x7eu;
  }
  return code | (bits >> 24 & 0x80u);
}

// Codes of two floats, `low` in the lower byte.
__device__ __forceinline__ uint32_t e4m3x2_of(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_of(low) | e4m3_of(high) << 8;
#endif
}

// x / scale, rounded as a division is, for many x of a block.
//
// With y = 1 / scale to nearest, q1 = q0 - y (scale q0 - x) is within one ulp of the quotient, and
// the same step again gives the nearest float (Markstein, IBM J. Res. Dev. 34, 1990). That needs
// scale q - x to be exact, so small numbers are first made larger by a power of 2; it may be
// inexact where |q| is so small that its code is 0 either way. With these signs -0 stays -0.
struct Divider {
  float factor, scale, inverse;

  __device__ __forceinline__ explicit Divider(float divisor)
      : factor(divisor < 0x1p-80f ? 0x1p60f : 1.f), scale(divisor * factor), inverse(1.f / scale) {
    if (scale == INFINITY) scale = 0.f;  // then q0 = x * 0 is left as it is
  }

  __device__ __forceinline__ float operator()(float x) const {
    x *= factor;
    float q = x * inverse;
    q = fmaf(fmaf(q, scale, -x), -inverse, q);
    return fmaf(fmaf(q, scale, -x), -inverse, q);
  }
};

// The largest of all threads' values, nan if any is; every thread of the block gets it.
__device__ __forceinline__ float block_max(float value) {
  constexpr int kWarps = kThreads / 32;
  MEGARL_SHARED(float, of_warp, [kWarps]);
#pragma unroll
  for (int bits = 16; bits > 0; bits >>= 1)
    value = max_or_nan(value, __shfl_xor_sync(kAllLanes, value, bits));
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = value;
  __syncthreads();
  value = of_warp[0];
#pragma unroll
  for (int k = 1; k < kWarps; ++k) value = max_or_nan(value, of_warp[k]);
  return value;
}

// A block of threads does one block of 128 x 128: which, and how much of it there is.
struct Fp8Block {
  int64_t row, column;
  int rows, columns;

  __device__ __forceinline__ explicit Fp8Block(const QuantizeFp8Blocks& args) {
    const int64_t across = (args.columns + kFp8Block - 1) / kFp8Block;
    row = blockIdx.x / across * kFp8Block;
    column = blockIdx.x % across * kFp8Block;
    rows = static_cast<int>(min(args.rows - row, static_cast<int64_t>(kFp8Block)));
    columns = static_cast<int>(min(args.columns - column, static_cast<int64_t>(kFp8Block)));
  }
};

// From each thread's largest |x|; the first thread writes the scale.
__device__ __forceinline__ float block_scale(float amax, const QuantizeFp8Blocks& args) {
  const float scale = max_or_nan(block_max(amax), kFp8LeastAmax) / kFp8Max;
  if (threadIdx.x == 0) args.scales[blockIdx.x] = scale;
  return scale;
}

// Rows that are 16-byte aligned, and whole vectors of them: read once, kept in registers.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) quantize_vectors(QuantizeFp8Blocks args) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kPerRow = kFp8Block / kSize;  // vectors
  constexpr int kRows = kThreads / kPerRow;
  constexpr int kVectors = kFp8Block / kRows;
  const Fp8Block block(args);
  const int column = threadIdx.x % kPerRow * kSize, row = threadIdx.x / kPerRow;
  const int rows = column < block.columns ? block.rows : 0;
  const T* x = static_cast<const T*>(args.x) + (block.row + row) * args.row_stride + block.column;
  uint4 loaded[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (row + k * kRows < rows)
      loaded[k] = load_once(reinterpret_cast<const uint4*>(x + k * kRows * args.row_stride + column));
  float amax = 0.f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float f[kSize];
    Vec<T>::unpack(loaded[k], f);
#pragma unroll
    for (int j = 0; j < kSize; ++j) amax = max_or_nan(amax, fabsf(f[j]));
  }
  const Divider divide(block_scale(amax, args));
  uint8_t* codes = args.codes + (block.row + row) * args.columns + block.column + column;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (row + k * kRows >= rows) break;
    float f[kSize];
    Vec<T>::unpack(loaded[k], f);
    uint32_t words[kSize / 4];
#pragma unroll
    for (int j = 0; j < kSize; j += 4)
      words[j / 4] = e4m3x2_of(divide(f[j]), divide(f[j + 1])) |
                     e4m3x2_of(divide(f[j + 2]), divide(f[j + 3])) << 16;
    uint8_t* to = codes + k * kRows * args.columns;
    if constexpr (kSize == 8) {
      __stcs(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
    } else {
      __stcs(reinterpret_cast<unsigned int*>(to), words[0]);
    }
  }
}

// Any other rows: element by element, and read twice, the second time mostly from a cache.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) quantize_elements(QuantizeFp8Blocks args) {
  constexpr int kRows = kThreads / kFp8Block;
  const Fp8Block block(args);
  const int column = threadIdx.x % kFp8Block, row = threadIdx.x / kFp8Block;
  const int rows = column < block.columns ? block.rows : 0;
  const T* x = static_cast<const T*>(args.x) + block.row * args.row_stride + block.column + column;
  float amax = 0.f;
#pragma unroll 8
  for (int r = row; r < rows; r += kRows)
    amax = max_or_nan(amax, fabsf(Vec<T>::get(x + r * args.row_stride)));
  const Divider divide(block_scale(amax, args));
  uint8_t* codes = args.codes + block.row * args.columns + block.column + column;
#pragma unroll 8
  for (int r = row; r < rows; r += kRows)
    codes[r * args.columns] =
        static_cast<uint8_t>(e4m3x2_of(divide(Vec<T>::get(x + r * args.row_stride)), 0.f));
}

template <typename T>
void quantize(const QuantizeFp8Blocks& args, void* stream) {
  constexpr int kSize = Vec<T>::kSize;
  const bool by_vectors = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 &&
                          args.row_stride % kSize == 0 && args.columns % kSize == 0 &&
                          reinterpret_cast<uintptr_t>(args.codes) % kSize == 0;
  const int64_t down = (args.rows + kFp8Block - 1) / kFp8Block;
  const int64_t across = (args.columns + kFp8Block - 1) / kFp8Block;
  const dim3 grid(static_cast<unsigned>(down * across)), block(kThreads);
  if (by_vectors) {
    MEGARL_LAUNCH(quantize_vectors<T>, grid, block, 0, stream, args);
  } else {
    MEGARL_LAUNCH(quantize_elements<T>, grid, block, 0, stream, args);
  }
}

}  // namespace

int quantize_fp8_blocks(const QuantizeFp8Blocks& args, void* stream) {
  if (args.rows == 0 || args.columns == 0) return 0;
  if (args.dtype == DType::kBFloat16) {
    quantize<bf16_t>(args, stream);
  } else {
    quantize<float>(args, stream);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace megarl::cuda
