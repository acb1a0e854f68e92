// 2^t in a recipe's way. `pair`: which of eight pairs of keys it is.
#pragma once

#include "cuda/embed_mma.cuh"
#include "cuda/sm90.cuh"

namespace mxflash::cuda {

struct ExactExponential {
  static __device__ float of(float t, int /*pair*/) { return exp2_fast(t); }
};

/// Mitchell's, the logarithm's fixed point read as a float: 2^whole (1 + fraction). Whole and fraction apart keep the
/// bits that t + 127 would lose.
struct MitchellExponential {
  static __device__ float of(float t, int /*pair*/) {
    float moved = t - 0.0695F;
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(moved) : "f"(-128.0F));
    const float whole = floorf(moved);
    return held_pow2(whole) * (1.0F + (moved - whole));
  }
};

/// Schraudolph's, in the bits of a BF16, for five of eight pairs of keys. Weights have no t above 16, so that there is
/// nothing to hold above; a NaN's bits are a NaN's again.
struct SchraudolphExponential {
  static __device__ float of(float t, int pair) {
    constexpr float kToInteger = 8388608.0F;  // Rounds to nearest even, and leaves the integer in the low bits.
    if (pair >= 5) return exp2_fast(t);
    float bits = fmaf(t + 127.0F, 128.0F, -7.0F);
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(bits));
    return __uint_as_float(__float_as_uint(bits + kToInteger) << 16);
  }
};

}  // namespace mxflash::cuda
