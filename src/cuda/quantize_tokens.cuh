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

/// Rows, and where what becomes of them goes.
struct TokenRows {
  Rows rows;
  std::uint8_t* codes;  ///< Rows of `key_dims` bytes.
  float* factors;       ///< Every second one: those of QueryScale or KeyScale.
  float* norms;         ///< The same; none: only the largest is asked for.
};

template <class Shape, class Stages>
class Tokens {
 public:
  __device__ Tokens(const QuantizeArguments& arguments, const TokenRows& of, std::byte* shared)
      : a(arguments), target(of), groups(of.rows, of.rows.count, shared) {}

  /// Returns the largest norm that the lane has seen.
  __device__ float run() {
    float largest = 0;
    for (std::int32_t first = 0; first < target.rows.count; first += kGroup) {
      groups.take(first);
      const int end = min(kGroup, target.rows.count - first);
      float shared = 0;
      // Twice where an exponent follows from the whole group.
#pragma unroll 1
      for (int row = target.rows.alike() ? -kGroup : 0; row < end; row += Shape::kRows) {
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
        largest = fmaxf(largest, norm);
        if (part() == 0 && own_row < end) {
          target.factors[2 * (first + own_row)] = scale.poisoned ? NAN : scale.factor();
          if (target.norms != nullptr) target.norms[2 * (first + own_row)] = norm;
        }
      }
      store(first, end);
    }
    return largest;
  }

 private:
  /// Of the row. Lanes of a quarter of a warp have the same: their rows lie in different banks.
  static __device__ int part() { return lane_index() / Shape::kRows; }

  /// x, rotated.
  __device__ void read(int row) {
#pragma unroll
    for (int c = 0; c < Shape::kOwn / kChunk; ++c) {
      Shape::Type::widen(groups.chunk(row, part() * (Shape::kOwn / kChunk) + c), x + c * kChunk);
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
    auto* to = reinterpret_cast<uint4*>(groups.staged() + row * Shape::kPitch + part() * Shape::kOwn);
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

  __device__ void store(std::int32_t first, int rows) const {
    __syncwarp();
    constexpr int kUnits = Shape::kDims / 16;  // Of a row.
    auto* to = reinterpret_cast<uint4*>(target.codes + std::int64_t{first} * a.sizes.key_dims);
    const auto from = [this](int row, int unit) {
      return *reinterpret_cast<const uint4*>(groups.staged() + row * Shape::kPitch + unit * 16);
    };
    if (rows == kGroup && a.sizes.key_dims == Shape::kDims) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        to[i * 32 + lane_index()] = from(i * (32 / kUnits) + lane_index() / kUnits, lane_index() % kUnits);
      }
      return;
    }
    const int units = a.sizes.key_dims / 16;
#pragma unroll 1
    for (int i = lane_index(); i < rows * units; i += 32) to[i] = from(i / units, i % units);
  }

  const QuantizeArguments& a;
  const TokenRows& target;
  Groups<Shape> groups;
  float x[Shape::kOwn];
};

}  // namespace mxflash::cuda
