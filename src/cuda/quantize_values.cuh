// A tile's values, codes transposed, with the multipliers of the row sum below them. A lane has a part of four keys, so
// that four codes of a dim are made side by side; the warps of a tile write the codes of its 128 keys together.
#pragma once

#include "cuda/quantize_scale.cuh"

namespace mxflash::cuda {

/// 2^(reference - exponent) in E4M3, or 0 where that is no E4M3 number, or the exponent is that of a poisoned key or of
/// one of zeros: such a key is counted apart.
__device__ inline std::uint8_t sum_multiplier(float reference, int exponent) {
  const int power = static_cast<int>(reference) - exponent;
  if (exponent <= -kE8m0Bias || power < -9 || power > 8) return 0;
  return static_cast<std::uint8_t>(power >= -6 ? (power + 7) << 3 : 1 << (power + 9));
}

/// What a warp knows of a tile's values, for the others.
struct ValuesSeen {
  float least = INFINITY;  ///< As in Range.
  float most = -INFINITY;
  float first = 0;  ///< Largest magnitude of rows that share the first key's exponent; inf: that key is poisoned.

  __device__ void add(const ValuesSeen& other) {
    least = fminf(least, other.least);
    most = fmaxf(most, other.most);
    first = fmaxf(first, other.first);
  }
};

template <class Shape>
class Values {
 public:
  /// `shared`: of the block.
  __device__ Values(const QuantizeArguments& arguments, const KeyTile& of, const Team& by, std::byte* shared)
      : a(arguments),
        tile(of),
        team(by),
        parts_(shared),
        group(Rows{&arguments.v, arguments.sizes.value_dim, by.head, of.row, of.keys}.group(by.group),
              shared + warp_index() * Shape::kShared) {}

  /// Codes to shared memory, where `store` of any warp of the team finds them.
  __device__ ValuesSeen encode() {
    group.start();
    ValuesSeen seen;
    seen.first = first_magnitude();
    group.wait();
    float own[kKeys];
    maxima(own);
    float inverses[kKeys];
    scale(own, inverses);
    __syncwarp();  // All lanes have read.
#pragma unroll 1
    for (int half = 0; half < Shape::kHalves; ++half) {
      if (Shape::kHalves > 1) read(half);
      transpose(half, inverses);
    }
    const bool is_key = row() < tile.keys;
    const Range range = join_lanes({is_key ? exponent_ : INFINITY, is_key ? exponent_ : -INFINITY, 0, 0});
    seen.least = range.least;
    seen.most = range.most;
    return seen;
  }

  /// Lines of the tile's columns, and the lane's multiplier. Each part's dims are followed by the multipliers, which
  /// are the same for all.
  __device__ void store(float first) const {
    const Sizes& sizes = a.sizes;
    const std::int64_t stride = sizes.columns();
    std::uint8_t* codes = a.workspace.value_codes + team.head * sizes.value_rows() * stride + tile.column;
    if (row() < tile.columns) {
      const float reference = sum_reference(Scale(first, first).value_exponent());
      const std::uint8_t multiplier = row() < tile.keys ? sum_multiplier(reference, static_cast<int>(exponent_)) : 0;
#pragma unroll 1
      for (int part = 1; part <= sizes.value_parts; ++part) {
        codes[(std::int64_t{part} * (sizes.value_dims + 1) - 1) * stride + row()] = multiplier;
      }
    }
    constexpr int kDimsAtOnce = 16;  // A team's, however many warps it has: 16 bytes a lane.
    const int units = kGroup / 16 * team.warps;
    const int unit = team.lane() & (units - 1);
    if (unit * 16 >= tile.columns) return;
    const int from_warp = team.first_warp() + unit / 2;
    const std::byte* from = parts_ + from_warp * Shape::kShared + Shape::kTransposed + unit % 2 * 16;
    const int first_dim = team.lane() / units;
    std::uint8_t* to = codes + first_dim * stride + unit * 16;
#pragma unroll 4
    for (int dim = first_dim; dim < sizes.value_dim; dim += kDimsAtOnce) {
      // Two parts at most; they begin at multiples of 32.
      const std::int64_t below = dim >= sizes.value_dims ? stride : 0;
      *reinterpret_cast<uint4*>(to + below) = *reinterpret_cast<const uint4*>(from + swizzled(dim, from_warp) * kGroup);
      to += kDimsAtOnce * stride;
    }
  }

 private:
  using Type = typename Shape::Type;
  static constexpr std::size_t kKeys = Shape::kKeys;
  static constexpr std::size_t kChunks = Shape::kChunks;

  static __device__ int place() { return lane_index() / Shape::kKeyLanes; }
  static __device__ int part() { return lane_index() % Shape::kKeyLanes; }
  static __device__ int chunk_of(int half, int c) { return (half * Shape::kChunks + c) * Shape::kKeyLanes + part(); }

  /// Of the lane's own key, in the tile.
  [[nodiscard]] __device__ std::int32_t row() const { return team.lane(); }

  __device__ void read(int half) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) x[j][c] = group.chunk(place() * Shape::kKeys + j, chunk_of(half, c));
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
  __device__ void scale(const float* own, float* inverses) {
    float shared = 0;
    if (group.rows.alike()) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) shared = finite(own[j]) ? fmaxf(shared, own[j]) : shared;
      shared = largest_among<1, 32>(shared);
    }
    const bool odd = part() % 2 != 0;
    const float mine = part() < 2 ? (odd ? own[1] : own[0]) : (odd ? own[3] : own[2]);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const Scale of(own[j], group.rows.alike() ? shared : own[j]);
      inverses[j] = of.inverse();
      if (Shape::kHalves == 1 && of.poisoned) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) x[j][c] = {};
      }
      if (Shape::kHalves > 1 && of.poisoned) inverses[j] = NAN;  // See transpose.
    }
    exponent_ = Scale(mine, group.rows.alike() ? shared : mine).value_exponent();
    if (row() < tile.keys) {
      a.workspace.key_scale[team.head * a.sizes.columns() + tile.column + row()].value_exponent = exponent_;
    }
  }

  /// x to codes in shared memory, rows of dims.
  __device__ void transpose(int half, const float* inverses) {
    // Only a dim's place among four depends on the lane: the rest is part of the store's instruction.
    std::byte* to[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const int dim = chunk_of(half, 0) * kChunk + d;
      to[d] = group.staged() + Shape::kTransposed + swizzled(dim, warp_index()) * kGroup + place() * Shape::kKeys;
    }
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
        const int further = (c * Shape::kKeyLanes * kChunk + d / 4 * 4) * kGroup;
        *reinterpret_cast<std::uint32_t*>(to[d % 4] + further) =
            codes_of(scaled[0][d], scaled[1][d], scaled[2][d], scaled[3][d]);
      }
    }
  }

  /// Rows of neighbouring chunks lie in different banks, and so does a dim of neighbouring warps.
  static __device__ int swizzled(int dim, int warp) {
    return dim ^ static_cast<int>(static_cast<unsigned>(dim) / kChunk % Shape::kKeyLanes) ^ warp;
  }

  /// Over the rows that share the exponent of the document's first key: the warps that have a group take turns.
  __device__ float first_magnitude() const {
    const std::int32_t alike = tile.row > tile.first_row ? a.v.scale_tokens : min(a.v.scale_tokens, tile.keys);
    const Rows rows{&a.v, a.sizes.value_dim, team.head, tile.first_row, alike};
    const std::int32_t turns = (tile.columns + kGroup - 1) / kGroup;
    float most = 0;
#pragma unroll 1
    for (std::int32_t row = team.group; row < rows.count; row += turns) {
      float own = 0;
      for (int d = lane_index(); d < rows.dims; d += 32) own = larger(own, Type::widened(*rows.at<Type>(row, d)));
      own = largest_among<1, 32>(own);
      most = fmaxf(most, finite(own) ? own : row == 0 ? INFINITY : 0.0F);
    }
    return most;
  }

  const QuantizeArguments& a;
  const KeyTile tile;
  const Team team;
  std::byte* parts_;
  Group<Shape> group;
  float exponent_ = 0;  // Of the lane's own key.
  typename Type::Chunk x[kKeys][kChunks];
};

}  // namespace mxflash::cuda
