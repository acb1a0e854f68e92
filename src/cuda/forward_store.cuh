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
  float4(*mine)[32] = shared.sums[own_slot()];
#pragma unroll
  for (int i = 0; i < Traits::kOutputs / 4; ++i) {
    mine[i][lane] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
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
  const float4(*mine)[32] = shared.sums[own_slot()];
  const float scale[2] = {kept(Kept::moved, 0), kept(Kept::moved, 1)};
#pragma unroll
  for (int i = 0; i < Traits::kOutputs / 4; ++i) {
    const float4 before = mine[i][lane];
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
  // The sums' units are powers of two, so they may as well multiply what is divided by: but for what might leave FP32
  // with it, since a sum may be a number of keys times 2^60 (row_sum).
  bool far = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    constexpr float kSafe = 30.0F;
    const float unit = fmaxf(end[r].sum.unit, -300.0F);
    const float near = fminf(fmaxf(unit, -kSafe), kSafe);
    far |= near != unit;
    divide(r, end[r], near);
    end[r].sum.unit = unit - near;
  }
  if (__any_sync(0xFFFFFFFFU, far)) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Traits::kOutputs); ++i) {
      sums[i] *= any_pow2(static_cast<int>(end[row_of(i)].sum.unit));
    }
  }
  switch (p.dtype) {
    case DType::bf16: return write<__nv_bfloat162>(work);
    case DType::f16: return write<__half2>(work);
    default: return write_floats(work);
  }
}

template <class Traits>
__device__ void Consumer<Traits>::divide(int r, const RowEnd& end, float unit) {
  const float scale = end.poisoned ? NAN : normal_pow2(static_cast<int>(unit));
  const float inverse = end.inverse * scale;
  const float sum = end.sum.value * normal_pow2(-static_cast<int>(unit));
#pragma unroll
  for (int i = 2 * r; i < static_cast<int>(Traits::kOutputs); i += 4) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float value = sums[i + b];
      // One step of refinement: a value that is the sum gives 1, not its neighbour.
      const float first = value * inverse;
      sums[i + b] = fmaf(fmaf(-first, sum, value), inverse, first);
    }
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
  write_rows<Pair>(work, {p.o, &p.o_map, 0});
  if (p.workspace.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 2) {
    Pair two;
    round_pair(sums[i], sums[i + 1], two);
    sums[i] -= static_cast<float>(two.x);
    sums[i + 1] -= static_cast<float>(two.y);
  }
  write_rows<Pair>(work, {p.workspace.residual, &p.residual_map, 1});
}

template <class Traits>
template <class Pair>
__device__ auto Consumer<Traits>::destination(const Work& work, void* rows) const -> Destination {
  const std::int64_t bytes = std::int64_t{p.sizes.value_dim} / 2 * static_cast<std::int64_t>(sizeof(Pair));
  const int first = group * 64 + thread / 32 * 16;
  const std::int64_t place = (std::int64_t{work.item.query_row} + first) * p.sizes.heads + work.head;
  const std::int64_t before = std::int64_t{work.part} * kBytesOf<Pair>;
  return {static_cast<std::byte*>(rows) + place * bytes + before, p.sizes.heads * bytes,
          min(work.item.queries - first, kOutputRows),
          static_cast<int>(min(bytes - before, std::int64_t{kBytesOf<Pair>}))};
}

template <class Traits>
template <class Pair>
__device__ void Consumer<Traits>::write_rows(const Work& work, const Rows& rows) {
  constexpr int kChunks = kBytesOf<Pair> / kOutputBytes;
  constexpr int kChunk = kOutputRows * kOutputBytes;
  // Addresses are not kept for the next item, where they are the same.
  const int at = static_cast<int>(opaque(static_cast<std::uint32_t>(lane)));
  auto* own = reinterpret_cast<std::byte*>(shared.sums[own_slot()]) + rows.place * kChunks * kChunk;
  __syncwarp();
  // Matrices of eight rows and eight dims, four at a time: both halves of the rows, of 16 dims. Sixteen bytes lie by an
  // exclusive or of their row, as the copy engine has it.
  const std::uint32_t mine = cute::cast_smem_ptr_to_uint(own + at % 16 * kOutputBytes + ((at / 16) ^ (at % 8)) * 16);
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 8) {
    std::uint32_t four[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      round_pair(sums[i + 2 * n], sums[i + 2 * n + 1], reinterpret_cast<Pair&>(four[n]));
    }
    const std::uint32_t to = (mine ^ static_cast<std::uint32_t>(4 * i % kOutputBytes)) + 4 * i / kOutputBytes * kChunk;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four[0]),
                 "r"(four[1]), "r"(four[2]), "r"(four[3])
                 : "memory");
  }
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  const int first = group * 64 + thread / 32 * kOutputRows;
  if (work.item.queries - first >= kOutputRows) {
    if (at != 0) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      // Beyond value_dim the copy engine writes nothing.
      cute::SM90_TMA_STORE_3D::copy(rows.map, own + chunk * kChunk, (work.part * kChunks + chunk) * kOutputBytes,
                                    work.head, work.item.query_row + first);
    }
    cute::tma_store_arrive();
    return;
  }
  // Rows beyond the document are another's.
  const Destination out = destination<Pair>(work, rows.to);
  constexpr int kLanes = kBytesOf<Pair> / 16;  // Of a row.
  const int byte = at % kLanes * 16;
  for (int row = at / kLanes; row < out.rows && byte < out.bytes; row += 32 / kLanes) {
    const auto* from = own + byte / kOutputBytes * kChunk + row * kOutputBytes + (byte % kOutputBytes ^ row % 8 * 16);
    *reinterpret_cast<uint4*>(out.to + row * out.pitch + byte) = *reinterpret_cast<const uint4*>(from);
  }
  __syncwarp();  // The next item's sums may be there soon.
}

template <class Traits>
__device__ void Consumer<Traits>::write_floats(const Work& work) {
  constexpr int kBytes = kBytesOf<float2>;
  constexpr int kLanes = kBytes / 16;
  const int at = static_cast<int>(opaque(static_cast<std::uint32_t>(lane)));
  auto* own = reinterpret_cast<std::byte*>(shared.sums[own_slot()]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < static_cast<int>(Traits::kOutputs); i += 2) {
    auto* mine = own + (at / 4 + 8 * row_of(i)) * kBytes + i / 4 * 32 + at % 4 * 8;
    *reinterpret_cast<float2*>(mine) = {sums[i], sums[i + 1]};
  }
  __syncwarp();
  const Destination out = destination<float2>(work, p.o);
  const int byte = at % kLanes * 16;
  for (int row = at / kLanes; row < out.rows && byte < out.bytes; row += 32 / kLanes) {
    *reinterpret_cast<uint4*>(out.to + row * out.pitch + byte) =
        *reinterpret_cast<const uint4*>(own + row * kBytes + byte);
  }
  __syncwarp();
}

}  // namespace mxflash::cuda
