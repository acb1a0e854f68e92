// Token operands to BF16 numbers: the codes times the scales of the reference's quantizer, by the same codecs. A block
// takes 32 tokens of one document and head, all that any scale may span, through shared memory; a second level over 128
// tokens looks at the others first.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/embed.hpp"
#include "cuda/embed_codes.cuh"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 32;
constexpr int kChunk = 8;             // Dims that lie together.
constexpr int kPadding = 4;           // Floats between rows: other banks for the next.
constexpr int kMostScales = 2 * 256;  // Of 16 tokens, or 16 dims, of 256 dims.
constexpr int kQuarters = kTileRows / kRows;
/// Rows of q and k are stored so that their largest number is about 2^-12: sums over 256 dims then stay inside FP32
/// with either row's factor, wherever the logit does.
constexpr int kHeadroom = 12;
/// Height of a row of zeros, and of codes: E5M2's are the largest.
constexpr float kNoHeight = -200.0F;
constexpr float kHeightOfCodes = 16.0F;

/// Tokens of one document and head.
struct Tokens {
  std::int32_t row = 0;  ///< Of the pack.
  std::int32_t count = 0;
};

/// A slot's up to 128 tokens.
struct Slot {
  Tokens tokens;
  std::int32_t place = 0;     ///< Of the first in its document.
  std::int32_t document = 0;  ///< Of queries.

  [[nodiscard]] __device__ Tokens quarter(std::int32_t index) const {
    const std::int32_t first = index * kRows;
    return {tokens.row + first, min(max(tokens.count - first, 0), kRows)};
  }
};

struct Shared {
  std::uint32_t maxima[kMostScales];  // Bits of magnitudes, which order as the numbers do.
  BlockScale scales[kMostScales];
  std::uint32_t row_maxima[kRows];
  std::int32_t second[kRows];  // Exponents of the second level.
  std::uint8_t poisoned[kRows];
};

__device__ float widen(const Source& source, std::int64_t index) {
  switch (source.dtype) {
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(source.data)[index]);
    case DType::f16: return __half2float(static_cast<const __half*>(source.data)[index]);
    default: return static_cast<const float*>(source.data)[index];
  }
}

__device__ std::uint32_t magnitude(float x) { return __float_as_uint(x) & detail::kAbsMask; }

class TokenBlock {
 public:
  __device__ TokenBlock(const EmbedQuantizeArguments& arguments, const EmbeddedOperand& of, std::int32_t head,
                        float* rows, Shared& shared)
      : a(arguments), op(of), head_(head), x(rows), s(shared), stride_(of.padded + kPadding) {}

  __device__ void run(const Slot& slot, std::int32_t quarter) {
    slot_ = slot;
    std::uint32_t most = 0;
    if (has_second_level() && height() > 1) {
      for (int other = 0; other < kQuarters; ++other) most = max(most, look(other));
    }
    look(quarter);
    if (op.quantized != 0) {
      if (has_second_level()) divide(most);
      measure();
      __syncthreads();
      for (int i = thread(); i < scale_count(); i += kThreads) {
        s.scales[i] = block_scale(op.operand, __uint_as_float(s.maxima[i]));
      }
      __syncthreads();
    }
    const std::int32_t first = quarter * kRows;
    for (int i = thread(); i < tokens_.count * chunks(); i += kThreads) {
      store(i / chunks(), i % chunks() * kChunk, slot.place + first + i / chunks());
    }
    if (thread() < tokens_.count) describe(thread());
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }
  [[nodiscard]] __device__ int chunks() const { return op.padded / kChunk; }
  [[nodiscard]] __device__ bool has_second_level() const { return op.operand.second_level == SecondLevel::adaptive; }

  // Extents of what shares a scale.
  [[nodiscard]] __device__ int height() const { return op.operand.block.rows; }
  [[nodiscard]] __device__ int width() const {
    return op.operand.block.columns == 0 ? op.dims : op.operand.block.columns;
  }
  [[nodiscard]] __device__ int across() const { return (op.dims + width() - 1) / width(); }
  [[nodiscard]] __device__ int scale_count() const { return (kRows + height() - 1) / height() * across(); }
  [[nodiscard]] __device__ int scale_of(int row, int dim) const { return row / height() * across() + dim / width(); }

  /// 32 tokens of the slot to shared memory; bits of the largest magnitude among them.
  __device__ std::uint32_t look(std::int32_t quarter) {
    __syncthreads();  // All are done with those before.
    tokens_ = slot_.quarter(quarter);
    load();
    __syncthreads();
    for (int row = warp(); row < kRows; row += kWarps) prepare(row);
    __syncthreads();
    return __reduce_max_sync(0xFFFFFFFFU, s.row_maxima[lane()]);
  }

  /// By the second level, of each row or of bits `most` that the slot has in common.
  __device__ void divide(std::uint32_t most) {
    for (int row = warp(); row < kRows; row += kWarps) {
      const int exponent = second_level_exponent(__uint_as_float(height() > 1 ? most : s.row_maxima[row]));
      const float factor = detail::pow2(-exponent);
      for (int d = lane(); d < op.dims; d += 32) x[row * stride_ + d] *= factor;
      if (lane() == 0) s.second[row] = exponent;
    }
    __syncthreads();
  }

  /// Zeros beyond the tokens and the dims.
  __device__ void load() {
    const Source& source = op.source;
    for (int i = thread(); i < kRows * chunks(); i += kThreads) {
      const int row = i / chunks();
      const int dim = i % chunks() * kChunk;
      float out[kChunk] = {};
      if (row < tokens_.count && dim < op.dims) {
        const std::int64_t base = (std::int64_t{tokens_.row} + row) * source.token_stride + head_ * source.head_stride +
                                  dim * source.dim_stride;
        if (source.vectors && source.dtype != DType::f32) {
          read_halves(static_cast<const std::uint16_t*>(source.data) + base, out);
        } else {
#pragma unroll
          for (int d = 0; d < kChunk; ++d) out[d] = widen(source, base + d * source.dim_stride);
        }
      }
      auto* to = reinterpret_cast<float4*>(x + row * stride_ + dim);
      to[0] = {out[0], out[1], out[2], out[3]};
      to[1] = {out[4], out[5], out[6], out[7]};
    }
  }

  __device__ void read_halves(const std::uint16_t* from, float (&out)[kChunk]) const {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    const std::uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float2 both;
      if (op.source.dtype == DType::bf16) {
        both = {__uint_as_float(words[w] << 16), __uint_as_float(words[w] & 0xFFFF0000U)};
      } else {
        both = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
      }
      out[2 * w] = both.x;
      out[2 * w + 1] = both.y;
    }
  }

  /// One warp, one row: the rotation, then whether it is poisoned, which makes it a row of zeros.
  __device__ void prepare(int row) {
    float* values = x + row * stride_;
    if (op.rotation_shift >= 0) rotate(values);
    std::uint32_t most = 0;
    for (int d = lane(); d < op.dims; d += 32) most = max(most, magnitude(values[d]));
    most = __reduce_max_sync(0xFFFFFFFFU, most);
    const bool poisoned = most >= detail::kInfBits;
    if (poisoned) {
      for (int d = lane(); d < op.dims; d += 32) values[d] = 0;
    }
    if (lane() == 0) {
      s.row_maxima[row] = poisoned ? 0 : most;
      s.poisoned[row] = poisoned ? 1 : 0;
    }
  }

  /// The contract's order: the power of two, then butterflies at rising distances.
  __device__ void rotate(float* values) const {
    const float factor = detail::pow2(-op.rotation_shift);
    for (int d = lane(); d < op.dims; d += 32) values[d] *= factor;
    butterflies(values, op.dims);
  }

  __device__ void read(int row, int dim, float (&out)[kChunk]) const {
    const auto* from = reinterpret_cast<const float4*>(x + row * stride_ + dim);
    const float4 halves[] = {from[0], from[1]};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out[4 * h] = halves[h].x;
      out[4 * h + 1] = halves[h].y;
      out[4 * h + 2] = halves[h].z;
      out[4 * h + 3] = halves[h].w;
    }
  }

  /// Maxima of what shares a scale.
  __device__ void measure() {
    if (width() == 1) {
      for (int i = thread(); i < scale_count(); i += kThreads) {
        std::uint32_t most = 0;
        for (int r = 0; r < height(); ++r)
          most = max(most, magnitude(x[(i / op.dims * height() + r) * stride_ + i % op.dims]));
        s.maxima[i] = most;
      }
      return;
    }
    for (int i = thread(); i < scale_count(); i += kThreads) s.maxima[i] = 0;
    __syncthreads();
    const int across_row = op.dims / kChunk;  // A chunk never shares two scales: 16 dims or more do.
    for (int i = thread(); i < kRows * across_row; i += kThreads) {
      const int row = i / across_row;
      const int dim = i % across_row * kChunk;
      float values[kChunk];
      read(row, dim, values);
      std::uint32_t most = 0;
#pragma unroll
      for (int d = 0; d < kChunk; ++d) most = max(most, magnitude(values[d]));
      atomicMax(&s.maxima[scale_of(row, dim)], most);
    }
  }

  /// Exponent that the stored row of q or k leaves to its factor.
  [[nodiscard]] __device__ int row_exponent(int row) const {
    const std::uint32_t most = s.row_maxima[row];
    return most == 0 ? 0 : min(max(detail::floor_log2(most) + kHeadroom, -126), 127);
  }

  /// Eight dims of a row, which have one scale, or one each.
  __device__ void store(int row, int dim, std::int32_t place_of_token) const {
    const int second = has_second_level() ? s.second[row] : 0;
    const int apart = op.over_dims != 0 ? row_exponent(row) : 0;
    const bool code_alone = op.over_dims == 0 && op.folds != 0;
    std::uint32_t words[kChunk / 2] = {};
    BlockScale scale;
    float factor = detail::pow2(-apart);
    float values[kChunk];
    read(row, dim, values);
#pragma unroll
    for (int d = 0; d < kChunk; ++d) {
      if (dim >= op.dims) break;
      float value = values[d];
      if (op.quantized == 0) {
        value = decode_bf16(held_bf16(value)) * factor;
      } else {
        if (d == 0 || width() == 1) {
          // Held: a row far below the others of its scale has codes 0, and 0 times infinity would be one.
          scale = s.scales[scale_of(row, dim + d)];
          factor = op.operand.encoding == Encoding::nvfp4
                       ? scale.divisor * detail::pow2(min(second - apart, kE8m0Bias))
                       : detail::pow2(code_alone ? 0 : min(scale.exponent - apart, kE8m0Bias));
        }
        const std::uint32_t random =
            op.operand.rounding == Rounding::stochastic
                ? element_random(a.seed, op.stream, head_, place_of_token, std::int64_t{dim} + d)
                : 0;
        value = decoded(op.operand, op.to, scale, value, random) * factor;
      }
      words[d / 2] |= static_cast<std::uint32_t>(held_bf16(value)) << (d % 2 * 16);
    }
    std::uint16_t* to = table() + place(row) * op.padded + dim;
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  }

  [[nodiscard]] __device__ std::int64_t place(int row) const {
    const std::int64_t tokens = op.of_queries != 0 ? a.sizes.tokens_q : a.sizes.tokens_k;
    return head_ * tokens + tokens_.row + row;
  }
  [[nodiscard]] __device__ std::uint16_t* table() const {
    switch (op.table) {
      case Table::queries: return a.tables.queries;
      case Table::keys: return a.tables.keys;
      case Table::values: return a.tables.kind[kWholeTiles].values;
      case Table::cut_values: return a.tables.kind[kCutTiles].values;
      case Table::apart: return op.apart.values;
    }
    return nullptr;
  }

  __device__ void describe(int row) const {
    const bool poisoned = s.poisoned[row] != 0;
    if (op.over_dims != 0) {
      const float factor = poisoned ? detail::float_of(detail::kNanBits) : detail::pow2(row_exponent(row));
      if (op.table == Table::apart) op.apart.about[place(row)] = factor;
      if (op.table == Table::queries) a.tables.query_factor[place(row)] = factor;
      if (op.table != Table::keys) return;
      for (int kind = 0; kind < a.tables.kinds; ++kind) a.tables.kind[kind].keys[place(row)].factor = factor;
      return;
    }
    const int exponent = op.folds != 0 ? s.scales[scale_of(row, 0)].exponent : 0;
    if (op.table == Table::apart) {
      op.apart.about[place(row)] = poisoned ? detail::float_of(detail::kNanBits) : static_cast<float>(exponent);
      if (op.largest == nullptr || poisoned) return;
      atomicMax(&op.largest[head_ * a.sizes.documents + slot_.document],
                static_cast<std::uint32_t>(exponent + kE8m0Bias + 1));
      return;
    }
    const TileKind& kind = a.tables.kind[op.table == Table::values ? kWholeTiles : kCutTiles];
    kind.keys[place(row)].fold = static_cast<float>(exponent);
    const std::uint32_t most = s.row_maxima[row];
    // Rounding may double it.
    const float height = op.folds != 0 ? kHeightOfCodes
                         : most == 0   ? kNoHeight
                                       : static_cast<float>(detail::floor_log2(most) + 2);
    kind.heights[place(row)] = poisoned ? INFINITY : height;
  }

  const EmbedQuantizeArguments& a;
  const EmbeddedOperand& op;
  std::int32_t head_;
  Slot slot_;
  Tokens tokens_;  ///< Those in shared memory.
  float* x;
  Shared& s;
  int stride_;
};

__device__ Slot slot_of(const EmbedQuantizeArguments& a, const EmbeddedOperand& op, std::int32_t index) {
  if (op.of_queries == 0) {
    const KeyTile& tile = a.workspace.tiles[index];
    return {{tile.row, tile.keys}, tile.row - tile.first_row, 0};
  }
  if (a.workspace.costs[index] == 0) return {};
  const Item& item = a.workspace.items[index];
  const std::int32_t place = a.query_offsets == nullptr ? 0 : item.query_row - a.query_offsets[item.document];
  return {{item.query_row, item.queries}, place, item.document};
}

/// One row of blocks for each operand.
__global__ void __launch_bounds__(kThreads) embed_quantize_kernel(const __grid_constant__ EmbedQuantizeArguments a) {
  extern __shared__ float4 rows[];
  __shared__ Shared shared;
  if (a.workspace.control->status != 0) return;
  const EmbeddedOperand& op = a.operand[blockIdx.y];
  const std::int64_t slots = op.of_queries != 0 ? a.sizes.item_slots() : a.sizes.tile_slots();
  const std::int64_t index = blockIdx.x;
  if (index >= slots * kQuarters * op.heads) return;
  const auto head = static_cast<std::int32_t>(index % op.heads);
  const auto rest = static_cast<std::int32_t>(index / op.heads);
  const Slot slot = slot_of(a, op, rest / kQuarters);
  if (slot.quarter(rest % kQuarters).count == 0) return;
  TokenBlock(a, op, head, reinterpret_cast<float*>(rows), shared).run(slot, rest % kQuarters);
}

}  // namespace

int launch_embed_quantize(const EmbedQuantizeArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const Sizes& sizes = arguments.sizes;
  const std::int64_t blocks =
      kQuarters * std::max(sizes.item_slots() * sizes.heads, sizes.tile_slots() * sizes.kv_heads);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  std::int32_t padded = 0;
  for (int i = 0; i < arguments.operands; ++i) padded = std::max(padded, arguments.operand[i].padded);
  const auto bytes = kRows * (padded + kPadding) * static_cast<int>(sizeof(float));
  if (const cudaError_t error =
          cudaFuncSetAttribute(embed_quantize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(arguments.operands));
  embed_quantize_kernel<<<grid, kThreads, static_cast<unsigned>(bytes), on>>>(arguments);
  return cudaGetLastError();
}

}  // namespace mxflash::cuda
