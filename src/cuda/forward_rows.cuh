// What a consumer finds out before it begins: which keys its rows see, and which of their tiles ask for care.
#pragma once

#include "cuda/forward_consumer.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ void Consumer<Traits>::prepare(const Work& work) {
  flags_ = 0;
  bool far = false;
  // The last item's rows may still be on their way out of where the sums go.
  if (lane == 0) cute::tma_store_wait<0>();
  __syncwarp();
  constexpr float kTame = 50.0F;  // Then logits and bases are so, and no logit is further than 108 from a base.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const QueryRow of = row_of_item(r);
    state.factor[r] = of.factor;
    state.base[r] = 0.0F;
    if (of.begin < of.end) flags_ |= kUnset << r;
    far |= !(of.reach <= kTame);
    kept(Kept::total, r) = 0.0F;
    kept(Kept::moved, r) = 1.0F;
  }
  if (__any_sync(0xFFFFFFFFU, far)) flags_ |= kFarOff;
  if (!has_irregular(work, work.range)) return;
  flags_ |= kIrregular;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    kept(Kept::extra, r) = 0.0F;
    kept(Kept::height, r) = -INFINITY;
    kept(Kept::poisoned, r) = 0.0F;
  }
  largest_exponents(work);
}

template <class Traits>
__device__ bool Consumer<Traits>::has_irregular(const Work& work, const Range& range) {
  return range.least <= static_cast<float>(-kE8m0Bias) || range.least <= work.range.most - kLightOctaves ||
         range.least < work.reference - kBelowReference || range.most > work.reference + kAboveReference;
}

template <class Traits>
__device__ TileSpan Consumer<Traits>::plain_of() const {
  const Spans seen = spans();
  const std::int32_t begin = __reduce_max_sync(0xFFFFFFFFU, max(seen.begin[0], seen.begin[1]));
  const std::int32_t end = __reduce_min_sync(0xFFFFFFFFU, min(seen.end[0], seen.end[1]));
  if ((flags_ & (kIrregular | kFarOff)) != 0) return {0, 0};
  return {(begin + Traits::kKeys - 1) / Traits::kKeys, end / Traits::kKeys};
}

template <class Traits>
__device__ bool Consumer<Traits>::may_leave() const {
  constexpr float kMost = 108.0F;
  return __any_sync(0xFFFFFFFFU,
                    !(row_of_item(0).reach - state.base[0] <= kMost && row_of_item(1).reach - state.base[1] <= kMost));
}

template <class Traits>
__device__ void Consumer<Traits>::largest_exponents(const Work& work) {
  const KeyScale* key_scale = p.workspace.key_scale + kv_head_of(p, work) * p.sizes.columns() + work.item.first_column;
  const Range* ranges = ranges_of(p, work);
  const Spans seen = spans();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -INFINITY;
    for (std::int32_t tile = seen.begin[r] / Traits::kKeys; tile * Traits::kKeys < seen.end[r]; ++tile) {
      const std::int32_t begin = tile * Traits::kKeys;
      const std::int32_t end = min(begin + Traits::kKeys, work.item.keys);
      if (seen.begin[r] <= begin && end <= seen.end[r]) {
        most = fmaxf(most, ranges[tile].most);
        continue;
      }
      for (std::int32_t key = begin + quad; key < end; key += 4) {
        if (seen.sees(r, key)) most = fmaxf(most, key_scale[key].value_exponent);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 1));
    kept(Kept::most, r) = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 2));
  }
}

}  // namespace mxflash::cuda
