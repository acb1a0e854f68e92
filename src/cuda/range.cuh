// What the keys of a tile have in common: how lanes and tiles are taken together, the unit that follows from it, and
// the limits on which forward and backward decide alike.
#pragma once

#include "cuda/layout.hpp"
#include "mxflash/formats.hpp"

namespace mxflash::cuda {

// Where forward and backward must decide alike, or weights would not be the same again.
/// A key whose V is so many octaves below the largest may be light.
inline constexpr float kLightOctaves = 3.0F;
/// Of E4M3: a light key has a code below it.
inline constexpr float kLeastNormal = 0.015625F;
/// Logits beyond are held before a base is taken from them.
inline constexpr float kPlainLogit = 1e30F;

/// Of no keys.
__device__ inline Range empty_range() { return {INFINITY, -INFINITY, 0, 0}; }

__device__ inline Range join(const Range& a, const Range& b) {
  return {fminf(a.least, b.least), fmaxf(a.most, b.most), fmaxf(a.key_norm, b.key_norm), 0};
}

/// Over the lanes of a warp.
__device__ inline Range join_lanes(Range range) {
  for (int half = 1; half < warpSize; half *= 2) {
    range =
        join(range, {__shfl_xor_sync(0xFFFFFFFFU, range.least, half), __shfl_xor_sync(0xFFFFFFFFU, range.most, half),
                     __shfl_xor_sync(0xFFFFFFFFU, range.key_norm, half), 0});
  }
  return range;
}

/// The unit of a document's row sums, from the value_exponent of its first key, which every query that sees a later key
/// may know.
__device__ inline float sum_reference(float value_exponent) {
  return value_exponent <= static_cast<float>(-kE8m0Bias) ? kUsualExponent : value_exponent;
}

}  // namespace mxflash::cuda
