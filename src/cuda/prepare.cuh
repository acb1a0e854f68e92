// 32 rows of dO, a warp's: codes, D, and their part of the record of a tile of 64 queries.
#pragma once

#include <cuda_fp16.h>

#include <limits>

#include "cuda/backward.hpp"
#include "cuda/quantize_scale.cuh"
#include "cuda/transpose.cuh"

namespace mxflash::cuda {

/// Queries of an item, of every head.
struct QueryPlace {
  std::int32_t row = 0;
  std::int32_t queries = 0;  ///< 0: the slot has none.
  std::int32_t column = 0;
  std::int32_t columns = 0;  ///< As KeyTile::columns.
  std::int32_t document = 0;
  std::int32_t slot = 0;  ///< Of the first tile, as BackwardSizes::query_slots.
};

/// Beyond these the products that are made of a tile's numbers may leave FP32.
__device__ inline bool far_off(float x) { return fabsf(x) > 0x1p60F || (fabsf(x) < 0x1p-60F && x != 0.0F); }

/// Of numbers that are no NaN: as integers that rise with them.
__device__ inline float largest_of_lanes(float x) {
  constexpr int kSize = std::numeric_limits<int>::max();
  const auto turned = [](int bits) { return bits < 0 ? bits ^ kSize : bits; };
  return __int_as_float(turned(__reduce_max_sync(0xFFFFFFFFU, turned(__float_as_int(x)))));
}

/// What a warp knows of a tile's queries.
struct QueriesSeen {
  static constexpr int kNone = std::numeric_limits<int>::min();

  float norm = 0;
  float most = -INFINITY;
  int irregular = 0;
  int base = kNone;

  __device__ void add(const QueriesSeen& other) {
    norm = fmaxf(norm, other.norm);
    most = fmaxf(most, other.most);
    irregular |= other.irregular;
    base = max(base, other.base);
  }
};

/// A lane has a part of four tokens, as Values.
template <class Shape>
class DoutRows {
 public:
  /// `first`: the warp's first query in the item.
  __device__ DoutRows(const PrepareArguments& arguments, const QueryPlace& of, std::int32_t of_head, std::int32_t first)
      : a(arguments), place_(of), head_(of_head), first_(first) {}

  /// `lines`: of the block, 32 a warp; a row's codes go over it.
  __device__ QueriesSeen run(std::byte* lines) {
    // Columns end no earlier than queries.
    const Dot dot = first_ < place_.columns ? encode_rows(lines) : Dot{};
    return keep(dot);
  }

  /// Of a tile that ends before a second warp's queries.
  __device__ void keep_no_more() const { write(kGroup, Numbers{}); }

  __device__ void finish(const QueriesSeen& seen) const {
    if (lane_index() != 0) return;
    QueryTile& out = tile();
    out.norm = seen.norm;
    out.most = seen.most;
    out.irregular = seen.irregular;
    out.first = place_.row - a.offsets.q[place_.document] + first_ / kQueryTile * kQueryTile;
    out.head = head_;
    out.unused = 0;
    if (seen.base != QueriesSeen::kNone) {
      atomicMax(a.workspace.dout_base + head_ * a.sizes.forward.documents + place_.document, seen.base);
    }
  }

 private:
  using Type = typename Shape::Type;
  using Chunk = typename Type::Chunk;
  static constexpr int kTokens = Shape::kKeys;
  static constexpr int kLanes = Shape::kKeyLanes;
  static constexpr std::size_t kChunks = Shape::kDims / kChunk / kLanes;
  static constexpr bool kHasRest = Shape::kBytes < 4;

  /// The token of the lane's own index: the largest magnitudes that its scale follows from, and codes . O.
  struct Dot {
    float own = 0;
    float shared = 0;
    float sum = 0;
  };
  /// The lane's part of a row of O, and what rounding took from it.
  struct Outputs {
    Chunk o[kChunks];
    Chunk rest[kHasRest ? kChunks : 1];
  };
  /// Where codes of a row go: two lanes have a unit.
  struct CodePlace {
    std::byte* lines;
    unsigned line;

    __device__ void keep(int c, uint2 codes) const {
      const unsigned eight = c * kLanes + threadIdx.x % kLanes;
      std::byte* unit = Square<Shape::kPitch>(lines, eight / 16).unit(line, eight / 2 % 8);
      reinterpret_cast<uint2*>(unit)[eight % 2] = codes;
    }
  };

  static __device__ int first_token() { return lane_index() / kLanes * Shape::kKeys; }
  static __device__ int part() { return lane_index() % kLanes; }
  [[nodiscard]] __device__ QueryTile& tile() const {
    return a.workspace.query_tiles[head_ * a.sizes.query_slots() + place_.slot + first_ / kQueryTile];
  }

  /// Token by token, so that a row of O is asked for whole.
  __device__ Dot encode_rows(std::byte* lines) const {
    const Rows rows{&a.dout, a.sizes.forward.value_dim, head_, place_.row, place_.queries};
    const Group<Shape> group(rows.group(first_ / kGroup), lines + warp_index() * Shape::kStage);
    group.start();
    group.wait();
    const float shared = rows.alike() ? largest_finite(group) : 0;
    Dot mine;
#pragma unroll 1
    for (int j = 0; j < kTokens; ++j) {
      const Outputs now = outputs(j);
      Chunk chunks[kChunks];
      read(group, j, chunks);
      const float own = largest(chunks);
      const Scale scale(own, rows.alike() ? shared : own);
      __syncwarp();  // The lanes of the row have read it.
      const float sum = encode_row(chunks, scale.poisoned ? NAN : scale.inverse(), now,
                                   {lines, warp_index() * kGroup + first_token() + static_cast<unsigned>(j)});
      if (part() == j) mine = {own, rows.alike() ? shared : own, sum};
    }
    return mine;
  }

  static __device__ void read(const Group<Shape>& group, int j, Chunk (&chunks)[kChunks]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) chunks[c] = group.chunk(first_token() + j, c * kLanes + part());
  }

  /// Of a row.
  static __device__ float largest(const Chunk (&chunks)[kChunks]) {
    typename Type::Most most = Type::most(chunks[0]);
#pragma unroll
    for (int c = 1; c < kChunks; ++c) most = Type::larger_of(most, Type::most(chunks[c]));
    return largest_among<1, kLanes>(Type::value(most));
  }

  /// Of the group's rows that are not poisoned.
  static __device__ float largest_finite(const Group<Shape>& group) {
    float most = 0;
#pragma unroll 1
    for (int j = 0; j < kTokens; ++j) {
      Chunk chunks[kChunks];
      read(group, j, chunks);
      const float own = largest(chunks);
      most = finite(own) ? fmaxf(most, own) : most;
    }
    return largest_among<1, 32>(most);
  }

  /// Of the lane's token j.
  [[nodiscard]] __device__ Outputs outputs(int j) const {
    Outputs out{};
    const Sizes& sizes = a.sizes.forward;
    const std::int32_t row = first_ + first_token() + j;
    if (row >= place_.queries) return out;
    const std::int64_t begin =
        ((std::int64_t{place_.row} + row) * sizes.heads + head_) * sizes.value_dim + part() * kChunk;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if ((c * kLanes + part()) * kChunk >= sizes.value_dim) break;
      const std::int64_t byte = (begin + c * kLanes * kChunk) * Shape::kBytes;
      out.o[c] = *reinterpret_cast<const Chunk*>(static_cast<const std::byte*>(a.o) + byte);
      if constexpr (kHasRest) {
        out.rest[c] = *reinterpret_cast<const Chunk*>(static_cast<const std::byte*>(a.saved.residual) + byte);
      }
    }
    return out;
  }

  /// Returns codes . O of the row. `inverse`: NaN: of a poisoned token.
  __device__ float encode_row(const Chunk (&chunks)[kChunks], float inverse, const Outputs& outputs,
                              const CodePlace& to) const {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint2 codes = codes_of_chunk(chunks[c], inverse);
      float y[kChunk];
      unrounded(outputs, c, y);
      sum = dot(codes.y, y + 4, dot(codes.x, y, sum));
      to.keep(c, codes);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += shuffled(sum, distance);
    return sum;
  }

  /// `inverse`: NaN: of a poisoned token, which has codes 0.
  static __device__ uint2 codes_of_chunk(const Chunk& chunk, float inverse) {
    float x[kChunk];
    Type::widen(chunk, x);
#pragma unroll
    for (int d = 0; d < kChunk; ++d) x[d] *= inverse;
    const uint2 codes{codes_of(x[0], x[1], x[2], x[3]), codes_of(x[4], x[5], x[6], x[7])};
    return inverse != inverse ? uint2{} : codes;
  }

  static __device__ void unrounded(const Outputs& outputs, int c, float (&y)[kChunk]) {
    Type::widen(outputs.o[c], y);
    if constexpr (kHasRest) {
      float rest[kChunk];
      Type::widen(outputs.rest[c], rest);
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

  // 2^15 in two, since the exponent's factor is up to 2^120.
  static constexpr float kUndoLow = 0x1p7F;
  static constexpr float kUndoHigh = 0x1p8F;

  /// What there is of a query already, from as few loads as there can be, all at once.
  struct Given {
    float dlse = 0;
    float2 query{};  ///< QueryScale
    float4 row{};    ///< RowRecord
  };
  [[nodiscard]] __device__ Given given(std::int32_t token) const {
    Given of;
    const std::int64_t at = head_ * a.sizes.forward.rows_q() + token;
    if (a.dlse != nullptr) of.dlse = a.dlse[token * a.dlse_token_stride + head_ * a.dlse_head_stride];
    of.query = *reinterpret_cast<const float2*>(a.saved.query_scale + at);
    of.row = *reinterpret_cast<const float4*>(a.saved.rows + at);
    return of;
  }

  /// D - dLSE; a dLSE that is not finite poisons it.
  static __device__ float delta_of(float dlse, const Dot& dot, const Scale& scale) {
    if (!finite(fabsf(dlse))) return NAN;
    return dot.sum * (scale.factor() * kUndoLow) * kUndoHigh - dlse;
  }

  struct Numbers {
    std::uint32_t logit = 0;
    float slope = 0;
    float offset = 0;
    float scale = 0;
  };

  /// The numbers of the token of the lane's own index.
  __device__ QueriesSeen keep(const Dot& dot) const {
    const std::int32_t query = first_ + lane_index();
    const Scale scale(dot.own, dot.shared);
    QueriesSeen seen;
    Numbers numbers;
    if (query < place_.queries) {
      const Given of = given(place_.row + query);
      const float delta = delta_of(of.dlse, dot, scale);
      a.workspace.dout_records[head_ * a.sizes.forward.rows_q() + place_.row + query] = {
          scale.poisoned ? NAN : scale.factor(), delta};
      // A token of zeros asks for no unit, and would be the only one in a head that nothing depends on.
      if (!scale.poisoned && dot.own > 0) seen.base = scale.exponent();
      numbers = numbers_of(of, {scale, dot.own}, delta, seen);
    }
    write(first_ % kQueryTile, numbers);
    seen.norm = largest_of_lanes(seen.norm);
    seen.most = largest_of_lanes(seen.most);
    seen.irregular = __any_sync(0xFFFFFFFFU, seen.irregular) != 0 ? 1 : 0;
    seen.base = __reduce_max_sync(0xFFFFFFFFU, seen.base);
    return seen;
  }

  /// Those of 32 queries of the tile.
  __device__ void write(int first, const Numbers& numbers) const {
    QueryTile& out = tile();
    const int query = first + lane_index();
    out.logit[query] = numbers.logit;
    out.slope[query] = numbers.slope;
    out.offset[query] = numbers.offset;
    out.scale[query] = numbers.scale;
    const float most = largest_of_lanes(numbers.scale);
    if (lane_index() == 0) out.scale_most[first / kGroup] = most;
  }

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
  __device__ Numbers numbers_of(const Given& of, const TokenScale& dout, float delta, QueriesSeen& seen) const {
    const QueryScale query{of.query.x, of.query.y};
    const RowRecord row{of.row.x, of.row.y, of.row.z, of.row.w};
    if (row.inverse == 0.0F) return {};
    seen.norm = fmaxf(0.0F, query.norm);
    seen.most = fmaxf(-INFINITY, row.most);
    const float share = row.inverse * detail::pow2(static_cast<int>(fmaxf(row.unit, -300.0F)));
    const float factor = dout.poisoned ? NAN : dout.factor;
    const bool poisoned = query.factor != query.factor;
    Numbers numbers;
    const float base = fminf(fmaxf(row.base, -kMostBase), kMostBase);
    numbers.logit = (__float_as_uint(query.factor) & 0xFFFF0000U) | __half_as_ushort(__float2half_rn(base));
    numbers.slope = a.scale * (share * factor);
    numbers.offset = delta * dout.inverse;
    numbers.scale = poisoned ? 0.0F : query.factor;
    constexpr float kSafe = 60.0F;  // As far_off.
    const bool far = fabsf(row.unit) > kSafe || fabsf(static_cast<float>(dout.exponent)) > kSafe ||
                     !(fabsf(row.base) <= kMostBase) || a.scale == 0 || far_off(a.scale) || far_off(numbers.slope) ||
                     far_off(numbers.offset);
    seen.irregular = far && !poisoned && !dout.poisoned ? 1 : 0;
    return numbers;
  }

  const PrepareArguments& a;
  const QueryPlace& place_;
  const std::int32_t head_;
  const std::int32_t first_;
};

}  // namespace mxflash::cuda
