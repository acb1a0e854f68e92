// Rows of q or k. Two kernels: a way out between any two stages of the butterflies, for rows shorter than the kernel's,
// costs registers.
#pragma once

#include "cuda/quantize_scale.cuh"

namespace mxflash::cuda {

/// Whether butterflies at a distance are among those of rows of `dims`.
struct AllStages {
  static __device__ bool has(int, std::int32_t) { return true; }
};
struct SomeStages {
  static __device__ bool has(int distance, std::int32_t dims) { return distance < dims; }
};

/// A group of rows, and the place of the first one's scale among those of its head.
struct TokenRows {
  Rows rows;
  std::int32_t place;
};

template <class Shape, class Stages>
class Tokens {
 public:
  __device__ Tokens(const QuantizeArguments& arguments, const TokenRows& of, std::byte* shared)
      : a(arguments), target(of), group(of.rows, shared) {}

  /// Returns the norm of one of the rows, or 0.
  __device__ float run() {
    group.start();
    park();
    group.wait();
    float shared = 0;
    // Twice where an exponent follows from the whole group.
#pragma unroll 1
    for (int row = target.rows.alike() ? -kGroup : 0; row < target.rows.count; row += Shape::kRows) {
      const bool measuring = row < 0;
      const int own_row = (measuring ? row + kGroup : row) + lane_index() % Shape::kRows;
      read(own_row);
      const float own = maximum();
      if (measuring) {
        shared = fmaxf(shared, largest_among<1, 32>(finite(own) ? own : 0.0F));
        continue;
      }
      const Scale scale(own, target.rows.alike() ? shared : own);
      const float norm = encode(scale, own_row);
      if (part() == 0) *scale_of(own_row) = {scale.poisoned ? NAN : scale.factor(), norm};
    }
    __syncwarp();
    store_codes();
    return store_scale();
  }

 private:
  /// Of the row. Lanes of a quarter of a warp have the same: their rows lie in different banks.
  static __device__ int part() { return lane_index() / Shape::kRows; }

  /// x, rotated.
  __device__ void read(int row) {
#pragma unroll
    for (int c = 0; c < Shape::kOwn / kChunk; ++c) {
      Shape::Type::widen(group.chunk(row, part() * (Shape::kOwn / kChunk) + c), x + c * kChunk);
    }
    if (a.rotation_shift >= 0) rotate(__int_as_float((127 - a.rotation_shift) << 23));
  }

  /// The contract's order: the power of two, then distances 1, 2, 4 and up.
  __device__ void rotate(float factor) {
    constexpr bool kRounds = Shape::kBytes == 4;  // Only FP32 has numbers so small that the product rounds.
#pragma unroll
    for (int d = 0; d < Shape::kOwn; d += 2) {
      const float low = x[d] * factor;
      const float high = kRounds ? x[d + 1] * factor : x[d + 1];
      // An exact product, fused with the addition, gives the same bits.
      x[d] = fmaf(high, kRounds ? 1.0F : factor, low);
      x[d + 1] = fmaf(-high, kRounds ? 1.0F : factor, low);
    }
#pragma unroll
    for (int half = 2; half < Shape::kOwn; half *= 2) {
      if (!Stages::has(half, target.rows.dims)) return;
#pragma unroll
      for (int d = 0; d < Shape::kOwn; ++d) {
        if ((d & half) != 0) continue;
        const float low = x[d];
        const float high = x[d + half];
        x[d] = low + high;
        x[d + half] = low - high;
      }
    }
#pragma unroll
    for (int half = 1; half < Shape::kLanes; half *= 2) {
      if (!Stages::has(half * Shape::kOwn, target.rows.dims)) return;
      // The sum, or in the upper lane the difference: a product with 1 or -1 is exact.
      const float sign = (part() & half) == 0 ? 1.0F : -1.0F;
#pragma unroll
      for (int d = 0; d < Shape::kOwn; ++d) x[d] = fmaf(x[d], sign, shuffled(x[d], half * Shape::kRows));
    }
  }

  [[nodiscard]] __device__ float maximum() const {
    float most[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int d = 4; d < Shape::kOwn; ++d) most[d % 4] = larger(most[d % 4], x[d]);
    return largest_among<Shape::kRows, 32>(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  }

  /// x to codes, over the row in shared memory. Returns a bound of the norm of the row as rounded: rounding to E4M3
  /// adds a sixteenth at most, or half a subnormal step.
  __device__ float encode(const Scale& scale, int row) {
    if (scale.poisoned) {
#pragma unroll
      for (int d = 0; d < Shape::kOwn; ++d) x[d] = 0;
    }
    const float inverse = scale.inverse();
    float sums[4] = {0, 0, 0, 0};
    __syncwarp();  // The lanes of the row have read it.
    auto* to = reinterpret_cast<uint4*>(group.staged() + row * Shape::kPitch + part() * Shape::kOwn);
#pragma unroll
    for (int d = 0; d < Shape::kOwn; d += 16) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float scaled[4];  // The square of x itself may leave FP32.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scaled[i] = x[d + 4 * w + i] * inverse;
          sums[i] = fmaf(scaled[i], scaled[i], sums[i]);
        }
        words[w] = codes_of(scaled[0], scaled[1], scaled[2], scaled[3]);
      }
      to[d / 16] = {words[0], words[1], words[2], words[3]};
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int distance = Shape::kRows; distance < 32; distance *= 2) sum += shuffled(sum, distance);
    float root = 0;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(sum));  // Off by far less than what 1.07 has to spare.
    return scale.poisoned ? 0.0F : (root * 1.07F + static_cast<float>(target.rows.dims) / 1024.0F) * scale.factor();
  }

  [[nodiscard]] __device__ bool queries() const { return target.rows.source == &a.q; }

  /// Where rows go, while the butterflies have the registers: behind the first row, where no copy writes.
  struct Parked {
    std::int32_t head;
    std::int32_t first;
    std::int32_t place;
  };
  static_assert(sizeof(Parked) <= Shape::kPitch - Shape::kDims * Shape::kBytes);
  [[nodiscard]] __device__ Parked* parked() const {
    return reinterpret_cast<Parked*>(group.staged() + Shape::kDims * Shape::kBytes);
  }
  __device__ void park() const {
    if (lane_index() == 0) *parked() = {target.rows.head, target.rows.first, target.place};
  }

  /// Behind the row's codes.
  [[nodiscard]] __device__ QueryScale* scale_of(int row) const {
    return reinterpret_cast<QueryScale*>(group.staged() + row * Shape::kPitch + Shape::kDims);
  }

  __device__ void store_codes() const {
    constexpr int kUnits = Shape::kDims / 16;  // Of a row.
    const std::int32_t count = target.rows.count;
    const std::int64_t place = parked()->head * (queries() ? a.sizes.rows_q() : a.sizes.rows_k()) + parked()->first;
    std::uint8_t* codes = queries() ? a.workspace.query_codes : a.workspace.key_codes;
    auto* to = reinterpret_cast<uint4*>(codes + place * a.sizes.key_dims);
    const auto from = [this](int row, int unit) {
      return *reinterpret_cast<const uint4*>(group.staged() + row * Shape::kPitch + unit * 16);
    };
    if (count == kGroup && a.sizes.key_dims == Shape::kDims) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        to[i * 32 + lane_index()] = from(i * (32 / kUnits) + lane_index() / kUnits, lane_index() % kUnits);
      }
      return;
    }
    const int units = a.sizes.key_dims / 16;
#pragma unroll 1
    for (int i = lane_index(); i < count * units; i += 32) to[i] = from(i / units, i % units);
  }

  /// A row each lane; returns its norm.
  __device__ float store_scale() const {
    if (lane_index() >= target.rows.count) return 0;
    const QueryScale scale = *scale_of(lane_index());
    const std::int32_t place = parked()->place + lane_index();
    if (queries()) {
      a.workspace.query_scale[parked()->head * a.sizes.rows_q() + place] = scale;
    } else {
      a.workspace.key_scale[parked()->head * a.sizes.columns() + place].factor = scale.factor;
    }
    return scale.norm;
  }

  const QuantizeArguments& a;
  const TokenRows& target;
  Group<Shape> group;
  float x[Shape::kOwn];
};

}  // namespace mxflash::cuda
