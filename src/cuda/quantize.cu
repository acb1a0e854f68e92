// E4M3 codes with one exponent a token, from one reading of q, k and v: of v transposed, since the tensor cores take FP8
// along the contraction only. Four lanes own a row; lane l holds its chunks l, l + 4, ... of eight dims.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/documents.cuh"
#include "cuda/kernels.hpp"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 4;  // Of a row.
constexpr int kChunk = 8;  // Dims that lie together.
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr int kTransposedStride = kTileRows + 4;  // Bytes; keeps the four lanes of a row in different banks.

enum class Role : std::uint8_t { query, key, value };

/// One tensor's part of the launch: a block takes 128 tokens of one head.
struct Part {
  Role role;
  const Source* source;
  std::int32_t tokens;
  std::int32_t heads;
  std::int32_t dims;
};

__device__ float widen(const void* data, std::int64_t index, DType dtype) {
  switch (dtype) {
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::f16: return __half2float(static_cast<const __half*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

__device__ void widen_pair(std::uint32_t bits, DType dtype, float* out) {
  if (dtype == DType::bf16) {
    out[0] = __uint_as_float(bits << 16);
    out[1] = __uint_as_float(bits & 0xFFFF0000U);
  } else {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    out[0] = both.x;
    out[1] = both.y;
  }
}

__device__ void load_chunk(const Source& source, std::int64_t place, float* out) {
  if (!source.vectors) {
    for (int d = 0; d < kChunk; ++d) out[d] = widen(source.data, place + d * source.dim_stride, source.dtype);
    return;
  }
  if (source.dtype == DType::f32) {
    const auto* data = reinterpret_cast<const float4*>(static_cast<const float*>(source.data) + place);
    const float4 low = __ldg(data);
    const float4 high = __ldg(data + 1);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    return;
  }
  const uint4 bits = __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(source.data) + place));
  widen_pair(bits.x, source.dtype, out);
  widen_pair(bits.y, source.dtype, out + 2);
  widen_pair(bits.z, source.dtype, out + 4);
  widen_pair(bits.w, source.dtype, out + 6);
}

/// A lane's part of a row: kChunks chunks of eight dims.
template <int kChunks>
struct Row {
  float x[kChunks][kChunk];
  bool poisoned;
  float factor;     // 2^exponent
  float inverse;    // 2^-exponent
  int exponent;

  __device__ void load(const Part& part, std::int64_t token, std::int32_t head, int lane) {
    const std::int64_t base = token * part.source->token_stride + head * part.source->head_stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      if (dim < part.dims) {
        load_chunk(*part.source, base + dim * part.source->dim_stride, x[c]);
      } else {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) x[c][d] = 0.0F;
      }
    }
  }

  /// The contract's order: the power of two, then distances 1, 2, 4 (within a chunk), 8 and 16 (between lanes), 32 and up.
  __device__ void rotate(std::int32_t shift, std::int32_t dims, int lane) {
    const float factor_first = __int_as_float((127 - shift) << 23);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int d = 0; d < kChunk; ++d) x[c][d] *= factor_first;
#pragma unroll
      for (int half = 1; half < kChunk; half *= 2) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) {
          if ((d & half) != 0) continue;
          const float low = x[c][d];
          const float high = x[c][d + half];
          x[c][d] = low + high;
          x[c][d + half] = low - high;
        }
      }
    }
#pragma unroll
    for (int half = 1; half < kLanes; half *= 2) {
      if (half * kChunk >= dims) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) {
          const float other = __shfl_xor_sync(0xFFFFFFFFU, x[c][d], half);
          x[c][d] = (lane & half) == 0 ? x[c][d] + other : other - x[c][d];
        }
      }
    }
#pragma unroll
    for (int half = 1; half < kChunks; half *= 2) {
      if (half * kChunk * kLanes >= dims) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if ((c & half) != 0 || c + half >= kChunks) continue;
#pragma unroll
        for (int d = 0; d < kChunk; ++d) {
          const float low = x[c][d];
          const float high = x[c + half][d];
          x[c][d] = low + high;
          x[c + half][d] = low - high;
        }
      }
    }
  }

  /// Exponent of the row's maximum by the rule `ceil`; a row with a NaN or Inf has codes 0.
  __device__ void scale() {
    std::uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int d = 0; d < kChunk; ++d) most = max(most, __float_as_uint(x[c][d]) & detail::kAbsMask);
    }
    for (int half = 1; half < kLanes; half *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFU, most, half));
    poisoned = most >= detail::kInfBits;
    exponent = -kE8m0Bias;
    if (!poisoned && most != 0) {
      exponent = scale_exponent(Format::e4m3, ScaleRule::ceil, __uint_as_float(most));
      exponent = min(max(exponent, -kE8m0Bias), kE8m0Bias);
    }
    factor = detail::pow2(exponent);
    inverse = detail::pow2(-exponent);
  }

  /// Eight codes, lowest dim in the lowest byte.
  __device__ uint2 codes(int c) const {
    std::uint32_t words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      std::uint32_t pairs[2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float2 both = {x[c][4 * w + 2 * p] * inverse, x[c][4 * w + 2 * p + 1] * inverse};
        pairs[p] = __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
      }
      words[w] = poisoned ? 0U : pairs[0] | (pairs[1] << 16);
    }
    return {words[0], words[1]};
  }
};

/// Codes of q or k: rows of `dims` bytes.
template <int kChunks>
__device__ void quantize_rows(const QuantizeArguments& a, const Part& part, std::int32_t tile, std::int32_t head) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool query = part.role == Role::query;
  const std::int64_t rows = query ? a.sizes.rows_q() : a.sizes.rows_k();
  std::uint8_t* codes = query ? a.workspace.query_codes : a.workspace.key_codes;
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kTileRows; r += kRowsAtOnce) {
    const std::int64_t token = std::int64_t{tile} * kTileRows + r;
    const bool inside = token < part.tokens;
    Row<kChunks> row;
    row.load(part, inside ? token : 0, head, lane);
    if (a.rotation_shift >= 0) row.rotate(a.rotation_shift, part.dims, lane);
    row.scale();
    if (!inside) continue;
    const std::int64_t place = head * rows + token;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      if (dim < a.sizes.key_dims) *reinterpret_cast<uint2*>(codes + place * a.sizes.key_dims + dim) = row.codes(c);
    }
    if (lane != 0) continue;
    const float factor = row.poisoned ? detail::float_of(detail::kNanBits) : row.factor;
    if (query) {
      a.workspace.query_factor[place] = factor;
    } else {
      a.workspace.key_scale[place].factor = factor;
    }
  }
}

/// 2^(reference - exponent) in E4M3, or 0 where that is no E4M3 number: such a key is counted apart.
__device__ std::uint8_t sum_multiplier(float reference, int exponent) {
  const int power = static_cast<int>(reference) - exponent;
  if (exponent == -kE8m0Bias || power < -9 || power > 8) return 0;
  return static_cast<std::uint8_t>(power >= -6 ? (power + 7) << 3 : 1 << (power + 9));
}

__device__ float reference_of(float first_exponent) {
  return first_exponent <= static_cast<float>(-kE8m0Bias) ? kUsualExponent : first_exponent;
}

/// Codes of v, transposed: rows of tokens. Each document's row sum counts in units of its first key's exponent, which
/// every query that sees a later key may know.
template <int kChunks>
__device__ void quantize_values(const QuantizeArguments& a, const Part& part, std::int32_t tile, std::int32_t head,
                                std::uint8_t* transposed) {
  __shared__ std::int32_t first[kTileRows];
  __shared__ float references[kTileRows];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t begin = std::int64_t{tile} * kTileRows;
  if (threadIdx.x < kTileRows && begin + threadIdx.x < part.tokens) {
    const auto token = static_cast<std::int32_t>(begin + threadIdx.x);
    first[threadIdx.x] = a.offsets.k[document_of_token(a.offsets.k, a.sizes.documents, token)];
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kTileRows; r += kRowsAtOnce) {
    const bool leads = begin + r < part.tokens && (r == 0 || first[r] == begin + r);
    if (__ballot_sync(0xFFFFFFFFU, leads) == 0) continue;
    Row<kChunks> row;
    row.load(part, leads ? first[r] : 0, head, lane);
    row.scale();
    if (leads && lane == 0) references[r] = reference_of(static_cast<float>(row.exponent));
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kTileRows; r += kRowsAtOnce) {
    const std::int64_t token = begin + r;
    const bool inside = token < part.tokens;
    Row<kChunks> row;
    row.load(part, inside ? token : 0, head, lane);
    row.scale();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      if (dim >= part.dims) continue;
      const uint2 codes = inside ? row.codes(c) : uint2{0, 0};
#pragma unroll
      for (int d = 0; d < kChunk; ++d) {
        transposed[(dim + d) * kTransposedStride + r] = static_cast<std::uint8_t>((d < 4 ? codes.x : codes.y) >> (d % 4 * 8));
      }
    }
    if (lane != 0) continue;
    std::uint8_t multiplier = 0;
    if (inside) {
      const std::int64_t place = head * a.sizes.rows_k() + token;
      const float exponent = row.poisoned ? kPoisonedValue : static_cast<float>(row.exponent);
      a.workspace.key_scale[place].value_exponent = exponent;
      const std::int64_t leader = first[r] - begin;
      multiplier = sum_multiplier(references[leader > 0 ? leader : 0], row.exponent);
    }
    transposed[part.dims * kTransposedStride + r] = multiplier;
  }
  __syncthreads();
  std::uint8_t* out = a.workspace.value_codes + head * a.sizes.value_rows() * a.sizes.rows_k() + begin;
  constexpr int kWords = kTileRows / 4;
  for (int i = static_cast<int>(threadIdx.x); i < (part.dims + a.sizes.value_parts) * kWords; i += kThreads) {
    const int dim = i / kWords;
    const int word = i % kWords;
    // Each part's dims are followed by the multipliers, which are the same for all.
    const bool multipliers = dim >= part.dims;
    const int pass = multipliers ? dim - part.dims : dim / a.sizes.value_dims;
    const int row = pass * (a.sizes.value_dims + 1) + (multipliers ? a.sizes.value_dims : dim % a.sizes.value_dims);
    const std::uint8_t* from = transposed + min(dim, part.dims) * kTransposedStride + word * 4;
    *reinterpret_cast<std::uint32_t*>(out + row * a.sizes.rows_k() + word * 4) =
        *reinterpret_cast<const std::uint32_t*>(from);
  }
}

/// The blocks of q, then those of k, then those of v.
template <int kChunks>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ QuantizeArguments a) {
  extern __shared__ std::uint32_t shared[];
  if (a.workspace.control->status != 0) return;
  const Part q{Role::query, &a.q, a.sizes.tokens_q, a.sizes.heads, a.sizes.head_dim};
  const Part k{Role::key, &a.k, a.sizes.tokens_k, a.sizes.kv_heads, a.sizes.head_dim};
  const Part v{Role::value, &a.v, a.sizes.tokens_k, a.sizes.kv_heads, a.sizes.value_dim};
  const std::int64_t q_blocks = a.sizes.rows_q() / kTileRows * q.heads;
  const std::int64_t k_blocks = a.sizes.rows_k() / kTileRows * k.heads;
  std::int64_t index = blockIdx.x;
  if (index < q_blocks) {
    quantize_rows<kChunks>(a, q, static_cast<std::int32_t>(index / q.heads), static_cast<std::int32_t>(index % q.heads));
    return;
  }
  index -= q_blocks;
  if (index < k_blocks) {
    quantize_rows<kChunks>(a, k, static_cast<std::int32_t>(index / k.heads), static_cast<std::int32_t>(index % k.heads));
    return;
  }
  index -= k_blocks;
  quantize_values<kChunks>(a, v, static_cast<std::int32_t>(index / v.heads), static_cast<std::int32_t>(index % v.heads),
                           reinterpret_cast<std::uint8_t*>(shared));
}

/// A warp takes a tile of keys of one head.
__global__ void __launch_bounds__(kThreads) ranges_kernel(const __grid_constant__ QuantizeArguments a) {
  if (a.workspace.control->status != 0) return;
  const std::int64_t index = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / warpSize;
  const int lane = static_cast<int>(threadIdx.x) % warpSize;
  const std::int64_t slots = a.sizes.tile_slots();
  if (index >= slots * a.sizes.kv_heads) return;
  const auto slot = static_cast<std::int32_t>(index % slots);
  const std::int64_t head = index / slots;
  const std::int32_t document = document_of_slot(a.offsets.k, a.sizes.documents, slot);
  const std::int32_t begin = a.offsets.k[document] + (slot - first_slot(a.offsets.k, document)) * kTileRows;
  const std::int32_t end = min(begin + kTileRows, a.offsets.k[document + 1]);
  float least = INFINITY;
  float most = -INFINITY;
  float factor = 0;
  for (std::int32_t token = begin + lane; token < end; token += warpSize) {
    const KeyScale scale = a.workspace.key_scale[head * a.sizes.rows_k() + token];
    least = fminf(least, scale.value_exponent);
    most = fmaxf(most, scale.value_exponent);
    factor = fmaxf(factor, scale.factor);  // Ignores NaN.
  }
  for (int half = 1; half < warpSize; half *= 2) {
    least = fminf(least, __shfl_xor_sync(0xFFFFFFFFU, least, half));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, half));
    factor = fmaxf(factor, __shfl_xor_sync(0xFFFFFFFFU, factor, half));
  }
  if (lane == 0 && begin < end) a.workspace.ranges[index] = {least, most, factor, 0.0F};
}

template <int kChunks>
cudaError_t launch(const QuantizeArguments& a, std::int64_t blocks, cudaStream_t stream) {
  const int shared = (a.sizes.value_dim + 1) * kTransposedStride;
  if (const cudaError_t error =
          cudaFuncSetAttribute(quantize_kernel<kChunks>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      error != cudaSuccess) {
    return error;
  }
  quantize_kernel<kChunks><<<static_cast<unsigned>(blocks), kThreads, static_cast<unsigned>(shared), stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

int launch_quantize(const QuantizeArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const Sizes& sizes = arguments.sizes;
  const std::int64_t blocks =
      (sizes.rows_q() * sizes.heads + 2 * sizes.rows_k() * sizes.kv_heads) / kTileRows;
  const std::int32_t dims = sizes.key_dims > sizes.value_dim ? sizes.key_dims : sizes.value_dim;
  const cudaError_t error = dims <= 64    ? launch<2>(arguments, blocks, on)
                            : dims <= 128 ? launch<4>(arguments, blocks, on)
                                          : launch<8>(arguments, blocks, on);
  if (error != cudaSuccess) return error;
  const std::int64_t warps = sizes.tile_slots() * sizes.kv_heads;
  constexpr int kWarps = kThreads / 32;
  ranges_kernel<<<static_cast<unsigned>((warps + kWarps - 1) / kWarps), kThreads, 0, on>>>(arguments);
  return cudaGetLastError();
}

}  // namespace mxflash::cuda
