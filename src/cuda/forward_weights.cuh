// Scores to weights and codes.
#pragma once

#include "cuda/forward_consumer.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ void Consumer<Traits>::weigh(const Work& work, std::int32_t tile, const Place& place) {
  const KeyScale* key_scale = shared.scales[place.stage()].keys;
  const std::int32_t first = tile * Traits::kKeys;
  flags_ &= ~kRaised;
  if (tile >= plain_.first && tile < plain_.end) {
    weigh_plain<Whole>(key_scale, first, {});
  } else {
    const bool apart = (flags_ & kIrregular) != 0 && has_irregular(work, shared.ranges[place.stage()]);
    if (apart || ((flags_ & kFarOff) != 0 && may_leave())) {
      weigh_held(work, {key_scale, first, apart});
    } else if (__any_sync(0xFFFFFFFFU, (flags_ & 3 * kUnset) != 0)) {
      weigh_first(key_scale, first, spans());
    } else {
      weigh_plain<Cut>(key_scale, first, spans());
    }
  }
}

template <class Traits>
__device__ Scales Consumer<Traits>::scales_at(const KeyScale* key_scale, int i) const {
  const auto* two = reinterpret_cast<const float4*>(key_scale + key_of(i));
  return {{two[0], two[1]}};
}

template <class Traits>
__device__ Scales Consumer<Traits>::scales_after(std::uint32_t key_scale, int i, const std::uint32_t* made) {
  Scales scales;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const std::uint32_t at = (made[c] & kFull) | key_scale;  // Codes of weights have no sign.
    scales.two[c] = static_cast<const float4*>(__cvta_shared_to_generic(at))[i / 8 * 8 + c];
  }
  return scales;
}

template <class Traits>
__device__ void Consumer<Traits>::load_scales() {
  coming[0] = scales_at(shared.scales[keys.stage()].keys, 0);
  coming[1] = scales_at(shared.scales[keys.stage()].keys, 8);
}

template <class Traits>
template <class Tile>
__device__ void Consumer<Traits>::weigh_plain(const KeyScale* key_scale, std::int32_t first, const Spans& seen) {
  constexpr int kGroups = kScores / 8;
  const std::uint32_t scale_at = cute::cast_smem_ptr_to_uint(key_scale + 4 * quad);
  std::uint32_t full[2] = {is_unset(0) ? kFull : 0, is_unset(1) ? kFull : 0};
#pragma unroll
  for (int a = 0; a < kGroups; ++a) {
    logits(coming[a % 2], 8 * a);
#pragma unroll
    for (int i = 8 * a; i < 8 * a + 8; ++i) scores[i] = exp2_fast(scores[i]);
    if (a > 0) encode<Tile>(seen, first, a - 1, full);  // Beside the next exponentials, not after their own.
    if (a + 2 == kGroups || a + 1 == kGroups) continue;
    coming[a % 2] = a > 0 ? scales_after(scale_at, 8 * a + 16, fresh + 2 * a - 2) : scales_at(key_scale, 8 * a + 16);
  }
  encode<Tile>(seen, first, kGroups - 1, full);
  if (!__any_sync(0xFFFFFFFFU, ((full[0] | full[1]) & kFull) != 0)) return;
  if constexpr (Tile::kCuts) hide(seen, first);
  flags_ |= kRaised;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (__any_sync(0xFFFFFFFFU, (full[r] & kFull) != 0)) {
      raise_base(r);
    } else {
      kept(Kept::scale, r) = 1.0F;
    }
  }
}

template <class Traits>
__device__ void Consumer<Traits>::weigh_first(const KeyScale* key_scale, std::int32_t first, const Spans& seen) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(kScores); i += 8) logits(scales_at(key_scale, i), i);
#pragma unroll
  for (float& score : scores) score = exp2_fast(score);
  hide(seen, first);
#pragma unroll
  for (int r = 0; r < 2; ++r) raise_base(r);
}

template <class Traits>
__device__ void Consumer<Traits>::hide(const Spans& seen, std::int32_t first) {
  std::uint32_t bits[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) bits[r] = own_below(seen.end[r] - first) & ~own_below(seen.begin[r] - first);
#pragma unroll
  for (int i = 0; i < static_cast<int>(kScores); ++i) {
    const int own = i / 8 * 4 + i % 8 / 4 * 2 + i % 2;
    if ((bits[row_of(i)] & 1U << own) == 0) scores[i] = 0.0F;
  }
}

template <class Traits>
__device__ std::uint32_t Consumer<Traits>::own_below(std::int32_t key) const {
  static_assert(Traits::kKeys == 128);
  const std::int32_t keys = max(min(key, Traits::kKeys), 0);
  const std::int32_t own = keys / 16 * 4 + max(min(keys % 16 - 4 * quad, 4), 0);
  return __funnelshift_lc(~0U, 0U, own);
}

template <class Traits>
__device__ void Consumer<Traits>::raise_base(int r) {
  // Weights are not negative, so their bits are in their order, and three of these take one instruction.
  int most[2] = {};  // Two chains: each waits for its own last comparison.
#pragma unroll
  for (int i = 2 * r; i < static_cast<int>(kScores); i += 4) {
    int& of = most[i / 4 % 2];
    of = __vimax3_s32(of, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
  }
  const float by = normal_pow2(-raise(r, largest_of_row(__int_as_float(max(most[0], most[1])))));
#pragma unroll
  for (int i = 2 * r; i < static_cast<int>(kScores); i += 4) {
    scores[i] *= by;
    scores[i + 1] *= by;
  }
  encode_row(r);
}

template <class Traits>
__device__ void Consumer<Traits>::logits(const Scales& scales, int first) {
  const float4& low = scales.two[0];
  const float4& high = scales.two[1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* x = scores + first + 2 * r;
    x[0] = fmaf(x[0], state.factor[r] * low.x, low.y - state.base[r]);
    x[1] = fmaf(x[1], state.factor[r] * low.z, low.w - state.base[r]);
    x[4] = fmaf(x[4], state.factor[r] * high.x, high.y - state.base[r]);
    x[5] = fmaf(x[5], state.factor[r] * high.z, high.w - state.base[r]);
  }
}

template <class Traits>
__device__ float Consumer<Traits>::largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 2));
}

template <class Traits>
__device__ void Consumer<Traits>::weigh_held(const Work& work, const Held& at) {
  const Spans seen = spans();
  float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int r = row_of(i);
    const KeyScale key = at.key_scale[key_of(i)];
    const float exponent = fmaxf(key.value_exponent, static_cast<float>(-kE8m0Bias));
    const float factor = state.factor[r] * key.factor;
    const float logit = fmaf(scores[i], factor, exponent);
    const float x = fabsf(logit) > kPlainLogit ? held(logit, 1e38F) - state.base[r]
                                               : fmaf(scores[i], factor, exponent - state.base[r]);
    scores[i] = seen.sees(r, at.first + key_of(i)) ? x : -INFINITY;
    most[r] = fmaxf(most[r], scores[i]);
  }
  float step[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = largest_of_row(most[r]);
    const float weight = largest_weight(r);  // Not under the condition, which rows decide: its lanes meet.
    step[r] = fabsf(most[r]) <= kNear ? static_cast<float>(raise(r, weight)) : raise_far(r, most[r]);
  }
  if (at.apart) count_apart(work, at, step);
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const float by = step[row_of(i)];
    scores[i] = fabsf(scores[i]) <= kNear ? exp2_fast(scores[i]) * exact_pow2(-by) : exp2_fast(scores[i] - by);
  }
  encode_row(0);
  encode_row(1);
  __syncwarp();
}

template <class Traits>
__device__ float Consumer<Traits>::largest_weight(int r) const {
  float most = 0;
#pragma unroll
  for (int i = 2 * r; i < static_cast<int>(kScores); i += 4) {
    most = fmaxf(most, fmaxf(exp2_fast(scores[i]), exp2_fast(scores[i + 1])));
  }
  return largest_of_row(most);
}

template <class Traits>
__device__ int Consumer<Traits>::raise(int r, float most) {
  const bool unset = is_unset(r);
  const bool rises = most >= (unset ? kLeastNormalWeight : kFullWeight);
  // ceil(log2(most)) - 8.
  const int step = rises ? max((__float_as_int(most) - 1) >> 23, kLeastExponent) - 134 : 0;
  move(r, rises, {static_cast<float>(step), rises && unset ? 0.0F : normal_pow2(-step)});
  return step;
}

template <class Traits>
__device__ float Consumer<Traits>::raise_far(int r, float most) {
  const bool rises = most > -INFINITY && (is_unset(r) || most > 8.0F);
  const float step = rises ? ceilf(most) - 8.0F : 0.0F;
  move(r, rises, {step, rises && is_unset(r) ? 0.0F : exact_pow2(-step)});
  return step;
}

template <class Traits>
__device__ void Consumer<Traits>::move(int r, bool rises, const Move& by) {
  flags_ = (flags_ | kRaised) & ~(rises ? kUnset << r : 0U);
  state.base[r] += by.step;
  kept(Kept::scale, r) = by.scale;
}

template <class Traits>
template <class Tile>
__device__ void Consumer<Traits>::encode(const Spans& seen, std::int32_t first, int a, std::uint32_t (&full)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    fresh[2 * a + r] = codes_of(a, r) & Tile::bytes(seen, r, first + key_of(8 * a));
    full[r] |= fresh[2 * a + r] + kToFull;
  }
}

template <class Traits>
__device__ std::uint32_t Consumer<Traits>::codes_of(int a, int r) const {
  const float* w = scores + 8 * a + 2 * r;
  return to_e4m3(w[0], w[1]) | (to_e4m3(w[4], w[5]) << 16);
}

template <class Traits>
__device__ void Consumer<Traits>::encode_row(int r) {
  // Made from those before as far as the compiler knows. Else these have registers of their own, to which every other
  // tile copies its codes.
  const std::uint32_t none = flags_ >> 31;
#pragma unroll
  for (int a = 0; a < static_cast<int>(kScores) / 8; ++a) {
    fresh[2 * a + r] = __byte_perm(codes_of(a, r), fresh[2 * a + r], 0x3210U | none);
  }
}

}  // namespace mxflash::cuda
