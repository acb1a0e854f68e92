// The row sum: what its multipliers do not count is counted apart, and what comes of both.
#pragma once

#include "cuda/forward_consumer.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ bool Consumer<Traits>::counted(const Work& work, const KeyScale& key) {
  return key.value_exponent > static_cast<float>(-kE8m0Bias) &&
         key.value_exponent >= work.reference - kBelowReference &&
         key.value_exponent <= work.reference + kAboveReference;
}

template <class Traits>
__device__ bool Consumer<Traits>::may_count_apart(const Work& work, const KeyScale& key) {
  return key.value_exponent <= work.range.most - kLightOctaves || !counted(work, key);
}

template <class Traits>
__device__ void Consumer<Traits>::count_apart(const Work& work, const Held& at, const float (&step)[2]) {
  const KeyScale* key_scale = at.key_scale;
  const Spans seen = spans();
#pragma unroll 1
  for (int pair = 0; pair < kScores / 2; ++pair) {
    const int i = 2 * pair;
    const bool apart = may_count_apart(work, key_scale[key_of(i)]) || may_count_apart(work, key_scale[key_of(i + 1)]);
    if (!__any_sync(0xFFFFFFFFU, apart)) continue;
    // A run-time index would move the scores to memory: the pair is picked by comparison.
    float two[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kScores; ++j) two[j % 2] = j / 2 == pair ? scores[j] : two[j % 2];
    const int r = row_of(i);
    const float by = r == 0 ? step[0] : step[1];
    const float base = r == 0 ? state.base[0] : state.base[1];
#pragma unroll 1
    for (int b = 0; b < 2; ++b) {
      const std::int32_t key = at.first + key_of(i + b);
      // Not by a run-time index.
      if (!(r == 0 ? seen.sees(0, key) : seen.sees(1, key))) continue;
      add_apart(work, key_scale[key_of(i + b)], (b == 0 ? two[0] : two[1]) - by, {base, r});
    }
  }
}

template <class Traits>
__device__ void Consumer<Traits>::add_apart(const Work& work, const KeyScale& key, float x, const RowAt& row_at) {
  constexpr auto kNone = static_cast<float>(-kE8m0Bias);
  const int r = row_at.r;
  if (key.value_exponent == kPoisonedValue) kept(Kept::poisoned, r) = 1.0F;
  const float exponent = fmaxf(key.value_exponent, kNone);
  const auto code = static_cast<std::uint8_t>(to_e4m3(exp2_fast(x), 0.0F) & 0xFFU);
  const float rounded = decode(Format::e4m3, code);
  const bool light = (key.value_exponent <= kNone || key.value_exponent <= kept(Kept::most, r) - kLightOctaves) &&
                     rounded < kLeastNormal;
  const bool in_sum = counted(work, key);
  if (!light && in_sum) return;
  const float bare = x + (row_at.base - exponent);  // The logit without V's exponent.
  float height = kept(Kept::height, r);
  if (bare > height) {
    const float raised = ceilf(bare);
    kept(Kept::extra, r) *= exact_pow2(height - raised);
    kept(Kept::height, r) = height = raised;
  }
  const float whole = ldexpf(rounded, static_cast<int>(row_at.base - exponent - height));
  // Of a light key the weight unquantized, with which it would be lost.
  kept(Kept::extra, r) += (light ? exp2_fast(bare - height) : whole) - (in_sum ? whole : 0.0F);
}

template <class Traits>
__device__ float Consumer<Traits>::counted_sum(int r) const {
  return __shfl_sync(0xFFFFFFFFU, kept(Kept::total, r) + sums[Traits::kOutputs + 2 * r], lane / 4 * 4);
}

template <class Traits>
__device__ void Consumer<Traits>::add_what_is_apart(RowEnd (&end)[2]) const {
  const unsigned four = 0xFU << (lane / 4 * 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    end[r].sum = row_sum(end[r].sum, r, four);
    // Not by a vote of four, of which the warp's eight would take turns.
    end[r].poisoned = (__ballot_sync(0xFFFFFFFFU, kept(Kept::poisoned, r) != 0.0F) & four) != 0;
  }
}

template <class Traits>
__device__ RowSum Consumer<Traits>::row_sum(const RowSum& counted, int r, unsigned four) const {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  float height = kept(Kept::height, r);
  height = fmaxf(height, __shfl_xor_sync(kAll, height, 1));
  height = fmaxf(height, __shfl_xor_sync(kAll, height, 2));
  if (height == -INFINITY) return counted;
  float extra = kept(Kept::extra, r) * exact_pow2(kept(Kept::height, r) - height);
  extra += __shfl_xor_sync(four, extra, 1);
  extra += __shfl_xor_sync(four, extra, 2);
  if (extra == 0.0F) return counted;
  const float shift = height - state.base[r] + counted.unit;
  constexpr float kMostShift = 60.0F;
  if (shift <= kMostShift)
    return {counted.value + ldexpf(extra, static_cast<int>(fmaxf(shift, -300.0F))), counted.unit};
  return {ldexpf(counted.value, -static_cast<int>(fminf(shift, 300.0F))) + extra, counted.unit - shift};
}

}  // namespace mxflash::cuda
