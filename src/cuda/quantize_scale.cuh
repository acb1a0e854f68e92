// A row's exponent and codes.
#pragma once

#include <cuda_fp8.h>

#include "cuda/quantize_rows.cuh"
#include "cuda/range.cuh"

namespace mxflash::cuda {

__device__ inline float shuffled(float x, int distance) { return __shfl_xor_sync(0xFFFFFFFFU, x, distance); }

/// Over the lanes that differ in bits `first` to `end` / 2 of their index.
template <int kFirst, int kEnd>
__device__ float largest_among(float most) {
#pragma unroll
  for (int distance = kFirst; distance < kEnd; distance *= 2) most = larger(most, shuffled(most, distance));
  return fabsf(most);
}

__device__ inline bool finite(float most) { return most < INFINITY; }

/// The scale of a row: scale_exponent of E4M3 by the rule `ceil`, clamped. A NaN or Inf in the row poisons it, and then
/// it has codes 0.
class Scale {
 public:
  /// `own` is the row's largest magnitude, `most` that of all rows that share the exponent.
  __device__ Scale(float own, float most) : poisoned(!finite(own)) {
    // 448 = 1.75 2^8: fractions above .75 carry. E8M0's least exponent, -127, is that of all that is smaller, zero too.
    const int raised = static_cast<int>((__float_as_uint(most) + 0x1FFFFFU) >> 23);
    biased_ = poisoned ? kLeast : max(raised, kLeast);
  }
  [[nodiscard]] __device__ int exponent() const { return biased_ - kLeast - kE8m0Bias; }
  /// 2^exponent; the least one is subnormal.
  [[nodiscard]] __device__ float factor() const { return __int_as_float(max((biased_ - kLeast) << 23, 0x400000)); }
  /// 2^-exponent
  [[nodiscard]] __device__ float inverse() const { return __int_as_float((254 + kLeast - biased_) << 23); }
  /// As a record of V has it.
  [[nodiscard]] __device__ float value_exponent() const {
    return poisoned ? kPoisonedValue : static_cast<float>(exponent());
  }

  const bool poisoned;

 private:
  static constexpr int kLeast = 8;
  int biased_;  // exponent + 127 + kLeast
};

/// Four codes, the first in the lowest byte.
__device__ inline std::uint32_t codes_of(float a, float b, float c, float d) {
  const std::uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
}

}  // namespace mxflash::cuda
