// The sums of a consumer: prepared, moved, added, written.
#pragma once

#include "cuda/backward_consumer.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ void KeyConsumer<Traits>::prepare(const KeyWork& work) {
  const KeyItem& item = work.item;
  const std::int64_t offset = item.offset();
  KeyRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = key() + r < item.keys;
    const KeyScale scale = shared.key_scales[keys.stage()][key() + r];
    rows.factor[r] = inside ? scale.factor : 0.0F;
    rows.exponent[r] = inside ? scale.value_exponent : 0.0F;
    rows.light[r] = exact_pow2(-rows.exponent[r]);
    const std::int64_t place = item.first_key + key() + r - offset;
    const std::int64_t begin = max(place - p.band.right, std::int64_t{0});
    const std::int64_t end = min(place + p.band.left + 1, std::int64_t{item.queries});
    const bool seen = inside && begin < end;
    rows.begin[r] = seen ? static_cast<std::int32_t>(begin) : 0;
    rows.end[r] = seen ? static_cast<std::int32_t>(end) : 0;
  }
  this->rows() = rows;
  const float factor = fmaxf(fmaxf(rows.factor[0], rows.factor[1]), 0.0F);
  const float key_most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(factor)));
  const std::int32_t begin = __reduce_max_sync(0xFFFFFFFFU, max(rows.begin[0], rows.begin[1]));
  const std::int32_t end = __reduce_min_sync(0xFFFFFFFFU, min(rows.end[0], rows.end[1]));
  if (lane() == 0) kept() = {kLeastRaised, 0, 0, key_most, begin, end};
  __syncwarp();
}

template <class Traits>
__device__ int KeyConsumer<Traits>::base_of(const KeyWork& work, std::int32_t head) const {
  const std::int32_t found = p.workspace.dout_base[head * p.sizes.forward.documents + work.item.document];
  return found == INT32_MIN ? kept().base : found;
}

template <class Traits>
__device__ void KeyConsumer<Traits>::enter(const KeyWork& work, std::int32_t head) {
  const int base = base_of(work, head);
  if (product_ == ScaleOut::One) scale_sums(dv, ldexpf(1.0F, kept().base - base));
  KeyRows& rows = this->rows();
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.weight[r] = finite_product(rows.light[r], ldexpf(1.0F / p.scale, 8 - base));
  __syncwarp();
  if (lane() == 0) kept().base = base;
  __syncwarp();
}

template <class Traits>
__device__ float4* KeyConsumer<Traits>::waiting() const {
  return reinterpret_cast<float4*>(p.workspace.scratch + blockIdx.x * scratch_bytes(p.sizes)) + threadIdx.x -
         kWarpgroup;
}

template <class Traits>
__device__ void KeyConsumer<Traits>::move_sums() {
  const KeySums of = kept();
  move(dk, waiting(), scale_of(of.raised), of.moved != 0);
  move(dv, waiting() + kConsumers, ldexpf(1.0F, of.base - 8), of.moved != 0);
  __syncwarp();  // All lanes have read it.
  if (lane() == 0) kept().moved = 1;
  __syncwarp();
  product_ = ScaleOut::Zero;
}

template <class Traits>
__device__ void KeyConsumer<Traits>::move(const float (&sums)[Traits::kSums], float4* to, float by, bool add) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kSums) / 4; ++i) {
    const float4 sum{sums[4 * i] * by, sums[4 * i + 1] * by, sums[4 * i + 2] * by, sums[4 * i + 3] * by};
    // Nobody waits for what is there, as a load would.
    if (add) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 2 * i * kConsumers),
                   "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w)
                   : "memory");
    } else {
      __stcg(to + 2 * i * kConsumers, sum);
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::give_queries(const KeyWork& work, const float (&scale)[2]) {
  const int own = 16 * warp() + lane() / 4;
  const std::int64_t row = std::int64_t{work.item.query_row} + own;  // Tiles and rows eight apart: the same places.
  shared.dq_empty.wait((tile_ + 1) % 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* to = shared.dq + (own + 8 * r) * Traits::kOut + 2 * quad();
#pragma unroll
    for (int i = 2 * r; i < static_cast<int>(Traits::kDqSums); i += 4) {
      const int dim = group() * (Traits::kOut / 2) + 2 * (i - 2 * r);
      *reinterpret_cast<float2*>(to + place_of(row, dim)) = {dq[i] * scale[r], dq[i + 1] * scale[r]};
    }
  }
  cutlass::arch::fence_view_async_shared();
  release(shared.dq_full);
}

template <class Traits>
__device__ void KeyConsumer<Traits>::store_nothing(const KeyWork& work) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kSums); ++i) dk[i] = dv[i] = 0;
  write(work, {kLeastRaised, 0, 0, 0, 0, 0});
}

template <class Traits>
__device__ void KeyConsumer<Traits>::store(const KeyWork& work) {
  write(work, kept());
}

template <class Traits>
__device__ float4 KeyConsumer<Traits>::total(const float (&sums)[Traits::kSums], int i, const float4* waits, float by) {
  const float4 before = waits != nullptr ? __ldcg(waits + 2 * i * kConsumers) : float4{};
  return {fmaf(sums[4 * i], by, before.x), fmaf(sums[4 * i + 1], by, before.y), fmaf(sums[4 * i + 2], by, before.z),
          fmaf(sums[4 * i + 3], by, before.w)};
}

template <class Traits>
__device__ void KeyConsumer<Traits>::write(const KeyWork& work, const KeySums& of) {
  const Sizes& sizes = p.sizes.forward;
  const float4* waits = of.moved != 0 ? waiting() : nullptr;
  const int first = work.part * Traits::kOut + 2 * quad();
  const std::int64_t row = std::int64_t{work.item.key_row} + key();
  float* to_dk = p.workspace.dk_sums + (work.kv_head * sizes.rows_k() + row) * Traits::kDims + first;
  const std::int64_t to_dv = (row * sizes.kv_heads + work.kv_head) * sizes.value_dim + first;
  const std::int64_t next = std::int64_t{sizes.kv_heads} * sizes.value_dim;
  const bool inside[2] = {key() < work.item.keys, key() + 1 < work.item.keys};
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kSums) / 4; ++i) {
    const int dim = 8 * i;
    const float4 k = total(dk, i, waits, scale_of(of.raised));
    const float4 v = total(dv, i, waits != nullptr ? waits + kConsumers : nullptr, ldexpf(1.0F, of.base - 8));
    if (inside[0]) *reinterpret_cast<float2*>(to_dk + dim) = {k.x, k.y};
    if (inside[1]) *reinterpret_cast<float2*>(to_dk + Traits::kDims + dim) = {k.z, k.w};
    if (first + dim >= sizes.value_dim) continue;
    if (inside[0]) write_pair(to_dv + dim, v.x, v.y);
    if (inside[1]) write_pair(to_dv + next + dim, v.z, v.w);
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::write_pair(std::int64_t at, float low, float high) const {
  switch (p.dtype) {
    case DType::bf16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.dv) + at) = __floats2bfloat162_rn(low, high);
      break;
    case DType::f16: *reinterpret_cast<__half2*>(static_cast<__half*>(p.dv) + at) = __floats2half2_rn(low, high); break;
    default: *reinterpret_cast<float2*>(static_cast<float*>(p.dv) + at) = {low, high};
  }
}

}  // namespace mxflash::cuda
