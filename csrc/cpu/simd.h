// Loops that the compiler turns into vector code, for the widest units the machine has.
//
// A function marked MEGARL_CLONES is compiled three times and chosen when the library is loaded.
// All it calls must be MEGARL_INLINE: a call that is not inlined stays at the lowest of them.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

#include "megarl/base.h"

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define MEGARL_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGARL_CLONES
#endif
#define MEGARL_INLINE inline __attribute__((always_inline))

namespace megarl::cpu {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

MEGARL_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
MEGARL_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
MEGARL_INLINE float float_of_bf16(uint16_t bits) {
  return float_of(static_cast<uint32_t>(bits) << 16);
}
// To nearest even; nan stays nan.
MEGARL_INLINE uint16_t bf16_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

// 2^x for x <= 0 to 1e-7 of itself; under 2^-126 it is 0. A polynomial of degree 6 on
// [-0.5, 0.5] times a power made from the exponent's bits; nan stays nan.
MEGARL_INLINE float exp2_of(float x) {
  const float clamped = x < -126.f ? -126.f : x;
  const float whole = (clamped + 12582912.f) - 12582912.f;  // 1.5 * 2^23: to the nearest integer
  const float f = clamped - whole;
  float p = 1.535336188319500e-4f;
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
  return x < -126.f ? 0.f : p * float_of(power);
}

MEGARL_INLINE void load(const float* from, float* to, int count) {
  std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
}
MEGARL_INLINE void load(const uint16_t* from, float* to, int count) {
#pragma omp simd
  for (int i = 0; i < count; ++i) to[i] = float_of_bf16(from[i]);
}
MEGARL_INLINE void store(const float* from, float* to, int count) {
  std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
}
MEGARL_INLINE void store(const float* from, uint16_t* to, int count) {
#pragma omp simd
  for (int i = 0; i < count; ++i) to[i] = bf16_of(from[i]);
}

}  // namespace megarl::cpu
