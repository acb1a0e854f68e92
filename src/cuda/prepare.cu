// What the backward multiplies besides the forward's codes: dO's codes, by rows and transposed, D, the records of tiles
// of queries, and the codes of q, k and v transposed. A warp takes a tile of 64 tokens of one head, and never waits for
// another warp.
#include "cuda/documents.cuh"
#include "cuda/prepare.cuh"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = kWarps * 32;
constexpr int kHalves = kTileRows / kQueryTile;
static_assert(kQueryTile == Square::kSide);

/// What a warp does; a block's do the same.
enum class Kind : std::uint8_t { dout, queries, keys, values };

/// Half of a slot of the forward's items or tiles, of one head.
struct Unit {
  std::int32_t slot;
  std::int32_t half;
  std::int32_t head;
};

__host__ __device__ std::int64_t blocks_of(std::int64_t slots, std::int32_t heads) {
  return (slots * kHalves * heads + kWarps - 1) / kWarps;
}

__device__ Unit unit_of(std::int64_t block, std::int32_t heads) {
  const std::int64_t unit = block * kWarps + threadIdx.x / 32;
  const auto half = static_cast<std::int32_t>(unit / heads % kHalves);
  return {static_cast<std::int32_t>(unit / heads / kHalves), half, static_cast<std::int32_t>(unit % heads)};
}

__device__ QueryPlace place_of(const PrepareArguments& a, const Unit& unit) {
  const Sizes& sizes = a.sizes.forward;
  QueryPlace place;
  if (unit.slot >= sizes.item_slots() || a.saved.costs[unit.slot] == 0) return place;
  const Item item = a.saved.items[unit.slot];
  place.queries = min(item.queries - unit.half * kQueryTile, kQueryTile);
  if (place.queries <= 0) return {};
  place.row = item.query_row + unit.half * kQueryTile;
  place.document = item.document;
  const std::int32_t begin = a.offsets.q[item.document];
  const std::int32_t end = a.offsets.q[item.document + 1];
  place.column = first_column(a.offsets.q, item.document) + place.row - begin;
  place.columns = kQueryTile;
  if (place.row + kQueryTile >= end) {
    place.columns = columns_to_fill({a.offsets.q, sizes.documents, sizes.tokens_q}, end, place.column, kQueryTile);
  }
  place.slot = begin / kQueryTile + item.document + (place.row - begin) / kQueryTile;
  return place;
}

/// Rows of codes, of which `dims` are to be transposed. `to`: of the tile's first column.
struct CodeRows {
  const std::uint8_t* codes;
  std::int32_t rows;
  std::uint8_t* to;
  std::int64_t columns;  ///< Of all tiles.
  std::int32_t own;      ///< Columns to fill.
};

/// Dims that the codes do not have become zeros.
__device__ void transpose_rows(const PrepareArguments& a, const CodeRows& of, std::byte* shared) {
  const std::int32_t key_dims = a.sizes.forward.key_dims;
#pragma unroll 1
  for (std::int32_t dim = 0; dim < a.sizes.dims; dim += Square::kSide) {
    const Square square{of.codes + dim, key_dims, dim < key_dims ? of.rows : 0, of.to + dim * of.columns, of.columns,
                        Square::kSide,  of.own};
    SquareTransposer(square, shared).run();
  }
}

__device__ void transpose_queries(const PrepareArguments& a, const Unit& unit, std::byte* shared) {
  const QueryPlace place = place_of(a, unit);
  if (place.queries <= 0) return;
  const std::int64_t columns = a.sizes.query_columns();
  const std::int64_t row = unit.head * a.sizes.forward.rows_q() + place.row;
  transpose_rows(
      a,
      {a.saved.query_codes + row * a.sizes.forward.key_dims, place.queries,
       a.workspace.query_columns + unit.head * a.sizes.dims * columns + place.column, columns, place.columns},
      shared);
}

__device__ void transpose_keys(const PrepareArguments& a, const Unit& unit, const KeyTile& tile, std::byte* shared) {
  const std::int32_t first = unit.half * kQueryTile;
  const std::int64_t columns = a.sizes.forward.columns();
  const std::int64_t row = unit.head * a.sizes.forward.rows_k() + tile.row + first;
  transpose_rows(a,
                 {a.saved.key_codes + row * a.sizes.forward.key_dims, tile.keys - first,
                  a.workspace.key_columns + unit.head * a.sizes.dims * columns + tile.column + first, columns,
                  tile.columns - first},
                 shared);
}

/// Back to rows; what the forward has beyond value_dim is nobody's.
__device__ void transpose_values(const PrepareArguments& a, const Unit& unit, const KeyTile& tile, std::byte* shared) {
  const Sizes& sizes = a.sizes.forward;
  const std::int32_t first = unit.half * kQueryTile;
  const std::int64_t pitch = sizes.columns();
  const std::uint8_t* codes = a.saved.value_codes + unit.head * sizes.value_rows() * pitch + tile.column + first;
  std::uint8_t* to = a.workspace.value_rows + (unit.head * sizes.rows_k() + tile.row + first) * a.sizes.dims;
#pragma unroll 1
  for (std::int32_t dim = 0; dim < a.sizes.dims; dim += Square::kSide) {
    const std::int64_t line = dim + dim / sizes.value_dims;  // A row of multipliers ends each part.
    const Square square{codes + line * pitch, pitch,        sizes.value_dim - dim, to + dim, a.sizes.dims,
                        tile.keys - first,    Square::kSide};
    SquareTransposer(square, shared).run();
  }
}

struct Place {
  Kind kind;
  std::int64_t block;  ///< Among those of its kind.
};

/// The kinds of a side alternate: those that transpose alone hide the others' instructions.
__device__ Place place_of_block(const Sizes& sizes) {
  const std::int64_t queries = 2 * blocks_of(sizes.item_slots(), sizes.heads);
  const std::int64_t block = blockIdx.x;
  if (block < queries) return {block % 2 == 0 ? Kind::dout : Kind::queries, block / 2};
  return {(block - queries) % 2 == 0 ? Kind::keys : Kind::values, (block - queries) / 2};
}

template <class Shape, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) prepare_kernel(const __grid_constant__ PrepareArguments a) {
  extern __shared__ uint4 memory[];
  if (a.saved.control->status != 0) return;
  std::byte* shared = reinterpret_cast<std::byte*>(memory) + threadIdx.x / 32 * DoutTile<Shape>::kShared;
  const Sizes& sizes = a.sizes.forward;
  const Place at = place_of_block(sizes);
  if (at.kind == Kind::dout || at.kind == Kind::queries) {
    const Unit unit = unit_of(at.block, sizes.heads);
    if (at.kind == Kind::queries) {
      transpose_queries(a, unit, shared);
    } else if (const QueryPlace place = place_of(a, unit); place.queries > 0) {
      DoutTile<Shape>(a, place, unit.head, shared).run();
    }
    return;
  }
  const Unit unit = unit_of(at.block, sizes.kv_heads);
  if (unit.slot >= sizes.tile_slots()) return;
  const KeyTile tile = a.saved.tiles[unit.slot];
  if (tile.keys == 0) return;
  if (at.kind == Kind::keys) {
    transpose_keys(a, unit, tile, shared);
  } else {
    transpose_values(a, unit, tile, shared);
  }
}

/// Blocks of an SM: as many as shared memory has room for and registers allow without spilling.
template <class Shape>
cudaError_t launch(const PrepareArguments& a, cudaStream_t stream) {
  constexpr int kShared = kWarps * DoutTile<Shape>::kShared;
  constexpr int kRoom = 227 * 1024;
  constexpr int kRegisters = Shape::kDims > 128 ? 2 : Shape::kDims > 64 && Shape::kBytes == 2 ? 4 : 3;
  auto* kernel = prepare_kernel<Shape, std::min(kRoom / (kShared + 1024), kRegisters)>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  const Sizes& sizes = a.sizes.forward;
  const std::int64_t blocks =
      2 * (blocks_of(sizes.item_slots(), sizes.heads) + blocks_of(sizes.tile_slots(), sizes.kv_heads));
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
