// E4M3 codes with one exponent a token, from one reading of q, k and v: of v transposed, since the tensor cores take
// FP8 along the contraction only. A block takes a work item's queries, or a tile's keys and values, of one head. Four
// lanes own a row; lane l holds its chunks l, l + 4, ... of eight dims.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 4;  // Of a row.
constexpr int kChunk = 8;  // Dims that lie together.
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr int kPasses = kTileRows / kRowsAtOnce;
constexpr int kTransposedStride = kTileRows + 4;  // Bytes; keeps the four lanes of a row in different banks.

/// Rows [first, first + count) of one head of a tensor.
struct Rows {
  const Source* source;
  std::int32_t dims;
  std::int32_t head;
  std::int32_t first;
  std::int32_t count;
};

__device__ float widen(const void* data, std::int64_t index, DType dtype) {
  switch (dtype) {
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::f16: return __half2float(static_cast<const __half*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

/// Two BF16, or two FP16.
struct FromBf16 {
  static __device__ void widen(std::uint32_t bits, float* out) {
    out[0] = __uint_as_float(bits << 16);
    out[1] = __uint_as_float(bits & 0xFFFF0000U);
  }
};
struct FromF16 {
  static __device__ void widen(std::uint32_t bits, float* out) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    out[0] = both.x;
    out[1] = both.y;
  }
};

/// scale_exponent of E4M3 by the rule `ceil`, clamped, without its loop over subnormal numbers.
__device__ int exponent_of(float most) {
  const std::uint32_t bits = __float_as_uint(most);
  constexpr std::uint32_t kMaxFraction = 0x600000U;  // Of 448 = 1.75 2^8.
  if (bits >= 0x800000U) {
    const int exponent = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFFU) > kMaxFraction ? 1 : 0);
    return max(exponent, -kE8m0Bias);
  }
  return max(scale_exponent(Format::e4m3, ScaleRule::ceil, most), -kE8m0Bias);
}

/// The larger magnitude, of some sign; a NaN stays one.
__device__ float larger(float a, float b) {
  float out = 0;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

/// What a lane has read of a row, before it is widened; of FP32, or of rows that are not aligned, nothing.
template <std::size_t kChunks>
struct Raw {
  uint4 bits[kChunks];
};

__device__ bool packed(const Source& source) { return source.vectors && source.dtype != DType::f32; }

/// All reads are under way before the first is used.
template <std::size_t kChunks>
__device__ void read(const Rows& rows, std::int32_t r, int lane, Raw<kChunks>& raw) {
  if (!packed(*rows.source)) return;
  const auto* data = static_cast<const std::uint16_t*>(rows.source->data) +
                     (std::int64_t{rows.first} + r) * rows.source->token_stride + rows.head * rows.source->head_stride;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int dim = (c * kLanes + lane) * kChunk;
    raw.bits[c] = dim < rows.dims && r < rows.count ? __ldg(reinterpret_cast<const uint4*>(data + dim)) : uint4{};
  }
}

/// A lane's part of a row: kChunks chunks of eight dims.
template <std::size_t kChunks>
struct Row {
  float x[kChunks][kChunk];
  bool poisoned;
  int exponent;
  float factor;   // 2^exponent
  float inverse;  // 2^-exponent
  float norm;     // At least that of the row as rounded.

  template <class From>
  __device__ void widen_chunks(const Raw<kChunks>& raw) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const std::uint32_t words[] = {raw.bits[c].x, raw.bits[c].y, raw.bits[c].z, raw.bits[c].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) From::widen(words[w], x[c] + 2 * w);
    }
  }

  /// Zeros beyond the rows.
  __device__ void widen_all(const Rows& rows, std::int32_t r, int lane, const Raw<kChunks>& raw) {
    const Source& source = *rows.source;
    if (packed(source)) {
      if (source.dtype == DType::bf16) {
        widen_chunks<FromBf16>(raw);
      } else {
        widen_chunks<FromF16>(raw);
      }
      return;
    }
    const std::int64_t base = (std::int64_t{rows.first} + r) * source.token_stride + rows.head * source.head_stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      // One index that moves: an address an element would be more than the registers that three blocks leave.
      std::int64_t index = base + dim * source.dim_stride;
#pragma unroll
      for (int d = 0; d < kChunk; ++d) {
        const bool inside = dim < rows.dims && r < rows.count;
        x[c][d] = inside ? widen(source.data, index, source.dtype) : 0.0F;
        index += source.dim_stride;
      }
    }
  }

  /// The contract's order: the power of two, then distances 1, 2, 4 (within a chunk), 8 and 16 (between lanes), 32 and
  /// up.
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
      const float sign = (lane & half) == 0 ? 1.0F : -1.0F;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) {
          // The sum, or in the upper lane the difference: a product with 1 or -1 is exact.
          x[c][d] = fmaf(x[c][d], sign, __shfl_xor_sync(0xFFFFFFFFU, x[c][d], half));
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
    float largest[kLanes] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int d = 0; d < kChunk; ++d) largest[d % kLanes] = larger(largest[d % kLanes], x[c][d]);
    }
    float most = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
    for (int half = 1; half < kLanes; half *= 2) most = larger(most, __shfl_xor_sync(0xFFFFFFFFU, most, half));
    most = fabsf(most);
    poisoned = !(most < INFINITY);
    exponent = -kE8m0Bias;
    if (!poisoned && most != 0.0F) {
      exponent = exponent_of(most);
    }
    factor = detail::pow2(exponent);
    inverse = detail::pow2(-exponent);
  }

  /// Rounding to E4M3 adds a sixteenth at most, or half a subnormal step.
  __device__ void measure(std::int32_t dims) {
    float sums[kLanes] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int d = 0; d < kChunk; ++d) {
        const float scaled = x[c][d] * inverse;  // The square of x itself may leave FP32.
        sums[d % kLanes] = fmaf(scaled, scaled, sums[d % kLanes]);
      }
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int half = 1; half < kLanes; half *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, half);
    norm = poisoned ? 0.0F : (sqrtf(sum) * 1.07F + static_cast<float>(dims) / 1024.0F) * factor;
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

/// Codes of q or k, rows of `key_dims` bytes from `codes` on; `keep(r, row)` takes each row's scale.
template <std::size_t kChunks, class Keep>
__device__ void quantize_rows(const QuantizeArguments& a, const Rows& rows, std::uint8_t* codes, Keep keep) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first = static_cast<int>(threadIdx.x) / kLanes;
  Raw<kChunks> raw[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) read(rows, first + pass * kRowsAtOnce, lane, raw[pass]);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = first + pass * kRowsAtOnce;
    Row<kChunks> row;
    row.widen_all(rows, r, lane, raw[pass]);
    if (a.rotation_shift >= 0) row.rotate(a.rotation_shift, rows.dims, lane);
    row.scale();
    row.measure(rows.dims);
    if (r >= rows.count) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      if (dim < a.sizes.key_dims) {
        *reinterpret_cast<uint2*>(codes + std::int64_t{r} * a.sizes.key_dims + dim) = row.codes(c);
      }
    }
    if (lane == 0) keep(r, row);
  }
}

/// 2^(reference - exponent) in E4M3, or 0 where that is no E4M3 number: such a key is counted apart.
__device__ std::uint8_t sum_multiplier(float reference, int exponent) {
  const int power = static_cast<int>(reference) - exponent;
  if (exponent == -kE8m0Bias || power < -9 || power > 8) return 0;
  return static_cast<std::uint8_t>(power >= -6 ? (power + 7) << 3 : 1 << (power + 9));
}

/// The unit of a document's row sums: its first key's exponent, which every query that sees a later key may know.
template <std::size_t kChunks>
__device__ float sum_reference(const Rows& rows, int lane) {
  Raw<kChunks> raw;
  Row<kChunks> row;
  read(rows, 0, lane, raw);
  row.widen_all(rows, 0, lane, raw);
  row.scale();
  return row.exponent <= -kE8m0Bias ? kUsualExponent : static_cast<float>(row.exponent);
}

/// Codes of v into shared memory, transposed: rows of tokens, and below them the multipliers of the row sum.
template <std::size_t kChunks>
__device__ void transpose_values(const Rows& rows, float reference, std::uint8_t* transposed, float* exponents) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first = static_cast<int>(threadIdx.x) / kLanes;
  Raw<kChunks> raw[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) read(rows, first + pass * kRowsAtOnce, lane, raw[pass]);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int r = first + pass * kRowsAtOnce;
    Row<kChunks> row;
    row.widen_all(rows, r, lane, raw[pass]);
    row.scale();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + lane) * kChunk;
      if (dim >= rows.dims) continue;
      const uint2 codes = row.codes(c);
#pragma unroll
      for (int d = 0; d < kChunk; ++d) {
        const std::uint32_t word = d < 4 ? codes.x : codes.y;
        transposed[(dim + d) * kTransposedStride + r] = static_cast<std::uint8_t>(word >> (d % 4 * 8));
      }
    }
    if (lane != 0) continue;
    exponents[r] = row.poisoned ? kPoisonedValue : static_cast<float>(row.exponent);
    transposed[rows.dims * kTransposedStride + r] = r < rows.count ? sum_multiplier(reference, row.exponent) : 0;
  }
}

/// Each part's dims are followed by the multipliers, which are the same for all.
__device__ void store_values(const QuantizeArguments& a, const KeyTile& tile, std::int32_t head,
                             const std::uint8_t* transposed) {
  const Sizes& sizes = a.sizes;
  std::uint8_t* out = a.workspace.value_codes + head * sizes.value_rows() * sizes.columns() + tile.column;
  constexpr int kWords = kTileRows / 4;
  for (int i = static_cast<int>(threadIdx.x); i < (sizes.value_dim + sizes.value_parts) * kWords; i += kThreads) {
    const int dim = i / kWords;
    const int column = i % kWords * 4;
    if (column >= tile.columns) continue;
    const bool multipliers = dim >= sizes.value_dim;
    const int part = multipliers ? dim - sizes.value_dim : (dim >= sizes.value_dims ? 1 : 0);  // Two at most.
    const int row = multipliers ? part * (sizes.value_dims + 1) + sizes.value_dims : dim + part;
    *reinterpret_cast<std::uint32_t*>(out + row * sizes.columns() + column) =
        *reinterpret_cast<const std::uint32_t*>(transposed + min(dim, sizes.value_dim) * kTransposedStride + column);
  }
}

/// The first warp: what the tile's keys have in common.
__device__ Range range_of(const float* norms, const float* exponents, std::int32_t keys) {
  Range range{INFINITY, -INFINITY, 0, 0};
  for (std::int32_t r = static_cast<std::int32_t>(threadIdx.x); r < keys; r += warpSize) {
    range.least = fminf(range.least, exponents[r]);
    range.most = fmaxf(range.most, exponents[r]);
    range.key_norm = fmaxf(range.key_norm, norms[r]);
  }
  for (int half = 1; half < warpSize; half *= 2) {
    range.least = fminf(range.least, __shfl_xor_sync(0xFFFFFFFFU, range.least, half));
    range.most = fmaxf(range.most, __shfl_xor_sync(0xFFFFFFFFU, range.most, half));
    range.key_norm = fmaxf(range.key_norm, __shfl_xor_sync(0xFFFFFFFFU, range.key_norm, half));
  }
  return range;
}

template <std::size_t kChunks>
__device__ void quantize_queries(const QuantizeArguments& a, std::int32_t slot, std::int32_t head) {
  if (a.workspace.costs[slot] == 0) return;
  const Item& item = a.workspace.items[slot];
  const Rows rows{&a.q, a.sizes.head_dim, head, item.query_row, item.queries};
  const std::int64_t place = head * a.sizes.rows_q() + item.query_row;
  quantize_rows<kChunks>(a, rows, a.workspace.query_codes + place * a.sizes.key_dims,
                         [&](int r, const Row<kChunks>& row) {
                           a.workspace.query_scale[place + r] = {row.poisoned ? NAN : row.factor, row.norm};
                         });
}

template <std::size_t kChunks>
__device__ void quantize_keys_and_values(const QuantizeArguments& a, std::int32_t slot, std::int32_t head,
                                         std::uint8_t* transposed) {
  __shared__ float factors[kTileRows];
  __shared__ float exponents[kTileRows];
  __shared__ float norms[kTileRows];
  const KeyTile tile = a.workspace.tiles[slot];
  if (tile.keys == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const Rows values{&a.v, a.sizes.value_dim, head, tile.row, tile.keys};
  const float reference = sum_reference<kChunks>({&a.v, a.sizes.value_dim, head, tile.first_row, 1}, lane);
  transpose_values<kChunks>(values, reference, transposed, exponents);
  const std::int64_t row = head * a.sizes.rows_k() + tile.row;
  quantize_rows<kChunks>(a, {&a.k, a.sizes.head_dim, head, tile.row, tile.keys},
                         a.workspace.key_codes + row * a.sizes.key_dims, [&](int r, const Row<kChunks>& key) {
                           factors[r] = key.poisoned ? NAN : key.factor;
                           norms[r] = key.norm;
                         });
  __syncthreads();
  store_values(a, tile, head, transposed);
  KeyScale* scales = a.workspace.key_scale + head * a.sizes.columns() + tile.column;
  for (auto r = static_cast<std::int32_t>(threadIdx.x); r < tile.keys; r += kThreads)
    scales[r] = {factors[r], exponents[r]};
  if (threadIdx.x >= warpSize) return;
  const Range range = range_of(norms, exponents, tile.keys);
  if (threadIdx.x == 0) a.workspace.ranges[head * a.sizes.tile_slots() + slot] = range;
}

/// The blocks of q, then those of k and v.
template <std::size_t kChunks>
__global__ void __launch_bounds__(kThreads, kChunks > 4 ? 1 : 3)
    quantize_kernel(const __grid_constant__ QuantizeArguments a) {
  extern __shared__ std::uint32_t shared[];
  if (a.workspace.control->status != 0) return;
  const std::int64_t query_blocks = a.sizes.item_slots() * a.sizes.heads;
  const std::int64_t index = blockIdx.x;
  if (index < query_blocks) {
    quantize_queries<kChunks>(a, static_cast<std::int32_t>(index / a.sizes.heads),
                              static_cast<std::int32_t>(index % a.sizes.heads));
    return;
  }
  const std::int64_t rest = index - query_blocks;
  quantize_keys_and_values<kChunks>(a, static_cast<std::int32_t>(rest / a.sizes.kv_heads),
                                    static_cast<std::int32_t>(rest % a.sizes.kv_heads),
                                    reinterpret_cast<std::uint8_t*>(shared));
}

template <std::size_t kChunks>
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
  const std::int64_t blocks = sizes.item_slots() * sizes.heads + sizes.tile_slots() * sizes.kv_heads;
  const std::int32_t dims = std::max(sizes.key_dims, sizes.value_dim);
  if (dims <= 64) return launch<2>(arguments, blocks, on);
  if (dims <= 128) return launch<4>(arguments, blocks, on);
  return launch<8>(arguments, blocks, on);
}

}  // namespace mxflash::cuda
