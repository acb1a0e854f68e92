// What an element's code stands for, and how numbers become BF16: the same for token operands, P and dS.
#pragma once

#include "cuda/embed.hpp"
#include "quantize/scales.hpp"

namespace mxflash::cuda {

/// Held at BF16's largest number: an Inf times a weight of zero would be a NaN in rows that do not see it.
__device__ inline std::uint16_t held_bf16(float value) {
  constexpr std::uint16_t kMostBf16 = 0x7F7F;
  const std::uint16_t bits = encode_bf16(value);
  return (bits & 0x7FFFU) == kMostBf16 + 1 ? static_cast<std::uint16_t>((bits & 0x8000U) | kMostBf16) : bits;
}

/// The number of a format that a value is rounded to. Precondition: no NaN.
__device__ inline float rounded(const Operand& operand, const RoundTo& to, float value, std::uint32_t random) {
  const float x = fabsf(value);
  return copysignf(operand.rounding == Rounding::stochastic ? rounded_by_chance(to, x, random) : rounded_to(to, x),
                   value);
}

/// What the code of a value stands for, without its scale. Precondition: no NaN.
__device__ inline float decoded(const Operand& operand, const RoundTo& to, const BlockScale& scale, float value,
                                std::uint32_t random) {
  if (operand.encoding == Encoding::nvfp4) {
    value = scale.divisor == 0.0F ? 0.0F : value / scale.divisor;
  } else {
    value *= detail::pow2(-scale.exponent);
  }
  return rounded(operand, to, value, random);
}

/// A warp's Hadamard transform of a row in shared memory: butterflies at rising distances.
__device__ inline void butterflies(float* values, int dims) {
  for (int half = 1; half < dims; half *= 2) {
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x % 32); i < dims / 2; i += 32) {
      const int d = i / half * 2 * half + i % half;
      const float low = values[d];
      const float high = values[d + half];
      values[d] = low + high;
      values[d + half] = low - high;
    }
  }
  __syncwarp();
}

}  // namespace mxflash::cuda
