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
  RowEnd end[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) end[r].sum = {counted_sum(r), work.reference};
  if ((flags_ & kIrregular) != 0) add_what_is_apart(end);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    end[r].empty = row_of_item(r).begin == row_of_item(r).end;
    end[r].inverse = end[r].empty ? 0.0F : reciprocal(end[r].sum.value);  // The sums of an empty row are 0.
  }
  if (quad == 0 && work.part == 0) record(work, end);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowSum& sum = end[r].sum;
    const float scale = end[r].poisoned ? NAN : any_pow2(static_cast<int>(fmaxf(sum.unit, -300.0F)));
#pragma unroll
    for (int i = 2 * r; i < static_cast<int>(Traits::kOutputs); i += 4) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float value = sums[i + b];
        // One step of refinement: a value that is the sum gives 1, not its neighbour.
        const float first = value * end[r].inverse;
        const float quotient = fmaf(fmaf(-first, sum.value, value), end[r].inverse, first);
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
__device__ void Consumer<Traits>::record(const Work& work, const RowEnd (&end)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + 8 * r;
    if (query >= work.item.queries) continue;
    const auto& [sum, inverse, empty, poisoned] = end[r];
    const float most = (flags_ & kIrregular) != 0 ? kept(Kept::most, r) : -INFINITY;
    const float log2 = state.base[r] - sum.unit + log2f(sum.value);
    const std::int64_t place = (std::int64_t{work.item.query_row} + query) * p.sizes.heads + work.head;
    p.lse[place] = empty ? -INFINITY : log2 * std::numbers::ln2_v<float>;
    if (p.workspace.rows == nullptr) continue;
    *record_of(work, query) = empty ? RowRecord{} : RowRecord{state.base[r], inverse, sum.unit, most};
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
  if constexpr (sizeof(Pair) == 4) {
    // Matrices of eight rows and eight dims, four at a time: both halves of the rows, of 16 dims.
    const std::uint32_t mine = cute::cast_smem_ptr_to_uint(own + offset(at % 16) + at / 16 * 16);
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 8) {
      std::uint32_t four[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        round_pair(sums[i + 2 * n], sums[i + 2 * n + 1], reinterpret_cast<Pair&>(four[n]));
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine + 4 * i), "r"(four[0]),
                   "r"(four[1]), "r"(four[2]), "r"(four[3])
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 2) {
      auto* mine = own + offset(at / 4 + 8 * row_of(i)) + at % 4 * static_cast<int>(sizeof(Pair));
      *reinterpret_cast<Pair*>(mine + i / 4 * 4 * sizeof(Pair)) = {sums[i], sums[i + 1]};
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
