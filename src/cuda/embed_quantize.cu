// Token operands to BF16 numbers: the codes times the scales of the reference's quantizer, by the same codecs. A block
// takes 32 tokens of one document and head, all that any scale of the forward may span, through shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/embed.hpp"
#include "quantize/scales.hpp"

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
constexpr std::uint16_t kMostBf16 = 0x7F7F;
/// Height of a row of zeros, and of codes: E5M2's are the largest.
constexpr float kNoHeight = -200.0F;
constexpr float kHeightOfCodes = 16.0F;

/// Up to 32 tokens of one document and head.
struct Tokens {
  std::int32_t row = 0;  ///< Of the pack.
  std::int32_t count = 0;
};

struct Shared {
  std::uint32_t maxima[kMostScales];  // Bits of magnitudes, which order as the numbers do.
  BlockScale scales[kMostScales];
  std::uint32_t row_maxima[kRows];
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
                        const Tokens& tokens, float* rows, Shared& shared)
      : a(arguments), op(of), head_(head), tokens_(tokens), x(rows), s(shared), stride_(of.padded + kPadding) {}

  __device__ void run() {
    load();
    __syncthreads();
    for (int row = warp(); row < kRows; row += kWarps) prepare(row);
    __syncthreads();
    if (op.quantized != 0) {
      measure();
      __syncthreads();
      for (int i = thread(); i < scale_count(); i += kThreads) {
        s.scales[i] = block_scale(op.operand, __uint_as_float(s.maxima[i]));
      }
      __syncthreads();
    }
    for (int i = thread(); i < tokens_.count * chunks(); i += kThreads) store(i / chunks(), i % chunks() * kChunk);
    if (thread() < tokens_.count) describe(thread());
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }
  [[nodiscard]] __device__ int chunks() const { return op.padded / kChunk; }
  [[nodiscard]] __device__ bool dims_product() const { return op.table == Table::queries || op.table == Table::keys; }

  // Extents of what shares a scale.
  [[nodiscard]] __device__ int height() const { return op.operand.block.rows; }
  [[nodiscard]] __device__ int width() const {
    return op.operand.block.columns == 0 ? op.dims : op.operand.block.columns;
  }
  [[nodiscard]] __device__ int across() const { return (op.dims + width() - 1) / width(); }
  [[nodiscard]] __device__ int scale_count() const { return (kRows + height() - 1) / height() * across(); }
  [[nodiscard]] __device__ int scale_of(int row, int dim) const { return row / height() * across() + dim / width(); }

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
    for (int half = 1; half < op.dims; half *= 2) {
      __syncwarp();
      for (int i = lane(); i < op.dims / 2; i += 32) {
        const int d = i / half * 2 * half + i % half;
        const float low = values[d];
        const float high = values[d + half];
        values[d] = low + high;
        values[d + half] = low - high;
      }
    }
    __syncwarp();
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

  /// Held at BF16's largest number: an Inf times a weight of zero would be a NaN in rows that do not see it.
  static __device__ std::uint16_t hold(float value) {
    const std::uint16_t bits = encode_bf16(value);
    return (bits & 0x7FFFU) > kMostBf16 ? static_cast<std::uint16_t>((bits & 0x8000U) | kMostBf16) : bits;
  }

  /// What the code of a value stands for, and the power of two that is to multiply it.
  [[nodiscard]] __device__ float decoded(const BlockScale& scale, float value) const {
    if (op.operand.encoding == Encoding::nvfp4) {
      value = scale.divisor == 0.0F ? 0.0F : value / scale.divisor;
    } else {
      value *= detail::pow2(-scale.exponent);
    }
    return copysignf(rounded_to(op.to, fabsf(value)), value);
  }

  /// Eight dims of a row, which have one scale, or one each.
  __device__ void store(int row, int dim) const {
    const int apart = dims_product() ? row_exponent(row) : 0;
    const bool code_alone = !dims_product() && op.folds != 0;
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
        value = decode_bf16(hold(value)) * factor;
      } else {
        if (d == 0 || width() == 1) {
          // Held: a row far below the others of its scale has codes 0, and 0 times infinity would be one.
          scale = s.scales[scale_of(row, dim + d)];
          factor = op.operand.encoding == Encoding::nvfp4
                       ? scale.divisor * detail::pow2(-apart)
                       : detail::pow2(code_alone ? 0 : min(scale.exponent - apart, kE8m0Bias));
        }
        value = decoded(scale, value) * factor;
      }
      words[d / 2] |= static_cast<std::uint32_t>(hold(value)) << (d % 2 * 16);
    }
    std::uint16_t* to = table() + place(row) * op.padded + dim;
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  }

  [[nodiscard]] __device__ std::int64_t place(int row) const {
    const std::int64_t tokens = op.table == Table::queries ? a.sizes.tokens_q : a.sizes.tokens_k;
    return head_ * tokens + tokens_.row + row;
  }
  [[nodiscard]] __device__ std::uint16_t* table() const {
    switch (op.table) {
      case Table::queries: return a.tables.queries;
      case Table::keys: return a.tables.keys;
      case Table::values: return a.tables.kind[kWholeTiles].values;
      case Table::cut_values: return a.tables.kind[kCutTiles].values;
    }
    return nullptr;
  }

  __device__ void describe(int row) const {
    const bool poisoned = s.poisoned[row] != 0;
    if (dims_product()) {
      const float factor = poisoned ? detail::float_of(detail::kNanBits) : detail::pow2(row_exponent(row));
      if (op.table == Table::queries) {
        a.tables.query_factor[place(row)] = factor;
        return;
      }
      for (int kind = 0; kind < a.tables.kinds; ++kind) a.tables.kind[kind].keys[place(row)].factor = factor;
      return;
    }
    const TileKind& kind = a.tables.kind[op.table == Table::values ? kWholeTiles : kCutTiles];
    kind.keys[place(row)].fold = op.folds != 0 ? static_cast<float>(s.scales[scale_of(row, 0)].exponent) : 0.0F;
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
  Tokens tokens_;
  float* x;
  Shared& s;
  int stride_;
};

/// The quarter of a slot's 128 rows.
__device__ Tokens tokens_of(const EmbedQuantizeArguments& a, const EmbeddedOperand& op, std::int32_t slot,
                            std::int32_t quarter) {
  Tokens all;
  if (op.table == Table::queries) {
    if (a.workspace.costs[slot] == 0) return all;
    all = {a.workspace.items[slot].query_row, a.workspace.items[slot].queries};
  } else {
    all = {a.workspace.tiles[slot].row, a.workspace.tiles[slot].keys};
  }
  const std::int32_t first = quarter * kRows;
  return {all.row + first, min(max(all.count - first, 0), kRows)};
}

/// One row of blocks for each operand.
__global__ void __launch_bounds__(kThreads) embed_quantize_kernel(const __grid_constant__ EmbedQuantizeArguments a) {
  extern __shared__ float4 rows[];
  __shared__ Shared shared;
  if (a.workspace.control->status != 0) return;
  const EmbeddedOperand& op = a.operand[blockIdx.y];
  const std::int64_t slots = op.table == Table::queries ? a.sizes.item_slots() : a.sizes.tile_slots();
  const std::int64_t index = blockIdx.x;
  if (index >= slots * kQuarters * op.heads) return;
  const auto head = static_cast<std::int32_t>(index % op.heads);
  const auto rest = static_cast<std::int32_t>(index / op.heads);
  const Tokens tokens = tokens_of(a, op, rest / kQuarters, rest % kQuarters);
  if (tokens.count == 0) return;
  TokenBlock(a, op, head, tokens, reinterpret_cast<float*>(rows), shared).run();
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
