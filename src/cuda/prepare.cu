// What the backward multiplies besides the forward's codes: dO's codes, by rows and transposed, D, the records of tiles
// of queries, and the codes of q, k and v transposed. A block takes an item's queries, or a tile's keys, of one head or
// several, and writes whole lines of 128 bytes, as far as there are so many.
#include "cuda/documents.cuh"
#include "cuda/prepare.cuh"

namespace mxflash::cuda {
namespace {

static_assert(kTileRows == kSide);

/// Of a slot of the forward's items.
__device__ QueryPlace place_of(const PrepareArguments& a, std::int64_t slot) {
  const Sizes& sizes = a.sizes.forward;
  QueryPlace place;
  if (slot >= sizes.item_slots()) return place;
  // Both asked for at once: an unused slot's item may be anything.
  const Item item = a.saved.items[slot];
  const bool used = a.saved.costs[slot] != 0;
  if (a.saved.control->status != 0 || !used) return place;
  const std::int32_t begin = a.offsets.q[item.document];
  const std::int32_t end = a.offsets.q[item.document + 1];
  const std::int32_t inside = item.query_row - begin;
  place.row = item.query_row;
  place.queries = item.queries;
  place.document = item.document;
  place.column = first_column(a.offsets.q, item.document) + inside;
  place.columns = item.queries > kQueryTile ? 2 * kQueryTile : kQueryTile;
  if (item.query_row + item.queries >= end) {
    place.columns = columns_to_fill({a.offsets.q, sizes.documents, sizes.tokens_q}, end, place.column, place.columns);
  }
  place.slot = begin / kQueryTile + item.document + inside / kQueryTile;
  return place;
}

/// Columns of queries, of `table`.
__device__ ByColumns<std::uint8_t> query_columns_of(const PrepareArguments& a, const QueryPlace& place,
                                                    const Share& share, std::uint8_t* table) {
  const std::int64_t pitch = a.sizes.query_columns();
  return {share,
          {table + place.column, a.sizes.dims * pitch, pitch, a.sizes.forward.heads, place.columns, a.sizes.dims}};
}

template <class Shape>
__device__ void encode_dout(const PrepareArguments& a, const QueryPlace& place, const Share& share, std::byte* lines) {
  __shared__ QueriesSeen seen[kWarps];
  const Sizes& sizes = a.sizes.forward;
  const unsigned line = warp_index() * kGroup;  // The warp's first.
  DoutRows<Shape> rows(a, place, share.head(line), share.place(line));
  const bool has_head = share.head(line) < sizes.heads;
  if (has_head) {
    const QueriesSeen own = rows.run(lines);
    if (lane_index() == 0) seen[warp_index()] = own;
    const std::int64_t head_pitch = sizes.rows_q() * a.sizes.dims;
    const ByRows<std::uint8_t> to{share,
                                  {a.workspace.dout_codes + std::int64_t{place.row} * a.sizes.dims, head_pitch,
                                   a.sizes.dims, sizes.heads, place.queries, a.sizes.dims}};
#pragma unroll 1
    for (unsigned s = 0; s < kSquares<Shape>; ++s) {
      Square<Shape::kPitch>(lines, s).store(line, [&](unsigned l, unsigned unit) { return to(s, l, unit); });
    }
  }
  __syncthreads();
  store_transposed<Shape>(lines, query_columns_of(a, place, share, a.workspace.dout_columns));
  if (!has_head || share.place(line) % kQueryTile != 0) return;
  QueriesSeen all = seen[warp_index()];
  if (share.tokens() > kGroup) {
    all.add(seen[warp_index() + 1]);
  } else {
    rows.keep_no_more();
  }
  rows.finish(all);
}

__device__ ByRows<const std::uint8_t> query_rows_of(const PrepareArguments& a, const QueryPlace& place,
                                                    const Share& share) {
  const Sizes& sizes = a.sizes.forward;
  const std::int64_t pitch = sizes.key_dims;
  return {share,
          {a.saved.query_codes + place.row * pitch, sizes.rows_q() * pitch, pitch, sizes.heads, place.queries,
           sizes.key_dims}};
}

template <class Shape>
__device__ void transpose_keys(const PrepareArguments& a, const KeyTile& tile, const Share& share, std::byte* lines) {
  const Sizes& sizes = a.sizes.forward;
  const std::int64_t pitch = sizes.key_dims;
  const std::int64_t columns = sizes.columns();
  const ByRows<const std::uint8_t> from{
      share,
      {a.saved.key_codes + tile.row * pitch, sizes.rows_k() * pitch, pitch, sizes.kv_heads, tile.keys, sizes.key_dims}};
  const ByColumns<std::uint8_t> to{share,
                                   {a.workspace.key_columns + tile.column, a.sizes.dims * columns, columns,
                                    sizes.kv_heads, tile.columns, a.sizes.dims}};
  transpose<Shape>(lines, from, to);
}

/// Back to rows; what the forward has beyond value_dim is nobody's. A row of multipliers ends each part of its codes.
template <class Shape>
__device__ void transpose_values(const PrepareArguments& a, const KeyTile& tile, const Share& share, std::byte* lines) {
  const Sizes& sizes = a.sizes.forward;
  const std::int64_t pitch = a.sizes.dims;
  const std::int64_t columns = sizes.columns();
  const ByColumns<const std::uint8_t> from{share,
                                           {a.saved.value_codes + tile.column, sizes.value_rows() * columns, columns,
                                            sizes.kv_heads, tile.keys, sizes.value_dim, 1}};
  const ByRows<std::uint8_t> to{share,
                                {a.workspace.value_rows + tile.row * pitch, sizes.rows_k() * pitch, pitch,
                                 sizes.kv_heads, tile.keys, a.sizes.dims}};
  transpose<Shape>(lines, from, to);
}

template <class Shape>
__device__ void prepare_queries(const PrepareArguments& a, std::int64_t slot, std::int32_t at, std::byte* lines) {
  const std::int32_t heads = a.sizes.forward.heads;
  const QueryPlace place = place_of(a, slot);
  const Share share(place.columns, at % heads);
  if (place.queries == 0 || share.head(0) >= heads) return;
  if (at < heads) {
    encode_dout<Shape>(a, place, share, lines);
  } else {
    transpose<Shape>(lines, query_rows_of(a, place, share),
                     query_columns_of(a, place, share, a.workspace.query_columns));
  }
}

template <class Shape>
__device__ void prepare_keys(const PrepareArguments& a, std::int64_t slot, std::int32_t at, std::byte* lines) {
  const std::int32_t heads = a.sizes.forward.kv_heads;
  if (a.saved.control->status != 0 || slot >= a.sizes.forward.tile_slots()) return;
  const KeyTile tile = a.saved.tiles[slot];
  const Share share(tile.columns, at % heads);
  if (tile.keys == 0 || share.head(0) >= heads) return;
  if (at < heads) {
    transpose_keys<Shape>(a, tile, share, lines);
  } else {
    transpose_values<Shape>(a, tile, share, lines);
  }
}

/// A slot's blocks have dO's heads, then q's, k's and v's: those that transpose alone hide the others' instructions.
__host__ __device__ std::int32_t blocks_of_slot(const Sizes& sizes) { return 2 * (sizes.heads + sizes.kv_heads); }

template <class Shape, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) prepare_kernel(const __grid_constant__ PrepareArguments a) {
  extern __shared__ uint4 memory[];
  auto* lines = reinterpret_cast<std::byte*>(memory);
  const auto blocks = static_cast<unsigned>(blocks_of_slot(a.sizes.forward));
  const std::int32_t queries = 2 * a.sizes.forward.heads;
  const std::int64_t slot = blockIdx.x / blocks;
  const auto at = static_cast<std::int32_t>(blockIdx.x % blocks);
  if (at < queries) {
    prepare_queries<Shape>(a, slot, at, lines);
  } else {
    prepare_keys<Shape>(a, slot, at - queries, lines);
  }
}

/// Blocks of an SM: as many as shared memory has room for and registers allow without spilling.
template <class Shape>
cudaError_t launch(const PrepareArguments& a, cudaStream_t stream) {
  constexpr int kShared = kBlockBytes<Shape>;
  constexpr int kRoom = 227 * 1024;
  constexpr int kBlocksByRegisters = Shape::kDims > 128 ? 3 : 5;
  auto* kernel = prepare_kernel<Shape, std::min(kRoom / (kShared + 1024), kBlocksByRegisters)>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  const Sizes& sizes = a.sizes.forward;
  const std::int64_t blocks = std::max(sizes.item_slots(), sizes.tile_slots()) * blocks_of_slot(sizes);
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kShared, stream>>>(a);
  return cudaGetLastError();
}

template <class Type>
cudaError_t launch_type(const PrepareArguments& a, cudaStream_t stream) {
  if (a.sizes.dims <= 64) return launch<Shape<Type, 64>>(a, stream);
  if (a.sizes.dims <= 128) return launch<Shape<Type, 128>>(a, stream);
  return launch<Shape<Type, 256>>(a, stream);
}

}  // namespace

int launch_prepare(const PrepareArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (arguments.dout.dtype) {  // That of o.
    case DType::bf16: return launch_type<Bf16>(arguments, on);
    case DType::f16: return launch_type<F16>(arguments, on);
    default: return launch_type<F32>(arguments, on);
  }
}

}  // namespace mxflash::cuda
