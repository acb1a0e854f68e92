// E4M3 codes with one exponent a token, or for 32 tokens of a document, from one reading of q, k and v: of v
// transposed, since the tensor cores take FP8 along the contraction only. A block takes a work item's queries, or a
// tile's keys, or its values, of one head or several; each of its warps 32 rows.
#include <algorithm>

#include "cuda/quantize_tokens.cuh"
#include "cuda/quantize_values.cuh"

namespace mxflash::cuda {
namespace {

__device__ TokenRows queries_of(const QuantizeArguments& a, const Item& item, const Team& team) {
  const Rows rows = Rows{&a.q, a.sizes.head_dim, team.head, item.query_row, item.queries}.group(team.group);
  return {rows, rows.first};
}

__device__ TokenRows keys_of(const QuantizeArguments& a, const KeyTile& tile, const Team& team) {
  const Rows rows = Rows{&a.k, a.sizes.head_dim, team.head, tile.row, tile.keys}.group(team.group);
  return {rows, tile.column + team.group * kGroup};
}

template <class Shape>
__device__ void quantize_values(const QuantizeArguments& a, const KeyTile& tile, const Team& team, Range* ranges,
                                std::byte* shared) {
  __shared__ ValuesSeen seen[kWarps];
  const bool has_head = team.head < a.sizes.kv_heads;
  Values<Shape> values(a, tile, team, shared);
  ValuesSeen own;
  if (has_head && team.group * kGroup < tile.columns) own = values.encode();
  if (lane_index() == 0) seen[warp_index()] = own;
  __syncthreads();
  if (!has_head) return;
  ValuesSeen all;
  for (int warp = 0; warp < team.warps; ++warp) all.add(seen[team.first_warp() + warp]);
  values.store(all.first);
  if (team.lane() != 0) return;
  Range& range = ranges[team.head * a.sizes.tile_slots()];
  range.least = all.least;
  range.most = all.most;
}

/// Of this block. Read again where it is asked for: kept, it takes registers that the butterflies have no room beside.
__device__ std::int64_t block_slot() {
  std::uint32_t y = 0;
  std::uint32_t z = 0;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
  return std::int64_t{z} * gridDim.y + y;
}

/// `norm`: that of a lane's key.
__device__ void keep_norm(const QuantizeArguments& a, float norm) {
  __shared__ float norms[kWarps];
  norm = join_lanes({INFINITY, -INFINITY, norm, 0}).key_norm;
  if (lane_index() == 0) norms[warp_index()] = norm;
  __syncthreads();
  const std::int64_t slot = block_slot();
  const Team team(a.workspace.tiles[slot].keys, static_cast<std::int32_t>(blockIdx.x) - a.sizes.heads);
  if (team.lane() != 0 || team.head >= a.sizes.kv_heads) return;
  for (int warp = 1; warp < team.warps; ++warp) norm = fmaxf(norm, norms[warp_index() + warp]);
  a.workspace.ranges[team.head * a.sizes.tile_slots() + slot].key_norm = norm;
}

/// Blocks of x have q's heads, then k's, then v's; those of y and z the slots.
template <class Shape, class Stages, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) quantize_kernel(const __grid_constant__ QuantizeArguments a) {
  extern __shared__ uint4 shared[];
  auto* parts = reinterpret_cast<std::byte*>(shared);
  const Sizes& sizes = a.sizes;
  const Workspace& work = a.workspace;
  const auto place = static_cast<std::int32_t>(blockIdx.x);
  const std::int64_t slot = block_slot();
  const bool is_query = place < sizes.heads;
  if (slot >= (is_query ? sizes.item_slots() : sizes.tile_slots())) return;
  const std::uint32_t status = work.control->status;
  const Item item = is_query ? work.items[slot] : Item{};
  const KeyTile tile = is_query ? KeyTile{} : work.tiles[slot];
  const bool used = is_query ? work.costs[slot] != 0 : tile.keys != 0;
  if (status != 0 || !used) return;

  const bool is_key = !is_query && place < sizes.heads + sizes.kv_heads;
  if (!is_query && !is_key) {
    const Team team(tile.columns, place - sizes.heads - sizes.kv_heads);
    quantize_values<Shape>(a, tile, team, work.ranges + slot, parts);
    return;
  }
  const Team team(is_query ? item.queries : tile.keys, is_query ? place : place - sizes.heads);
  const TokenRows rows = is_query ? queries_of(a, item, team) : keys_of(a, tile, team);
  float norm = 0;
  if (team.head < (is_query ? sizes.heads : sizes.kv_heads) && rows.rows.count > 0) {
    norm = Tokens<Shape, Stages>(a, rows, parts + warp_index() * Shape::kShared).run();
  }
  if (is_key) keep_norm(a, norm);
}

template <class Shape, class Stages, int kBlocks>
cudaError_t launch(const QuantizeArguments& a, cudaStream_t stream) {
  constexpr int kShared = kWarps * Shape::kShared;
  auto* kernel = quantize_kernel<Shape, Stages, kBlocks>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  constexpr std::int64_t kMostY = 65535;
  const std::int64_t slots = std::max(a.sizes.item_slots(), a.sizes.tile_slots());
  if (slots == 0) return cudaSuccess;
  const std::int64_t y = std::min(slots, kMostY);
  const std::int64_t z = (slots + y - 1) / y;
  const dim3 blocks(static_cast<unsigned>(a.sizes.heads + 2 * a.sizes.kv_heads), static_cast<unsigned>(y),
                    static_cast<unsigned>(z));
  kernel<<<blocks, kThreads, kShared, stream>>>(a);
  return cudaGetLastError();
}

/// Blocks of an SM: as many as shared memory has room for and registers allow without spilling.
template <class Shape>
cudaError_t launch_shape(const QuantizeArguments& a, cudaStream_t stream) {
  constexpr int kBlocks = Shape::kDims * Shape::kBytes > 256 ? 2 : 5;
  const bool all = a.rotation_shift < 0 || a.sizes.head_dim == Shape::kDims;
  return all ? launch<Shape, AllStages, kBlocks>(a, stream) : launch<Shape, SomeStages, 2>(a, stream);
}

template <class Type>
cudaError_t launch_type(const QuantizeArguments& a, cudaStream_t stream) {
  const std::int32_t dims = std::max(a.sizes.key_dims, a.sizes.value_dim);
  if (dims <= 64) return launch_shape<Shape<Type, 64>>(a, stream);
  if (dims <= 128) return launch_shape<Shape<Type, 128>>(a, stream);
  return launch_shape<Shape<Type, 256>>(a, stream);
}

}  // namespace

int launch_quantize(const QuantizeArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (arguments.q.dtype) {  // That of k and v.
    case DType::bf16: return launch_type<Bf16>(arguments, on);
    case DType::f16: return launch_type<F16>(arguments, on);
    default: return launch_type<F32>(arguments, on);
  }
}

}  // namespace mxflash::cuda
