// Backward, E4M3 with an exponent a token. A block is persistent: one thread takes key tiles and fetches, two add dQ
// up, two warpgroups of consumers have 64 keys each and meet their queries, 64 at a time. All five products are of
// codes: S^T = K Q^T and dP^T = V dO^T, whose accumulators become, as codes, operands of dV = P^T dO and dK = dS^T Q
// without leaving their thread; for dQ = dS K, dS goes through shared memory, where all keys of the tile meet.
#include <algorithm>

#include "cuda/backward.cuh"
#include "cuda/tensor_map.hpp"

namespace mxflash::cuda {
namespace {

template <class Traits>
__global__ void __launch_bounds__(kBackwardThreads, 1) backward_kernel(const __grid_constant__ BackwardParameters p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(memory);
  if (p.a.workspace.control->status != 0) return;
  if (threadIdx.x == 0) shared.initialize();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) KeyProducer<Traits>(p, shared).run();
    if (threadIdx.x == 32 || threadIdx.x == 64) QueryAdder<Traits>(p, shared, threadIdx.x / 32 - 1).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    KeyConsumer<Traits>(p, shared).run();
  }
}

CUtensorMapSwizzle swizzle_of(std::uint32_t row_bytes) {
  return row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

/// A table of codes by rows of tokens.
struct RowTable {
  void* base;
  std::int32_t dims;
  std::int64_t rows;
};

/// Rows in the order of BackwardShared::Queries: b (whose coordinate is the first row), u, c, a.
int encode_queries(const RowTable& table, std::uint32_t row_bytes, CUtensorMap& map) {
  Box box;
  box.base = table.base;
  box.swizzle = swizzle_of(row_bytes);
  box.rank = 5;
  const auto dims = static_cast<std::uint64_t>(table.dims);
  box.size = {dims, static_cast<std::uint64_t>(table.rows) + 1, 4, 2, kQueryTile / 16};
  box.stride = {dims, 4 * dims, 2 * dims, 16 * dims};
  box.box = {row_bytes, 2, 4, 2, kQueryTile / 16};
  return encode(map, box);
}

/// Rows in the order of BackwardShared::Keys: g, c (whose coordinate is the first row), a.
int encode_keys(const RowTable& table, std::uint32_t row_bytes, CUtensorMap& map) {
  Box box;
  box.base = table.base;
  box.swizzle = swizzle_of(row_bytes);
  box.rank = 4;
  const auto dims = static_cast<std::uint64_t>(table.dims);
  box.size = {dims, 8, static_cast<std::uint64_t>(table.rows) + 1, kTileRows / 16};
  box.stride = {2 * dims, dims, 16 * dims};
  box.box = {row_bytes, 8, 2, kTileRows / 16};
  return encode(map, box);
}

/// A table of codes by dims.
struct ColumnTable {
  void* base;
  std::int32_t dims;
  std::int64_t columns;
  std::int32_t heads;
};

int encode_columns(const ColumnTable& table, std::uint32_t tokens, std::uint32_t dims, CUtensorMap& map) {
  Box box;
  box.base = table.base;
  box.swizzle = swizzle_of(tokens);
  box.rank = 3;
  const auto columns = static_cast<std::uint64_t>(table.columns);
  const auto rows = static_cast<std::uint64_t>(table.dims);
  box.size = {columns, rows, static_cast<std::uint64_t>(table.heads)};
  box.stride = {columns, columns * rows};
  box.box = {tokens, dims, 1};
  return encode(map, box);
}

template <class Traits>
int encode_maps(BackwardParameters& p) {
  const BackwardArguments& a = p.a;
  const Sizes& sizes = a.sizes.forward;
  const BackwardWorkspace& work = a.workspace;
  const std::int64_t rows_q = sizes.rows_q() * sizes.heads;
  const std::int64_t rows_k = sizes.rows_k() * sizes.kv_heads;
  const std::int64_t columns_q = a.sizes.query_columns();
  constexpr auto kRowBytes = static_cast<std::uint32_t>(Traits::kRowBytes);
  constexpr auto kOut = static_cast<std::uint32_t>(Traits::kOut);
  const int errors[] = {
      encode_queries({a.saved.query_codes, sizes.key_dims, rows_q}, kRowBytes, p.query_map),
      encode_queries({work.dout_codes, a.sizes.dims, rows_q}, kRowBytes, p.dout_map),
      encode_keys({a.saved.key_codes, sizes.key_dims, rows_k}, kRowBytes, p.key_map),
      encode_keys({work.value_rows, a.sizes.dims, rows_k}, kRowBytes, p.value_map),
      encode_columns({work.query_columns, a.sizes.dims, columns_q, sizes.heads}, kQueryTile, kOut, p.query_columns_map),
      encode_columns({work.dout_columns, a.sizes.dims, columns_q, sizes.heads}, kQueryTile, kOut, p.dout_columns_map),
      encode_columns({work.key_columns, a.sizes.dims, sizes.columns(), sizes.kv_heads}, kTileRows, kOut,
                     p.key_columns_map),
  };
  for (const int error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Traits>
int launch(const BackwardArguments& arguments, cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(BackwardShared<Traits>);
  static_assert(kShared <= kMostShared);
  BackwardParameters p{arguments, {}, {}, {}, {}, {}, {}, {}};
  if (const int error = encode_maps<Traits>(p); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaFuncSetAttribute(backward_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  const Sizes& sizes = arguments.sizes.forward;
  const std::int64_t work = sizes.tile_slots() * sizes.kv_heads * arguments.sizes.parts;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(arguments.blocks, work));
  if (blocks == 0) return cudaSuccess;
  backward_kernel<Traits><<<blocks, kBackwardThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

template <class Sums>
int launch_dims(const BackwardArguments& arguments, cudaStream_t stream) {
  switch (arguments.sizes.dims) {
    case 64: return launch<BackwardTraits64<Sums>>(arguments, stream);
    case 128: return launch<BackwardTraits128<Sums>>(arguments, stream);
    default: return launch<BackwardTraits256<Sums>>(arguments, stream);
  }
}

}  // namespace

int launch_backward(const BackwardArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  return arguments.sizes.has_prescale() ? launch_dims<HalfSums>(arguments, on) : launch_dims<FloatSums>(arguments, on);
}

}  // namespace mxflash::cuda
