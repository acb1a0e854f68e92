// A tile's values, codes transposed, with the multipliers of the row sum below them. A lane has a part of four keys, so
// that four codes of a dim are made side by side.
#pragma once

#include "cuda/quantize_scale.cuh"

namespace mxflash::cuda {

/// 2^(reference - exponent) in E4M3, or 0 where that is no E4M3 number: such a key is counted apart.
__device__ inline std::uint8_t sum_multiplier(float reference, int exponent) {
  const int power = static_cast<int>(reference) - exponent;
  if (exponent == -kE8m0Bias || power < -9 || power > 8) return 0;
  return static_cast<std::uint8_t>(power >= -6 ? (power + 7) << 3 : 1 << (power + 9));
}

/// The reference of the row sums, from the first rows of a document: those that share the first key's exponent.
template <class Type>
__device__ float reference_of(const Rows& rows) {
  float most = 0;
  bool first_poisoned = false;
#pragma unroll 1
  for (std::int32_t row = 0; row < rows.count; ++row) {
    float own = 0;
    for (int d = lane_index(); d < rows.dims; d += 32) own = larger(own, Type::widened(*rows.at<Type>(row, d)));
    own = largest_among<1, 32>(own);
    if (row == 0) first_poisoned = !finite(own);
    if (finite(own)) most = fmaxf(most, own);
  }
  return sum_reference(Scale(first_poisoned ? INFINITY : 0.0F, most).value_exponent());
}

template <class Shape>
class Values {
 public:
  __device__ Values(const QuantizeArguments& arguments, const KeyTile& of, std::int32_t of_head, std::byte* shared)
      : a(arguments),
        tile(of),
        head(of_head),
        separate_(shared + Shape::kStages * Shape::kStage),
        groups({&arguments.v, arguments.sizes.value_dim, of_head, of.row, of.keys}, of.columns, shared) {}

  /// What the exponents of the lane's keys have in common.
  __device__ Range run() {
    const std::int32_t alike = tile.row > tile.first_row ? a.v.scale_tokens : min(a.v.scale_tokens, tile.keys);
    reference_ = reference_of<Type>({&a.v, a.sizes.value_dim, head, tile.first_row, alike});
    Range range = empty_range();
    for (std::int32_t first = 0; first < tile.columns; first += kGroup) {
      groups.take(first);
      float own[kKeys];
      maxima(own);
      float inverses[kKeys];
      scale(first, own, inverses, range);
      __syncwarp();  // All lanes have read.
#pragma unroll 1
      for (int half = 0; half < Shape::kHalves; ++half) {
        if (Shape::kHalves > 1) read(half);
        transpose(half, inverses);
      }
      store(first);
    }
    return range;
  }

 private:
  using Type = typename Shape::Type;
  static constexpr std::size_t kKeys = Shape::kKeys;
  static constexpr std::size_t kChunks = Shape::kChunks;

  static __device__ int place() { return lane_index() / Shape::kKeyLanes; }
  static __device__ int part() { return lane_index() % Shape::kKeyLanes; }
  static __device__ int chunk_of(int half, int c) { return (half * Shape::kChunks + c) * Shape::kKeyLanes + part(); }

  __device__ void read(int half) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) x[j][c] = groups.chunk(place() * Shape::kKeys + j, chunk_of(half, c));
    }
  }

  __device__ void maxima(float* own) {
    typename Type::Most most[kKeys] = {};
#pragma unroll 1
    for (int half = 0; half < Shape::kHalves; ++half) {
      read(half);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) most[j] = Type::larger_of(most[j], Type::most(x[j][c]));
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) own[j] = largest_among<1, Shape::kKeyLanes>(Type::value(most[j]));
  }

  /// Each lane keeps the scale of one key, which is that of its own index.
  __device__ void scale(std::int32_t first, const float* own, float* inverses, Range& range) {
    float shared = 0;
    if (groups.rows.alike()) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) shared = finite(own[j]) ? fmaxf(shared, own[j]) : shared;
      shared = largest_among<1, 32>(shared);
    }
    const bool odd = part() % 2 != 0;
    const float mine = part() < 2 ? (odd ? own[1] : own[0]) : (odd ? own[3] : own[2]);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const Scale of(own[j], groups.rows.alike() ? shared : own[j]);
      inverses[j] = of.inverse();
      if (Shape::kHalves == 1 && of.poisoned) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) x[j][c] = {};
      }
      if (Shape::kHalves > 1 && of.poisoned) inverses[j] = NAN;  // See transpose.
    }
    keep(first + lane_index(), Scale(mine, groups.rows.alike() ? shared : mine), range);
  }

  /// x to codes in shared memory, rows of dims.
  __device__ void transpose(int half, const float* inverses) {
    std::byte* to = transposed() + place() * Shape::kKeys;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float scaled[kKeys][kChunk];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        Type::widen(x[j][c], scaled[j]);
#pragma unroll
        for (int d = 0; d < kChunk; ++d) {
          scaled[j][d] *= inverses[j];
          // Read again, a poisoned key still has its numbers.
          if (Shape::kHalves > 1 && inverses[j] != inverses[j]) scaled[j][d] = 0;
        }
      }
#pragma unroll
      for (int d = 0; d < kChunk; ++d) {
        *reinterpret_cast<std::uint32_t*>(to + swizzled(chunk_of(half, c) * kChunk + d) * kGroup) =
            codes_of(scaled[0][d], scaled[1][d], scaled[2][d], scaled[3][d]);
      }
    }
  }

  [[nodiscard]] __device__ std::byte* transposed() const { return Shape::kHalves > 1 ? separate_ : groups.staged(); }

  /// Rows of neighbouring chunks lie in different banks.
  static __device__ int swizzled(int dim) { return dim ^ (dim / kChunk % Shape::kKeyLanes); }

  __device__ void keep(std::int32_t row, const Scale& scale, Range& range) const {
    const Sizes& sizes = a.sizes;
    if (row < tile.columns) {
      const bool counts = row < tile.keys && !scale.poisoned;
      const std::uint8_t multiplier = counts ? sum_multiplier(reference_, scale.exponent()) : 0;
      for (int part = 1; part <= sizes.value_parts; ++part) {
        codes()[(std::int64_t{part} * (sizes.value_dims + 1) - 1) * sizes.columns() + row] = multiplier;
      }
    }
    if (row >= tile.keys) return;
    const float exponent = scale.value_exponent();
    a.workspace.key_scale[head * sizes.columns() + tile.column + row].value_exponent = exponent;
    range = join(range, {exponent, exponent, 0, 0});
  }

  /// Each part's dims are followed by the multipliers, which are the same for all.
  __device__ void store(std::int32_t first) const {
    __syncwarp();
    constexpr int kUnits = kGroup / 16;  // Of a dim.
    const int column = first + lane_index() % kUnits * 16;
    if (column >= tile.columns) return;
    const std::int64_t stride = a.sizes.columns();
    const int first_dim = lane_index() / kUnits;
    std::uint8_t* to = codes() + first_dim * stride + column;
#pragma unroll 4
    for (int dim = first_dim; dim < a.sizes.value_dim; dim += 32 / kUnits) {
      // Two parts at most; they begin at multiples of 32.
      const std::int64_t below = dim >= a.sizes.value_dims ? stride : 0;
      const std::byte* from = transposed() + swizzled(dim) * kGroup + lane_index() % kUnits * 16;
      *reinterpret_cast<uint4*>(to + below) = *reinterpret_cast<const uint4*>(from);
      to += 32 / kUnits * stride;
    }
  }

  /// Of the tile's first column.
  [[nodiscard]] __device__ std::uint8_t* codes() const {
    return a.workspace.value_codes + head * a.sizes.value_rows() * a.sizes.columns() + tile.column;
  }

  const QuantizeArguments& a;
  const KeyTile tile;
  const std::int32_t head;
  std::byte* separate_;
  float reference_ = 0;
  Groups<Shape> groups;
  typename Type::Chunk x[kKeys][kChunks];
};

}  // namespace mxflash::cuda
