// The powers of two before FP16 sums of dQ. A block reads the transposed codes of 128 tokens, four neighbours a lane,
// its warps the dims in turns: of a tile's keys it leaves the largest norms up to each, of queries what bounds their
// dQ. Nothing but keys that a row sees enters its bound, and every token's numbers add up in the same order wherever it
// is.
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/backward.hpp"
#include "cuda/documents.cuh"
#include "mxflash/formats.hpp"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = 4;  // Tokens of a lane.
constexpr unsigned kAll = 0xFFFFFFFFU;

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

/// 128 tokens of a table of codes by dims. A line of something else follows each 128 dims where `gap` is 1.
struct Columns {
  const std::uint8_t* first;
  std::int64_t pitch;
  std::int32_t dims;
  std::int32_t gap;

  [[nodiscard]] __device__ std::uint32_t four(std::int32_t dim) const {
    return *reinterpret_cast<const std::uint32_t*>(first + (dim + dim / kTileRows * gap) * pitch + lane() * kOwn);
  }
};

/// Of E4M3 codes.
__device__ float2 decode(std::uint32_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3)));
}

/// What the warps have found of the tokens, one after the other; `Join` makes one number of two.
template <class Join>
__device__ float joined(float (&of)[kWarps][kTileRows], int token, Join join) {
  float all = of[0][token];
  for (int w = 1; w < kWarps; ++w) all = join(all, of[w][token]);
  return all;
}

/// Leaves each token's sum of squares over the warp's dims.
__device__ void square(const Columns& columns, float (&out)[kWarps][kTileRows]) {
  float sums[kOwn] = {};
#pragma unroll 4
  for (std::int32_t dim = warp(); dim < columns.dims; dim += kWarps) {
    const std::uint32_t codes = columns.four(dim);
    const float2 low = decode(codes & 0xFFFFU);
    const float2 high = decode(codes >> 16);
    sums[0] = fmaf(low.x, low.x, sums[0]);
    sums[1] = fmaf(low.y, low.y, sums[1]);
    sums[2] = fmaf(high.x, high.x, sums[2]);
    sums[3] = fmaf(high.y, high.y, sums[3]);
  }
  *reinterpret_cast<float4*>(out[warp()] + lane() * kOwn) = {sums[0], sums[1], sums[2], sums[3]};
}
__device__ float norm_of(float (&squares)[kWarps][kTileRows], int token) {
  return sqrtf(joined(squares, token, [](float a, float b) { return a + b; }));
}

/// Leaves each token's largest magnitude. Without their signs codes rise as their values do.
__device__ void find_most(const Columns& columns, float (&out)[kWarps][kTileRows]) {
  std::uint32_t most = 0;
#pragma unroll 4
  for (std::int32_t dim = warp(); dim < columns.dims; dim += kWarps) {
    most = __vmaxu4(most, columns.four(dim) & 0x7F7F7F7FU);
  }
  const float2 low = decode(most & 0xFFFFU);
  const float2 high = decode(most >> 16);
  *reinterpret_cast<float4*>(out[warp()] + lane() * kOwn) = {low.x, low.y, high.x, high.y};
}
__device__ float most_of(float (&most)[kWarps][kTileRows], int token) {
  return joined(most, token, [](float a, float b) { return fmaxf(a, b); });
}

__device__ KeyMost join(const KeyMost& a, const KeyMost& b) { return {fmaxf(a.value, b.value), fmaxf(a.key, b.key)}; }

/// Of the lanes before and the own.
__device__ KeyMost most_to_lane(KeyMost own) {
  for (int step = 1; step < 32; step *= 2) {
    const KeyMost before{__shfl_up_sync(kAll, own.value, step), __shfl_up_sync(kAll, own.key, step)};
    if (lane() >= step) own = join(own, before);
  }
  return own;
}

/// Of a key; a poisoned K or V takes no part.
__device__ KeyMost key_most(const KeyScale& scale, float norm, float most) {
  KeyMost out{};
  if (scale.value_exponent != kPoisonedValue)
    out.value = scalbnf(norm * kMostUnit, static_cast<int>(scale.value_exponent));
  if (scale.factor == scale.factor) out.key = most * kMostUnit * scale.factor;
  return out;
}

/// A block has a tile and a head.
__global__ void __launch_bounds__(kThreads) key_most_kernel(const PrescaleArguments a) {
  __shared__ alignas(16) float values[kWarps][kTileRows];
  __shared__ alignas(16) float keys[kWarps][kTileRows];
  __shared__ KeyMost ends[kTileRows / 32];
  const Sizes& sizes = a.sizes.forward;
  if (a.saved.control->status != 0) return;
  const auto heads = static_cast<unsigned>(sizes.kv_heads);
  const std::int64_t slot = blockIdx.x / heads;
  const auto head = static_cast<std::int32_t>(blockIdx.x % heads);
  const KeyTile tile = a.saved.tiles[slot];
  if (tile.keys == 0) return;
  const std::int64_t pitch = sizes.columns();
  square({a.saved.value_codes + head * sizes.value_rows() * pitch + tile.column, pitch, sizes.value_dim, 1}, values);
  find_most({a.workspace.key_columns + std::int64_t{head} * a.sizes.dims * pitch + tile.column, pitch, a.sizes.dims, 0},
            keys);
  __syncthreads();
  const auto key = static_cast<int>(threadIdx.x);
  KeyMost own{};
  if (key < tile.keys) {
    own = key_most(a.saved.key_scale[head * pitch + tile.column + key], norm_of(values, key), most_of(keys, key));
  }
  own = most_to_lane(own);
  if (key < kTileRows && lane() == 31) ends[warp()] = own;
  __syncthreads();
  if (key >= kTileRows) return;
  for (int w = 0; w < warp(); ++w) own = join(own, ends[w]);
  const std::int64_t at = head * sizes.tile_slots() + slot;
  a.workspace.key_most[at * kTileRows + key] = own;
  if (key == kTileRows - 1) a.workspace.tile_most[at] = own;
}

/// Of all keys of `count` tiles from `tiles` on; all of a block's threads.
__device__ KeyMost most_of_tiles(const KeyMost* tiles, std::int32_t count) {
  __shared__ KeyMost parts[kWarps];
  KeyMost own{};
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) own = join(own, tiles[i]);
  own = most_to_lane(own);
  if (lane() == 31) parts[warp()] = own;
  __syncthreads();
  KeyMost all{};
  for (const KeyMost& part : parts) all = join(all, part);
  return all;
}

/// 14 - ceil(log2(bound)) of numerics.md. `dout`: the norm of dO times kMostUnit.
__device__ std::int32_t prescale_of(const KeyMost& most, double dout, double dlse, double scale) {
  constexpr double kBack = 1.0 / kMostUnit;
  const double key = most.key * kBack;
  const double bound = dout * kBack * (2 * scale * (most.value * kBack) * key) + dlse * (scale * key);
  if (!(bound > 0) || bound > 1e300) return 0;
  int exponent = 0;
  const double fraction = frexp(bound, &exponent);
  return min(max(14 - (fraction == 0.5 ? exponent - 1 : exponent), -kMostPrescale), kMostPrescale);
}

/// A block has an item's queries of a head.
__global__ void __launch_bounds__(kThreads) prescale_kernel(const PrescaleArguments a) {
  __shared__ alignas(16) float squares[kWarps][kTileRows];
  const Sizes& sizes = a.sizes.forward;
  if (a.saved.control->status != 0) return;
  const auto heads = static_cast<unsigned>(sizes.heads);
  const std::int64_t slot = blockIdx.x / heads;
  const auto head = static_cast<std::int32_t>(blockIdx.x % heads);
  if (a.saved.costs[slot] == 0) return;
  const Item item = a.saved.items[slot];
  const std::int64_t pitch = a.sizes.query_columns();
  const std::int32_t column = first_column(a.offsets.q, item.document) + item.query_row - a.offsets.q[item.document];
  square({a.workspace.dout_columns + std::int64_t{head} * a.sizes.dims * pitch + column, pitch, sizes.value_dim, 0},
         squares);
  // Ends of what rows see rise by one at most: all lie in one tile or in the next.
  const std::int64_t end_of_first = std::int64_t{item.first_position} + a.band.right + 1;
  const auto first_end = static_cast<std::int32_t>(min(max(end_of_first, std::int64_t{1}), std::int64_t{item.keys}));
  const std::int32_t whole =
      (max(first_end, 1) - 1) / kTileRows;  // Tiles that every row that sees a key sees the end of.
  const std::int32_t kv_head = head / (sizes.heads / sizes.kv_heads);
  const std::int64_t first_tile = kv_head * sizes.tile_slots() + item.first_tile;
  const KeyMost before = most_of_tiles(a.workspace.tile_most + first_tile, whole);
  __syncthreads();
  const auto query = static_cast<std::int32_t>(threadIdx.x);
  if (query >= item.queries) return;
  const std::int32_t token = item.query_row + query;
  const std::int64_t row = head * sizes.rows_q() + token;
  const KeySpan seen = visible_keys(std::int64_t{item.first_position} + query, item.keys, a.band);
  std::int32_t exponent = 0;
  if (seen.end > seen.begin) {
    const std::int64_t last = seen.end - 1;
    KeyMost most = join(before, a.workspace.key_most[first_tile * kTileRows + last]);
    if (last / kTileRows > whole) most = join(most, a.workspace.tile_most[first_tile + whole]);
    const float factor = a.workspace.dout_records[row].factor;  // NaN where poisoned: no bound.
    const float dlse = a.dlse == nullptr ? 0 : a.dlse[token * a.dlse_token_stride + head * a.dlse_head_stride];
    exponent = prescale_of(most, norm_of(squares, query) * kMostUnit * factor, fabsf(dlse), fabsf(a.scale));
  }
  a.workspace.prescale[row] = exponent;
}

}  // namespace

int launch_prescale(const PrescaleArguments& arguments, void* stream) {
  if (!arguments.sizes.has_prescale()) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  const Sizes& sizes = arguments.sizes.forward;
  const std::int64_t tiles = sizes.tile_slots() * sizes.kv_heads;
  const std::int64_t items = sizes.item_slots() * sizes.heads;
  if (tiles > 0) key_most_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, on>>>(arguments);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (items > 0) prescale_kernel<<<static_cast<unsigned>(items), kThreads, 0, on>>>(arguments);
  return cudaGetLastError();
}

}  // namespace mxflash::cuda
