// The sums of a consumer: moved, rescaled, divided by the row sums, written.
#pragma once

#include <numbers>

#include "cuda/forward_consumer.cuh"
#include "cuda/outputs.cuh"

namespace mxflash::cuda {

template <class Traits>
__device__ void Consumer<Traits>::rescale() {
  const float scale[2] = {kept(Kept::scale, 0), kept(Kept::scale, 1)};
#pragma unroll
  for (int i = 0; i < Traits::kSums; ++i) sums[i] *= scale[row_of(i)];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    kept(Kept::total, r) *= scale[r];
    kept(Kept::moved, r) *= scale[r];
  }
}

template <class Traits>
__device__ void Consumer<Traits>::move_sums() {
  if ((flags_ & kMoved) != 0) add_moved();
  float4* mine = &shared.sums[group][0][thread];
#pragma unroll
  for (int i = 0; i < Traits::kOutputs / 4; ++i) {
    mine[i * kWarpgroup] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float by = (flags_ & kRaised) != 0 ? kept(Kept::scale, r) : 1.0F;
    kept(Kept::total, r) = (kept(Kept::total, r) + sums[Traits::kOutputs + 2 * r]) * by;
    kept(Kept::moved, r) = by;
  }
}

template <class Traits>
__device__ void Consumer<Traits>::add_moved() {
  const float4* mine = &shared.sums[group][0][thread];
  const float scale[2] = {kept(Kept::moved, 0), kept(Kept::moved, 1)};
#pragma unroll
  for (int i = 0; i < Traits::kOutputs / 4; ++i) {
    const float4 before = mine[i * kWarpgroup];
    sums[4 * i] = fmaf(before.x, scale[0], sums[4 * i]);
    sums[4 * i + 1] = fmaf(before.y, scale[0], sums[4 * i + 1]);
    sums[4 * i + 2] = fmaf(before.z, scale[1], sums[4 * i + 2]);
    sums[4 * i + 3] = fmaf(before.w, scale[1], sums[4 * i + 3]);
  }
}

template <class Traits>
__device__ void Consumer<Traits>::store_nothing(const Work& work) const {
  const int rows = min(work.item.queries - group * 64, 64);
  const std::int64_t bytes = std::int64_t{p.sizes.value_dim} * (p.dtype == DType::f32 ? 4 : 2);
  const int chunks = static_cast<int>(bytes / 16);
  for (int i = thread; i < rows * chunks; i += kWarpgroup) {
    const std::int64_t place =
        (std::int64_t{work.item.query_row} + group * 64 + i / chunks) * p.sizes.heads + work.head;
    const std::int64_t byte = place * bytes + i % chunks * 16;
    *reinterpret_cast<uint4*>(static_cast<std::byte*>(p.o) + byte) = uint4{};
    if (p.workspace.residual != nullptr) {
      *reinterpret_cast<uint4*>(static_cast<std::byte*>(p.workspace.residual) + byte) = uint4{};
    }
    p.lse[place] = -INFINITY;
    if (p.workspace.rows != nullptr) *record_of(work, group * 64 + i / chunks) = {};
  }
}

template <class Traits>
__device__ RowRecord* Consumer<Traits>::record_of(const Work& work, int query) const {
  return p.workspace.rows + work.head * p.sizes.rows_q() + work.item.query_row + query;
}

template <class Traits>
__device__ void Consumer<Traits>::store(const Work& work) {
  if ((flags_ & kMoved) != 0) add_moved();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + 8 * r;
    const std::int64_t place = (std::int64_t{work.item.query_row} + query) * p.sizes.heads + work.head;
    const unsigned four = 0xFU << (lane / 4 * 4);
    const RowSum sum = row_sum(work, r, four);
    // Not by a vote of four, of which the warp's eight would take turns.
    const bool bad = (__ballot_sync(0xFFFFFFFFU, kept(Kept::poisoned, r) != 0.0F) & four) != 0;
    const bool empty = kept(Kept::begin, r) == kept(Kept::end, r);
    const float inverse = empty ? 0.0F : __frcp_rn(sum.value);  // The sums of an empty row are 0.
    const float scale = bad ? NAN : detail::pow2(static_cast<int>(fmaxf(sum.unit, -300.0F)));
    if (quad == 0 && work.part == 0 && query < work.item.queries) {
      const float log2 = state.base[r] - sum.unit + log2f(sum.value);
      p.lse[place] = empty ? -INFINITY : log2 * std::numbers::ln2_v<float>;
      if (p.workspace.rows != nullptr) {
        *record_of(work, query) =
            empty ? RowRecord{} : RowRecord{state.base[r], inverse, sum.unit, kept(Kept::most, r)};
      }
    }
#pragma unroll
    for (int i = 2 * r; i < static_cast<int>(Traits::kOutputs); i += 4) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float value = sums[i + b];
        // One step of refinement: a value that is the sum gives 1, not its neighbour.
        const float first = value * inverse;
        const float quotient = fmaf(fmaf(-first, sum.value, value), inverse, first);
        sums[i + b] = quotient * scale;
      }
    }
  }
  switch (p.dtype) {
    case DType::bf16: return write<__nv_bfloat162>(work);
    case DType::f16: return write<__half2>(work);
    default: return write_rows<float2>(work, p.o);
  }
}

template <class Traits>
template <class Pair>
__device__ void Consumer<Traits>::write(const Work& work) {
  write_rows<Pair>(work, p.o);
  if (p.workspace.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 2) {
    Pair two;
    round_pair(sums[i], sums[i + 1], two);
    sums[i] -= static_cast<float>(two.x);
    sums[i + 1] -= static_cast<float>(two.y);
  }
  write_rows<Pair>(work, p.workspace.residual);
}

template <class Traits>
template <class Pair>
__device__ void Consumer<Traits>::write_rows(const Work& work, void* rows) {
  constexpr int kBytes = Traits::kValueDims / 2 * sizeof(Pair);  // Of a row.
  constexpr int kPlace = 8 * Traits::kOutputs;                   // Of a row's place in the warp's sums,
  constexpr int kPlaces = 512 / kPlace;                          // of which 512 bytes lie together.
  constexpr int kChunks = kBytes / 16;
  constexpr int kRows = 32 / kChunks;  // At a time.
  static_assert(kBytes <= kPlace && kRows % kPlaces == 0);
  const int warp = thread / 32;
  // Addresses are not kept for the next item, where they are the same.
  const int at = static_cast<int>(opaque(static_cast<std::uint32_t>(lane)));
  auto* own = reinterpret_cast<std::byte*>(&shared.sums[group][0][warp * 32]);
  // Where there is room no two of eight rows share banks.
  const auto offset = [](int local) {
    const int apart = kBytes < kPlace ? local % 8 * 16 : 0;
    return local / kPlaces * static_cast<int>(sizeof shared.sums[0][0]) + local % kPlaces * kPlace + apart;
  };
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto* mine = own + offset(at / 4 + 8 * r) + at % 4 * static_cast<int>(sizeof(Pair));
#pragma unroll
    for (int i = 2 * r; i < static_cast<int>(Traits::kOutputs); i += 4) {
      Pair two;
      round_pair(sums[i], sums[i + 1], two);
      *reinterpret_cast<Pair*>(mine + i / 4 * 4 * sizeof(Pair)) = two;
    }
  }
  __syncwarp();
  const std::int64_t bytes = std::int64_t{p.sizes.value_dim} / 2 * static_cast<std::int64_t>(sizeof(Pair));
  const int local = at / kChunks;
  const int byte = at % kChunks * 16;
  const int query = group * 64 + warp * 16 + local;
  const int left = byte < bytes - work.part * kBytes ? work.item.queries - query : 0;
  const std::int64_t place = (std::int64_t{work.item.query_row} + query) * p.sizes.heads + work.head;
  auto* out = static_cast<std::byte*>(rows) + place * bytes + work.part * kBytes + byte;
  const auto* from = own + offset(local) + byte;
#pragma unroll
  for (int i = 0; i < 16; i += kRows) {
    if (i < left) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from + offset(i));
    out += kRows * p.sizes.heads * bytes;
  }
  __syncwarp();  // The next item's sums may be there soon.
}

}  // namespace mxflash::cuda
