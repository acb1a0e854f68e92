// What both directions make of a logit in the same way: whole and cut tiles, references of a row, divisors of weights.
#pragma once

#include "cuda/documents.cuh"
#include "cuda/embed.hpp"
#include "cuda/range.cuh"
#include "cuda/sm90.cuh"

namespace mxflash::cuda {

/// Keys of a tile: those that share what a mask cuts and a group of weights; and queries likewise.
inline constexpr int kGroup = 32;

/// Logits are held here: of equal ones the difference is then 0.
inline constexpr float kFarLogit = 1e38F;

/// Tiles that a block of 32 queries sees whole: those whose first key is within [first, last].
struct WholeTiles {
  std::int32_t first = 0;
  std::int32_t last = -1;

  [[nodiscard]] __device__ bool holds(std::int32_t key) const { return first <= key && key <= last; }
};

/// As cuts_tile of packing.hpp. Queries past the document's end do not count, keys do.
__device__ inline WholeTiles whole_tiles(const Item& item, const Band& band, std::int32_t group) {
  constexpr std::int64_t kFar = INT32_MAX;
  const std::int64_t first = item.first_position + std::int64_t{group} * kGroup;
  const std::int64_t last = item.first_position + std::int64_t{min((group + 1) * kGroup, item.queries)} - 1;
  const std::int64_t from = max(last - band.left, -kFar);
  const std::int64_t to = min(first + band.right - (kGroup - 1), kFar);
  return {static_cast<std::int32_t>(min(from, kFar)), static_cast<std::int32_t>(max(to, -kFar))};
}

struct KeyRange32 {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  [[nodiscard]] __device__ bool empty() const { return begin >= end; }
};

/// A logit with V's exponent: NaN where either token is poisoned. One factor after the other: their product may leave
/// FP32 where the logit does not.
__device__ inline float logit(float score, const EmbeddedKey& key, float factor) {
  return fmaf(score * key.factor, factor, key.fold);
}

/// The integer above a row's largest logit. Of a row that has seen none but NaN any number will do.
__device__ inline float reference_above(float top) { return ceilf(held(top, kFarLogit)); }

/// log2 of what divides a row's weights before they are rounded. `top`: the largest logit of a group.
__device__ inline float log2_divisor(const WeightRule& rule, float top, float reference) {
  if (rule.in_groups == 0) return reference - rule.log2_beta;
  if (!(top > -INFINITY)) return reference;
  const float octave = floorf(top);
  const float exponent = octave + rule.group_offset + (exp2_fast(top - octave) > rule.group_limit ? 1.0F : 0.0F);
  return fmaxf(exponent, reference - static_cast<float>(kE8m0Bias));
}

}  // namespace mxflash::cuda
