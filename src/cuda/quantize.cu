// E4M3 codes with one exponent a token, or for 32 tokens of a document, from one reading of q, k and v: of v
// transposed, since the tensor cores take FP8 along the contraction only. A warp takes a work item's queries, or a
// tile's keys, or its values, of one head, and never waits for another warp.
#include <algorithm>

#include "cuda/quantize_tokens.cuh"
#include "cuda/quantize_values.cuh"

namespace mxflash::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

/// One unit a warp; those of q, k and v are mixed evenly, because q and k take instructions, v memory alone.
template <class Shape, class Stages, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) quantize_kernel(const __grid_constant__ QuantizeArguments a) {
  extern __shared__ uint4 shared[];
  if (a.workspace.control->status != 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::byte* part = reinterpret_cast<std::byte*>(shared) + warp * Shape::kShared;
  const std::int64_t of_queries = a.sizes.item_slots() * a.sizes.heads;
  const std::int64_t units = of_queries + 2 * a.sizes.tile_slots() * a.sizes.kv_heads;
  const std::int64_t unit = std::int64_t{blockIdx.x} * kWarps + warp;
  if (unit >= units) return;
  const std::int64_t before = unit * of_queries / units;
  const bool is_query = (unit + 1) * of_queries / units > before;
  const std::int64_t index = is_query ? before : (unit - before) / 2;
  const bool is_value = !is_query && (unit - before) % 2 == 1;
  const std::int32_t heads = is_query ? a.sizes.heads : a.sizes.kv_heads;
  const auto slot = static_cast<std::int32_t>(index / heads);
  const auto head = static_cast<std::int32_t>(index % heads);
  const Workspace& work = a.workspace;
  TokenRows rows;
  Range* range = nullptr;
  if (is_query) {
    if (work.costs[slot] == 0) return;
    const Item& item = work.items[slot];
    const std::int64_t place = head * a.sizes.rows_q() + item.query_row;
    QueryScale* scales = work.query_scale + place;
    rows = {{&a.q, a.sizes.head_dim, head, item.query_row, item.queries},
            work.query_codes + place * a.sizes.key_dims,
            &scales->factor,
            &scales->norm};
  } else {
    const KeyTile tile = work.tiles[slot];
    if (tile.keys == 0) return;
    range = work.ranges + head * a.sizes.tile_slots() + slot;
    if (is_value) {
      const Range all = join_lanes(Values<Shape>(a, tile, head, part).run());
      if (lane_index() != 0) return;
      range->least = all.least;
      range->most = all.most;
      return;
    }
    const std::int64_t place = head * a.sizes.rows_k() + tile.row;
    KeyScale* scales = work.key_scale + head * a.sizes.columns() + tile.column;
    rows = {{&a.k, a.sizes.head_dim, head, tile.row, tile.keys},
            work.key_codes + place * a.sizes.key_dims,
            &scales->factor,
            nullptr};
  }
  const float norm = join_lanes({INFINITY, -INFINITY, Tokens<Shape, Stages>(a, rows, part).run(), 0}).key_norm;
  if (range != nullptr && lane_index() == 0) range->key_norm = norm;
}

template <class Shape, class Stages, int kBlocks>
cudaError_t launch(const QuantizeArguments& a, cudaStream_t stream) {
  constexpr int kShared = kWarps * Shape::kShared;
  auto* kernel = quantize_kernel<Shape, Stages, kBlocks>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  const std::int64_t units = a.sizes.item_slots() * a.sizes.heads + 2 * a.sizes.tile_slots() * a.sizes.kv_heads;
  kernel<<<static_cast<unsigned>((units + kWarps - 1) / kWarps), kThreads, kShared, stream>>>(a);
  return cudaGetLastError();
}

/// Blocks of an SM: as many as shared memory has room for and registers allow without spilling.
template <class Shape>
cudaError_t launch_shape(const QuantizeArguments& a, cudaStream_t stream) {
  constexpr int kBlocks = Shape::kDims * Shape::kBytes > 256 ? 2 : Shape::kDims > 64 ? 3 : 4;
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
