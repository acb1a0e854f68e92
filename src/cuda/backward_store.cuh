// The sums of a consumer: prepared, moved, added, written.
#pragma once

#include "cuda/backward_consumer.cuh"
#include "cuda/outputs.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ void KeyConsumer<Traits>::prepare(const KeyWork& work) {
  const KeyItem& item = work.item;
  const std::int64_t offset = item.offset();
  const int base = work.dout_base;
  KeyRows rows;
  float factor[2];
  float exponent[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = key() + r < item.keys;
    const KeyScale scale = shared.key_scales[keys.stage()][key() + r];
    factor[r] = inside ? scale.factor : 0.0F;
    exponent[r] = inside ? scale.value_exponent : 0.0F;
    const std::int64_t place = item.first_key + key() + r - offset;
    const std::int64_t begin = max(place - p.band.right, std::int64_t{0});
    const std::int64_t end = min(place + p.band.left + 1, std::int64_t{item.queries});
    const bool seen = inside && begin < end;
    rows.begin[r] = seen ? static_cast<std::int32_t>(begin) : 0;
    rows.end[r] = seen ? static_cast<std::int32_t>(end) : 0;
  }
  this->rows() = rows;
  pair_.factor.set(factor[0], factor[1]);
  pair_.exponent.set(exponent[0], exponent[1]);
  const float most_factor = fmaxf(fmaxf(factor[0], factor[1]), 0.0F);
  const float key_most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(most_factor)));
  const std::int32_t begin = __reduce_max_sync(0xFFFFFFFFU, max(rows.begin[0], rows.begin[1]));
  const std::int32_t end = __reduce_min_sync(0xFFFFFFFFU, min(rows.end[0], rows.end[1]));
  constexpr float kSafe = 60.0F;
  const Range& range = work.range;
  const bool safe = fabsf(range.least) <= kSafe && fabsf(range.most) <= kSafe;
  if (lane() == 0) {
    kept() = {.raised = kLeastRaised,
              .base = base,
              .moved = 0,
              .key_most = key_most,
              .weight = weight_of(base),
              .most_below = safe ? range.least + kLightOctaves : -INFINITY,
              .norm_below = kPlainLogit / (fabsf(p.logit_scale) * range.key_norm),
              .whole_begin = begin,
              .whole_end = end};
  }
  __syncwarp();
}

template <class Traits>
__device__ void KeyConsumer<Traits>::enter() {
  // Beyond what is_far allows the sums are zero, and must not meet an Inf.
  scale_sums(dv, exact_pow2(fminf(static_cast<float>(kept().base - next_base_), 127.0F)));
  __syncwarp();  // All lanes have read it.
  if (lane() == 0) {
    kept().base = next_base_;
    kept().weight = weight_of(next_base_);
  }
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
  move(dv, waiting() + kConsumerThreads, ldexpf(1.0F, of.base - 8), of.moved != 0);
  __syncwarp();  // All lanes have read it.
  if (lane() == 0) kept().moved = 1;
  __syncwarp();
  clear_sums();
}

template <class Traits>
__device__ void KeyConsumer<Traits>::move(const float (&sums)[Traits::kSums], float4* to, float by, bool add) {
  if (!add) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums) / 4; ++i) {
      __stcg(to + 2 * i * kConsumerThreads,
             {sums[4 * i] * by, sums[4 * i + 1] * by, sums[4 * i + 2] * by, sums[4 * i + 3] * by});
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kSums) / 4; ++i) {
    // Nobody waits for what is there, as a load would.
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 2 * i * kConsumerThreads),
                 "f"(sums[4 * i] * by), "f"(sums[4 * i + 1] * by), "f"(sums[4 * i + 2] * by), "f"(sums[4 * i + 3] * by)
                 : "memory");
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::give_queries(std::int32_t first_row, const float (&scale)[2]) {
  // Bytes, of a row and of eight dims. Nothing but what place_of says touches the three bits above those of eight dims:
  // so one exclusive or leads from a place to another.
  using Sums = typename Traits::Sums;
  constexpr int kElement = sizeof(typename Sums::Element);
  constexpr int kPitch = Traits::kOut * kElement;
  constexpr int kEight = 8 * kElement;
  const int own = 16 * warp() + lane() / 4;
  const int row = first_row + own;  // Tiles and rows eight apart: the same places.
  const int place = group() * (kPitch / 2) ^ row % 8 * kEight;
  const std::uint32_t to = cute::cast_smem_ptr_to_uint(shared.dq) + own * kPitch + place + quad() * 2 * kElement;
#pragma unroll
  for (int k = 0; k < static_cast<int>(Traits::kDqSums) / 4; ++k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* sums = dq + 4 * k + 2 * r;
      Sums::store((to ^ kEight * k) + 8 * r * kPitch, sums[0] * scale[r], sums[1] * scale[r]);
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::store_nothing(const KeyWork& work) {
  clear_sums();
  write(work, {.raised = kLeastRaised});
}

template <class Traits>
__device__ void KeyConsumer<Traits>::store(const KeyWork& work) {
  write(work, kept());
}

template <class Traits>
__device__ void KeyConsumer<Traits>::complete(float (&sums)[Traits::kSums], const float4* waits, float by) {
#pragma unroll
  for (float& sum : sums) sum *= by;
  if (waits == nullptr) return;
  constexpr int kTogether = 4;  // That are waited for at once.
#pragma unroll
  for (int first = 0; first < static_cast<int>(Traits::kSums) / 4; first += kTogether) {
    float4 before[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) before[i] = __ldcg(waits + 2 * (first + i) * kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float* to = sums + 4 * (first + i);
      to[0] += before[i].x;
      to[1] += before[i].y;
      to[2] += before[i].z;
      to[3] += before[i].w;
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::write(const KeyWork& work, const KeySums& of) {
  const float4* waits = of.moved != 0 ? waiting() : nullptr;
  complete(dk, waits, scale_of(of.raised));
  complete(dv, waits != nullptr ? waits + kConsumerThreads : nullptr, ldexpf(1.0F, of.base - 8));
  if constexpr (Traits::kDims == Traits::kOut) {
    if (p.rotation_shift >= 0) rotate_back();
  } else {
    write_sums(work);
  }
  switch (p.dtype) {
    case DType::bf16: return write_all<__nv_bfloat162>(work);
    case DType::f16: return write_all<__half2>(work);
    default: return write_all<float2>(work);
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::rotate_back() {
  // Register 4 i + 2 r + b is dim 8 i + 2 quad + b.
  const float factor = __int_as_float((127 - p.rotation_shift) << 23);
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kSums); i += 2) {
    const float low = dk[i] * factor;
    const float high = dk[i + 1] * factor;
    dk[i] = low + high;
    dk[i + 1] = low - high;
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float sign = (quad() & distance) == 0 ? 1.0F : -1.0F;
#pragma unroll
    for (float& sum : dk) sum = fmaf(sum, sign, __shfl_xor_sync(0xFFFFFFFFU, sum, distance));
  }
#pragma unroll
  for (int half = 1; half < static_cast<int>(Traits::kSums) / 4; half *= 2) {
    if (8 * half >= p.sizes.forward.head_dim) break;
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums); ++i) {
      if ((i / 4 & half) != 0) continue;
      const float low = dk[i];
      const float high = dk[i + 4 * half];
      dk[i] = low + high;
      dk[i + 4 * half] = low - high;
    }
  }
}

template <class Traits>
__device__ void KeyConsumer<Traits>::write_sums(const KeyWork& work) const {
  const std::int64_t row = work.kv_head * p.sizes.forward.rows_k() + work.item.key_row + key();
  float* to = p.workspace.dk_sums + row * Traits::kDims + work.part * Traits::kOut + 2 * quad();
#pragma unroll
  for (int r = 0; r < 2; ++r, to += Traits::kDims) {
    if (key() + r >= work.item.keys) return;
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kSums) / 4; ++i) {
      *reinterpret_cast<float2*>(to + 8 * i) = {dk[4 * i + 2 * r], dk[4 * i + 2 * r + 1]};
    }
  }
}

template <class Traits>
template <class Pair>
__device__ void KeyConsumer<Traits>::write_all(const KeyWork& work) {
  // Another warp's products may still read the keys whose place the rows take.
  cutlass::arch::NamedBarrier::sync(kWarpgroup, static_cast<std::uint32_t>(group()));
  if constexpr (Traits::kDims == Traits::kOut) write_rows<Pair>(dk, work, {p.dk, p.sizes.forward.head_dim});
  write_rows<Pair>(dv, work, {p.dv, p.sizes.forward.value_dim});
}

template <class Traits>
template <class Pair>
__device__ void KeyConsumer<Traits>::write_rows(const float (&sums)[Traits::kSums], const KeyWork& work,
                                                const Rows& rows) {
  // A pass has as many bytes of a row as it has in 16-bit numbers.
  constexpr int kPasses = static_cast<int>(sizeof(Pair)) / 4;
  constexpr int kBytes = 2 * Traits::kOut;
  constexpr int kPairs = static_cast<int>(Traits::kSums) / 4 / kPasses;  // Of a lane.
  constexpr int kChunks = kBytes / 16;
  constexpr int kPassDims = Traits::kOut / kPasses;
  constexpr int kTogether = 32 / kChunks;  // Rows.
  const std::int64_t pitch = std::int64_t{p.sizes.forward.kv_heads} * rows.dims * kPasses * 2;
  const int mine = lane();
  const int chunk = mine % kChunks;
  auto* own = reinterpret_cast<std::byte*>(shared.keys[keys.stage()].keys) + slot() * 8 * kBytes;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int byte = (8 * i + 2 * (mine % 4)) * 2 * kPasses;
        const int at = mine / 4 * kBytes + ((byte / 16) ^ (mine / 4)) * 16 + byte % 16;
        const float* two = sums + 4 * (pass * kPairs + i) + 2 * r;
        round_pair(two[0], two[1], *reinterpret_cast<Pair*>(own + at));
      }
      __syncwarp();
      const int dim = work.part * Traits::kOut + pass * kPassDims + chunk * (kPassDims / kChunks);
      const std::int64_t first = std::int64_t{work.item.key_row} + slot() * 16 + r;
      auto* to = static_cast<std::byte*>(rows.to) + first * pitch +
                 (std::int64_t{work.kv_head} * rows.dims + dim) * 2 * kPasses;
#pragma unroll
      for (int n = 0; n < 8; n += kTogether) {
        const int row = n + mine / kChunks;
        const bool inside = slot() * 16 + 2 * row + r < work.item.keys && dim < rows.dims;
        const auto* from = own + row * kBytes + (chunk ^ row) * 16;
        if (inside) *reinterpret_cast<uint4*>(to + 2 * row * pitch) = *reinterpret_cast<const uint4*>(from);
      }
    }
  }
}

}  // namespace mxflash::cuda
