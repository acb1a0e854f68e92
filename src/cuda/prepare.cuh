// A tile of 64 queries of dO: codes by rows and transposed, D, and the tile's record.
#pragma once

#include <cuda_fp16.h>

#include <limits>

#include "cuda/backward.hpp"
#include "cuda/quantize_scale.cuh"
#include "cuda/transpose.cuh"

namespace mxflash::cuda {

/// A tile of queries of one document.
struct QueryPlace {
  std::int32_t row = 0;
  std::int32_t queries = 0;  ///< 0: there is no such tile.
  std::int32_t column = 0;
  std::int32_t columns = 0;  ///< As KeyTile::columns.
  std::int32_t document = 0;
  std::int32_t slot = 0;  ///< As BackwardSizes::query_slots.
};

/// Beyond these the products that are made of a tile's numbers may leave FP32.
__device__ inline bool far_off(float x) { return fabsf(x) > 0x1p60F || (fabsf(x) < 0x1p-60F && x != 0.0F); }

/// A lane has a part of four tokens, as Values; the numbers come chunk by chunk, dO's twice.
template <class Shape>
class DoutTile {
 public:
  static constexpr int kGroups = kQueryTile / kGroup;
  /// A chunk of every lane, transposed: 32 dims of a group.
  static constexpr int kTransposed = 32 * kGroup;
  static constexpr int kShared = Shape::kStage + kTransposed;

  __device__ DoutTile(const PrepareArguments& arguments, const QueryPlace& of, std::int32_t of_head, std::byte* shared)
      : a(arguments),
        tile(of),
        head(of_head),
        transposed_(shared + Shape::kStage),
        out_(arguments.workspace.query_tiles + of_head * arguments.sizes.query_slots() + of.slot),
        rows_({&arguments.dout, arguments.sizes.forward.value_dim, of_head, of.row, of.queries}),
        staged_(shared) {}

  __device__ void run() {
#pragma unroll 1
    for (int first = 0; first < kQueryTile; first += kGroup) {
      // Columns end no earlier than queries.
      const Dot dot = first < tile.columns ? encode(first) : Dot{};
      keep(first, dot);
    }
    finish();
  }

 private:
  using Type = typename Shape::Type;
  using Chunk = typename Type::Chunk;
  static constexpr std::size_t kTokens = Shape::kKeys;
  static constexpr int kLanes = Shape::kKeyLanes;
  static constexpr int kChunks = Shape::kDims / kChunk / kLanes;
  static constexpr bool kHasRest = Shape::kBytes < 4;

  /// The token of the lane's own index: the largest magnitudes that its scale follows from, and codes . O.
  struct Dot {
    float own = 0;
    float shared = 0;
    float sum = 0;
  };
  /// O of the lane's tokens, and what rounding took from it.
  struct Outputs {
    Chunk o[kTokens];
    Chunk rest[kHasRest ? kTokens : 1];
  };

  static __device__ int place() { return lane_index() / kLanes; }
  static __device__ int first_token() { return place() * Shape::kKeys; }
  static __device__ int part() { return lane_index() % kLanes; }
  static __device__ float mine(const float (&of)[kTokens]) {
    const bool odd = part() % 2 != 0;
    return part() < 2 ? (odd ? of[1] : of[0]) : (odd ? of[3] : of[2]);
  }

  /// The group of 32 rows from `first` on into shared memory.
  __device__ void take(int first) const {
    __syncwarp();  // No lane needs the group before it any more.
    const Group<Shape> group(rows_.group(first / kGroup), staged_);
    group.start();
    group.wait();
  }
  [[nodiscard]] __device__ Chunk chunk(int row, int index) const {
    return Group<Shape>(rows_, staged_).chunk(row, index);
  }

  __device__ Dot encode(int first) {
    Outputs next = outputs(first, 0);
    take(first);
    float own[kTokens];
    maxima(own);
    float shared = 0;
    if (rows_.alike()) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) shared = finite(own[j]) ? fmaxf(shared, own[j]) : shared;
      shared = largest_among<1, 32>(shared);
    }
    float inverses[kTokens];
    float sums[kTokens] = {};
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const Scale scale(own[j], rows_.alike() ? shared : own[j]);
      inverses[j] = scale.poisoned ? NAN : scale.inverse();
    }
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      const Outputs now = next;
      if (c + 1 < kChunks) next = outputs(first, c + 1);
      step({first, c}, inverses, now, sums);
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) sums[j] += shuffled(sums[j], distance);
    }
    return {mine(own), rows_.alike() ? shared : mine(own), mine(sums)};
  }

  __device__ void maxima(float (&own)[kTokens]) const {
    typename Type::Most most[kTokens] = {};
#pragma unroll 2
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        most[j] = Type::larger_of(most[j], Type::most(chunk(first_token() + j, c * kLanes + part())));
      }
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) own[j] = largest_among<1, kLanes>(Type::value(most[j]));
  }

  [[nodiscard]] __device__ Outputs outputs(int first, int c) const {
    Outputs out{};
    const Sizes& sizes = a.sizes.forward;
    const int dim = (c * kLanes + part()) * kChunk;
    if (dim >= sizes.value_dim) return out;
    const std::int32_t row = first + first_token();
    const std::int64_t pitch = std::int64_t{sizes.heads} * sizes.value_dim;
    const std::int64_t begin = (std::int64_t{tile.row} + row) * pitch + head * std::int64_t{sizes.value_dim} + dim;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (row + j >= tile.queries) break;
      const std::int64_t byte = (begin + j * pitch) * Shape::kBytes;
      out.o[j] = *reinterpret_cast<const Chunk*>(static_cast<const std::byte*>(a.o) + byte);
      if constexpr (kHasRest) {
        out.rest[j] = *reinterpret_cast<const Chunk*>(static_cast<const std::byte*>(a.saved.residual) + byte);
      }
    }
    return out;
  }

  struct Step {
    int first;
    int chunk;
  };

  /// 32 dims of a group to codes.
  __device__ void step(const Step& at, const float (&inverses)[kTokens], const Outputs& outputs,
                       float (&sums)[kTokens]) const {
    std::uint32_t words[2][kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float x[kChunk];
      Type::widen(chunk(first_token() + j, at.chunk * kLanes + part()), x);
#pragma unroll
      // NaN: a poisoned token, which has codes 0.
      for (int d = 0; d < kChunk; ++d) x[d] = inverses[j] != inverses[j] ? 0.0F : x[d] * inverses[j];
      words[0][j] = codes_of(x[0], x[1], x[2], x[3]);
      words[1][j] = codes_of(x[4], x[5], x[6], x[7]);
      float y[kChunk];
      unrounded(outputs, j, y);
      sums[j] = dot(words[0][j], y, sums[j]);
      sums[j] = dot(words[1][j], y + 4, sums[j]);
    }
    store_rows(at, words);
    auto* to = reinterpret_cast<std::uint32_t*>(transposed_) + place();
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      transpose4(words[w]);
#pragma unroll
      for (int k = 0; k < 4; ++k) to[swizzled(part() * kChunk + w * 4 + k) * (kGroup / 4)] = words[w][k];
    }
    __syncwarp();
    store_columns(at);
    __syncwarp();
  }

  static __device__ void unrounded(const Outputs& outputs, int j, float (&y)[kChunk]) {
    Type::widen(outputs.o[j], y);
    if constexpr (kHasRest) {
      float rest[kChunk];
      Type::widen(outputs.rest[j], rest);
#pragma unroll
      for (int d = 0; d < kChunk; ++d) y[d] += rest[d];
    }
  }

  /// Four codes times 2^-15, an exact FP16 product, so that no O makes the sum leave FP32.
  static __device__ float dot(std::uint32_t codes, const float* y, float sum) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> (16 * p));
      const __half2 two = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)), __float2half2_rn(0x1p-15F));
      sum = fmaf(__low2float(two), y[2 * p], sum);
      sum = fmaf(__high2float(two), y[2 * p + 1], sum);
    }
    return sum;
  }

  /// Four lanes have 32 bytes of a row.
  __device__ void store_rows(const Step& at, const std::uint32_t (&words)[2][kTokens]) const {
    const std::int32_t row = at.first + first_token();
    std::uint8_t* to = a.workspace.dout_codes + (head * a.sizes.forward.rows_q() + tile.row + row) * Shape::kDims +
                       (at.chunk * kLanes + part()) * kChunk;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (row + j >= tile.queries) break;
      *reinterpret_cast<uint2*>(to + j * Shape::kDims) = {words[0][j], words[1][j]};
    }
  }

  /// Rows of neighbouring chunks lie in different banks.
  static __device__ int swizzled(int dim) { return dim ^ (dim / kChunk % kLanes); }

  __device__ void store_columns(const Step& at) const {
    const int column = at.first + lane_index() % 2 * 16;
    if (column >= tile.columns) return;
    const std::int64_t pitch = a.sizes.query_columns();
    std::uint8_t* to =
        a.workspace.dout_columns + (std::int64_t{head} * Shape::kDims + at.chunk * 32) * pitch + tile.column + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = i * 16 + lane_index() / 2;
      *reinterpret_cast<uint4*>(to + dim * pitch) =
          *reinterpret_cast<const uint4*>(transposed_ + swizzled(dim) * kGroup + lane_index() % 2 * 16);
    }
  }

  // 2^15 in two, since the exponent's factor is up to 2^120.
  static constexpr float kUndoLow = 0x1p7F;
  static constexpr float kUndoHigh = 0x1p8F;

  /// D - dLSE; a dLSE that is not finite poisons it.
  [[nodiscard]] __device__ float delta_of(std::int32_t token, const Dot& dot, const Scale& scale) const {
    float dlse = 0;
    if (a.dlse != nullptr) dlse = a.dlse[token * a.dlse_token_stride + head * a.dlse_head_stride];
    if (!finite(fabsf(dlse))) return NAN;
    return dot.sum * (scale.factor() * kUndoLow) * kUndoHigh - dlse;
  }

  /// The numbers of the token of the lane's own index, of a group.
  __device__ void keep(int first, const Dot& dot) {
    const int query = first + lane_index();
    const Scale scale(dot.own, dot.shared);
    Numbers numbers;
    if (query < tile.queries) {
      const std::int64_t at = head * a.sizes.forward.rows_q() + tile.row + query;
      const float delta = delta_of(tile.row + query, dot, scale);
      a.workspace.dout_records[at] = {scale.poisoned ? NAN : scale.factor(), delta};
      // A token of zeros asks for no unit, and would be the only one in a head that nothing depends on.
      if (!scale.poisoned && dot.own > 0) base_ = max(base_, scale.exponent());
      numbers = numbers_of(at, {scale, dot.own}, delta);
    }
    out_->logit[query] = numbers.logit;
    out_->slope[query] = numbers.slope;
    out_->offset[query] = numbers.offset;
    out_->scale[query] = numbers.scale;
    const float most = join_lanes({0, numbers.scale, 0, 0}).most;
    if (lane_index() == 0) out_->scale_most[first / kGroup] = most;
  }

  struct Numbers {
    std::uint32_t logit = kBaseBias;
    float slope = 0;
    float offset = 0;
    float scale = 0;
  };

  /// dO of a token. Where all codes are zero, and others' too that share the exponent, it says nothing: such a token
  /// counts as if it were 0.
  struct TokenScale {
    __device__ TokenScale(const Scale& of, float own)
        : poisoned(of.poisoned), zero(of.exponent() == -kE8m0Bias && own * of.inverse() <= 0x1p-10F) {
      if (poisoned || zero) return;
      exponent = of.exponent();
      factor = of.factor();
      inverse = of.inverse();
    }
    bool poisoned;
    bool zero;
    int exponent = 0;
    float factor = 1;
    float inverse = 1;
  };

  /// Those of a query that sees no key are zeros, as past the document's end.
  __device__ Numbers numbers_of(std::int64_t at, const TokenScale& dout, float delta) {
    const QueryScale query = a.saved.query_scale[at];
    const RowRecord row = a.saved.rows[at];
    if (row.inverse == 0.0F) return {};
    norm_ = fmaxf(norm_, query.norm);
    most_ = fmaxf(most_, row.most);
    const float share = row.inverse * detail::pow2(static_cast<int>(fmaxf(row.unit, -300.0F)));
    const float factor = dout.poisoned ? NAN : dout.factor;
    const bool poisoned = query.factor != query.factor;
    Numbers numbers;
    const auto base = static_cast<std::int32_t>(fminf(fmaxf(row.base, -kMostBase), kMostBase));
    numbers.logit = (__float_as_uint(query.factor) & 0xFFFF0000U) | static_cast<std::uint32_t>(base + kBaseBias);
    numbers.slope = a.scale * (share * factor);
    numbers.offset = delta * dout.inverse;
    numbers.scale = poisoned ? 0.0F : query.factor;
    constexpr float kSafe = 60.0F;  // As far_off.
    const bool far = fabsf(row.unit) > kSafe || fabsf(static_cast<float>(dout.exponent)) > kSafe ||
                     fabsf(row.base) > kMostBase || a.scale == 0 || far_off(a.scale) || far_off(numbers.slope) ||
                     far_off(numbers.offset);
    irregular_ |= far && !poisoned && !dout.poisoned;
    return numbers;
  }

  __device__ void finish() {
    const float most = join_lanes({0, most_, 0, 0}).most;
    const float norm = join_lanes({0, norm_, 0, 0}).most;
    const bool irregular = __any_sync(0xFFFFFFFFU, irregular_);
    const int base = __reduce_max_sync(0xFFFFFFFFU, base_);
    if (lane_index() != 0) return;
    out_->norm = norm;
    out_->most = most;
    out_->irregular = irregular ? 1 : 0;
    out_->first = tile.row - a.offsets.q[tile.document];
    out_->head = head;
    out_->unused = 0;
    if (base != kNone) atomicMax(a.workspace.dout_base + head * a.sizes.forward.documents + tile.document, base);
  }

  static constexpr int kNone = std::numeric_limits<int>::min();

  const PrepareArguments& a;
  const QueryPlace& tile;
  const std::int32_t head;
  std::byte* transposed_;
  QueryTile* out_;
  float norm_ = 0;
  float most_ = -INFINITY;
  bool irregular_ = false;
  int base_ = kNone;
  const Rows rows_;
  std::byte* staged_;
};

}  // namespace mxflash::cuda
