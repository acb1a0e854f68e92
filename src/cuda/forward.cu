// Forward, E4M3 with an exponent a token. A block is persistent: one warp takes work, one fetches, two warpgroups of
// consumers take 64 queries each. While one's weights go through the exponential, the other's products run; within one,
// the product of the weights with V runs beside the next exponentials.
//
// K's rows come in an order in which the scores of a thread are those that it must hold as operand of the next product:
// column 16 a + 8 c + 2 u + b of a score tile is key 16 a + 4 u + 2 c + b. V's last row holds the multipliers of the
// row sum, which so counts the codes and nothing else, in the same arithmetic as the values.
#include <algorithm>

#include "cuda/forward.cuh"
#include "cuda/tensor_map.hpp"

namespace mxflash::cuda {
namespace {

template <class Traits>
__global__ void __launch_bounds__(kForwardThreads, 1) forward_kernel(const __grid_constant__ ForwardParameters p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Traits>*>(memory);
  if (p.workspace.control->status != 0) {
    write_nan(p);
    return;
  }
  if (threadIdx.x == 0) shared.initialize();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x < 32) Fetcher<Traits>(p, shared).run();
    if (threadIdx.x / 32 == 1) Taker<Traits>(p, shared).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    Consumer<Traits>(p, shared).run();
  }
}

/// Rows of `dims` bytes.
int encode_queries(const Sizes& sizes, const Workspace& work, std::uint32_t row_bytes, CUtensorMap& map) {
  Box box;
  box.base = work.query_codes;
  box.swizzle = row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  box.rank = 3;
  const auto dims = static_cast<std::uint64_t>(sizes.key_dims);
  const auto rows = static_cast<std::uint64_t>(sizes.rows_q());
  box.size = {dims, rows, static_cast<std::uint64_t>(sizes.heads)};
  box.stride = {dims, dims * rows};
  box.box = {row_bytes, kTileRows, 1};
  return encode(map, box);
}

/// The permuted rows as dimensions: b (whose coordinate is the first row), u, c, a.
int encode_keys(const Sizes& sizes, const Workspace& work, std::uint32_t row_bytes, std::uint32_t keys,
                CUtensorMap& map) {
  Box box;
  box.base = work.key_codes;
  box.swizzle = row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  box.rank = 5;
  const auto dims = static_cast<std::uint64_t>(sizes.key_dims);
  const auto rows = static_cast<std::uint64_t>(sizes.rows_k()) * static_cast<std::uint64_t>(sizes.kv_heads);
  box.size = {dims, rows + 1, 4, 2, keys / 16};
  box.stride = {dims, 4 * dims, 2 * dims, 16 * dims};
  box.box = {row_bytes, 2, 4, 2, keys / 16};
  return encode(map, box);
}

int encode_values(const Sizes& sizes, const Workspace& work, std::uint32_t keys, CUtensorMap& map) {
  Box box;
  box.base = work.value_codes;
  box.swizzle = keys == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  box.rank = 3;
  const auto tokens = static_cast<std::uint64_t>(sizes.columns());
  const auto rows = static_cast<std::uint64_t>(sizes.value_dims) + 1;
  box.size = {tokens, rows, static_cast<std::uint64_t>(sizes.kv_heads) * static_cast<std::uint64_t>(sizes.value_parts)};
  box.stride = {tokens, tokens * rows};
  box.box = {keys, static_cast<std::uint32_t>(rows), 1};
  return encode(map, box);
}

int encode_scales(const Sizes& sizes, const Workspace& work, std::uint32_t keys, CUtensorMap& map) {
  Box box;
  box.base = work.key_scale;
  box.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  box.rank = 2;
  const auto floats = 2 * static_cast<std::uint64_t>(sizes.columns());
  box.size = {floats, static_cast<std::uint64_t>(sizes.kv_heads)};
  box.stride = {floats * sizeof(float)};
  box.box = {2 * keys, 1};
  return encode(map, box);
}

/// Of a warp's rows of o, 128 bytes of each. FP32 leaves another way.
int encode_outputs(const ForwardArguments& arguments, void* rows, CUtensorMap& map) {
  const Sizes& sizes = arguments.sizes;
  if (rows == nullptr || sizes.tokens_q == 0 || arguments.dtype == DType::f32) return cudaSuccess;
  Box box;
  box.base = rows;
  box.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  box.rank = 3;
  const auto bytes = 2 * static_cast<std::uint64_t>(sizes.value_dim);
  const auto heads = static_cast<std::uint64_t>(sizes.heads);
  box.size = {bytes, heads, static_cast<std::uint64_t>(sizes.tokens_q)};
  box.stride = {bytes, bytes * heads};
  box.box = {kOutputBytes, 1, kOutputRows};
  return encode(map, box);
}

template <class Traits>
int launch(const ForwardArguments& arguments, cudaStream_t stream) {
  static_assert(sizeof(ForwardShared<Traits>) <= kMostShared);
  ForwardParameters p{arguments.sizes,
                      arguments.band,
                      arguments.workspace,
                      arguments.logit_scale,
                      arguments.dtype,
                      arguments.o,
                      arguments.lse,
                      {},
                      {},
                      {},
                      {},
                      {},
                      {}};
  const int errors[] = {
      encode_queries(p.sizes, p.workspace, Traits::kRowBytes, p.query_map),
      encode_keys(p.sizes, p.workspace, Traits::kRowBytes, Traits::kKeys, p.key_map),
      encode_values(p.sizes, p.workspace, Traits::kKeys, p.value_map),
      encode_scales(p.sizes, p.workspace, Traits::kKeys, p.scale_map),
      encode_outputs(arguments, arguments.o, p.o_map),
      encode_outputs(arguments, arguments.workspace.residual, p.residual_map),
      cudaFuncSetAttribute(forward_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           sizeof(ForwardShared<Traits>)),
  };
  for (const int error : errors) {
    if (error != cudaSuccess) return error;
  }
  int device = 0;
  int processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  const std::int64_t work = p.sizes.item_slots() * p.sizes.heads * p.sizes.value_parts;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(processors, work));
  forward_kernel<Traits><<<blocks, kForwardThreads, sizeof(ForwardShared<Traits>), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int launch_forward(const ForwardArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (arguments.sizes.key_dims) {
    case 64: return launch<Traits64>(arguments, on);
    case 128: return launch<Traits128>(arguments, on);
    default: return launch<Traits256>(arguments, on);
  }
}

}  // namespace mxflash::cuda
