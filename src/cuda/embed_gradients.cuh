// Weights of the three products over tokens, from w or dS in a warp's square to BF16 numbers: codes times scales, in
// the reference's blocks and with its random bits. A lane takes a row of the square where blocks run along rows, else a
// column.
#pragma once

#include "cuda/embed_pairs.cuh"

namespace mxflash::cuda {

/// `rounded` to the nearest, with the sign; a NaN stays one.
__device__ inline float nearest(const RoundTo& to, float x) { return copysignf(rounded_to(to, fabsf(x)), x); }

/// Exponents of tokens that are multiplied in before weights are quantized; null where there are none.
struct Folds {
  const float* by_query = nullptr;  ///< Of the square's first.
  const float* by_key = nullptr;
  float less = 0;

  [[nodiscard]] __device__ float exponent(int row, int column) const {
    return (by_query == nullptr ? 0.0F : by_query[row]) + (by_key == nullptr ? 0.0F : by_key[column]) - less;
  }
};

/// Of the halves of a lane's line, which are the same where 32 or more numbers share one.
struct LineScales {
  BlockScale low;
  BlockScale high;
};

/// A scale as a line of numbers takes it: powers of two are made once.
struct CodeScale {
  float by = 0;    ///< Multiplies a value before it is rounded; of NVFP4 it divides it, correctly rounded.
  float unit = 0;  ///< Multiplies what the code stands for.
};

class SquareWeights {
 public:
  __device__ SquareWeights(const PairTile& tile, const GradientRule& rule, std::uint64_t stream)
      : tile_(tile), op_(rule.operand), to_(rule.to), stream_(stream), quantized_(rule.quantized != 0) {}

  /// Maxima of what shares a second level to shared memory, which holds zeros.
  __device__ void measure_second_level(const Folds& folds) const {
    float most = 0;
    each([&](float x, int row, int column) { most = fmaxf(most, fabsf(narrowed(folded(folds, x, row, column), 0))); });
    atomicMax(&tile_.s.most[shared_by(tile_.at.lane)], __float_as_uint(most));
  }

  /// `adaptive`: maxima have been measured.
  __device__ void write(const Folds& folds) const {
    const int second = op_.second_level == SecondLevel::adaptive
                           ? second_level_exponent(__uint_as_float(tile_.s.most[shared_by(tile_.at.lane)]))
                           : 0;
    const auto value = [&](float x, int row, int column) { return narrowed(folded(folds, x, row, column), -second); };
    if (!quantized_) {
      each([&](float x, int row, int column) { store(row, column, value(x, row, column)); });
      return;
    }
    const LineScales scales = find_scales(value);
    const CodeScale low = code_scale(scales.low, second);
    const CodeScale high = code_scale(scales.high, second);
    each([&](float x, int row, int column) {
      const CodeScale scale = half_of(row, column) == 0 ? low : high;
      store(row, column, coded(scale, value(x, row, column), row, column) * scale.unit);
    });
  }

  /// One set of codes for both products: here for that with k, whose exponents are `folds`.
  __device__ void write_for_keys(const float* folds) const {
    const BlockScale scale = find_scales([](float x, int, int) { return x; }).low;
    const CodeScale of_code = code_scale(scale, 0);
    const KeyRange32 keys = tile_.columns(tile_.at.lane);
    float top = -INFINITY;
    if (by_row()) {
      tile_.each_column([&](float, int column) {
        if (column >= keys.begin && column < keys.end) top = fmaxf(top, folds[column]);
      });
    } else {
      top = most_of_warp(fmaxf(-INFINITY, folds[tile_.at.lane]));
    }
    if (top == -INFINITY) top = 0;
    each([&](float x, int row, int column) {
      const float code = coded(of_code, x, row, column);
      store(row, column, shifted(code, folds[column] - top, top + static_cast<float>(scale.exponent)));
    });
  }

  /// The same for that with q.
  __device__ void write_for_queries(const float* folds) const {
    const BlockScale scale = find_scales([](float x, int, int) { return x; }).low;
    const CodeScale of_code = code_scale(scale, 0);
    // A lane is a row here, whatever it is to the codes: where it is not, rows have no exponent of their own.
    const float own = by_row() ? static_cast<float>(scale.exponent) : 0.0F;
    const KeyRange32 keys = tile_.columns(tile_.at.lane);
    const bool sees = max(keys.begin, 0) < min(keys.end, kGroup);
    float top = most_of_warp(sees ? fmaxf(-INFINITY, folds[tile_.at.lane] + own) : -INFINITY);
    if (top == -INFINITY) top = 0;
    each([&](float x, int row, int column) {
      const float code = coded(of_code, x, row, column);
      store(row, column, shifted(code, folds[row] + own - top, top + static_cast<float>(scale.exponent) - own));
    });
  }

 private:
  [[nodiscard]] __device__ bool by_row() const { return op_.block.rows == 1; }
  [[nodiscard]] __device__ int shared_by(int lane) const {
    return by_row() ? tile_.at.query() + lane : tile_.at.key() + lane;
  }
  [[nodiscard]] __device__ int half_of(int row, int column) const { return (by_row() ? column : row) / 16; }

  /// `take(x, row, column)` of the lane's row or column. Pairs that nobody sees are zeros.
  template <class Take>
  __device__ void each(const Take& take) const {
    if (by_row()) {
      tile_.each_column([&](float x, int column) { take(x, tile_.at.lane, column); });
      return;
    }
#pragma unroll 2
    for (int row = 0; row < kGroup; ++row) take(tile_.square()[row * kPitch + tile_.at.lane], row, tile_.at.lane);
  }

  static __device__ float most_of_warp(float x) {
    for (int half = 1; half < 32; half *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, half));
    return x;
  }

  /// NaN where a token that the pair sees is poisoned.
  [[nodiscard]] __device__ float folded(const Folds& folds, float x, int row, int column) const {
    const float exponent = folds.exponent(row, column);
    if (exponent == exponent) return x * detail::pow2(static_cast<int>(exponent));  // 127 at most.
    const KeyRange32 keys = tile_.columns(row);
    return keys.begin <= column && column < keys.end ? exponent : 0.0F;
  }

  static __device__ float narrowed(float x, int shift) {
    constexpr float kMost = 3.4028234e38F;
    return held(shift == 0 ? x : x * detail::pow2(shift), kMost);
  }

  template <class Value>
  __device__ LineScales find_scales(const Value& value) const {
    if (op_.block == Block::tensor()) {
      const BlockScale scale{0, -spec_of(*element_format(op_.encoding)).max_exponent, 1.0F};
      return {scale, scale};
    }
    float low = 0;
    float high = 0;
    each([&](float x, int row, int column) {
      const float most = fabsf(value(x, row, column));  // A NaN is never the larger.
      (half_of(row, column) == 0 ? low : high) = fmaxf(half_of(row, column) == 0 ? low : high, most);
    });
    if (op_.block.rows * op_.block.columns != 16) low = high = fmaxf(low, high);
    if (op_.block == Block::square32()) low = high = most_of_warp(low);
    return {block_scale(op_, low), block_scale(op_, high)};
  }

  [[nodiscard]] __device__ CodeScale code_scale(const BlockScale& scale, int second) const {
    if (op_.encoding == Encoding::nvfp4) return {scale.divisor, scalbnf(scale.divisor, second)};
    return {detail::pow2(-scale.exponent), detail::pow2(scale.exponent)};
  }

  /// What the code of a value stands for.
  [[nodiscard]] __device__ float coded(const CodeScale& scale, float value, int row, int column) const {
    if (!(value == value)) return value;
    const Pair& pair = tile_.s.pair;
    const std::uint32_t random =
        op_.rounding == Rounding::stochastic
            ? element_random(tile_.a.seed, stream_, pair.head, std::int64_t{pair.first_query} + tile_.at.query() + row,
                             std::int64_t{pair.first_key} + tile_.at.key() + column)
            : 0;
    if (op_.encoding != Encoding::nvfp4) return rounded(op_, to_, value * scale.by, random);
    return rounded(op_, to_, scale.by == 0.0F ? 0.0F : value / scale.by, random);
  }

  /// A code moved down by an exponent, what falls below the format's range rounded again; then its scale.
  [[nodiscard]] __device__ float shifted(float code, float exponent, float unit) const {
    if (!(code == code)) return code;
    const float moved = nearest(to_, scalbnf(code, static_cast<int>(fminf(exponent, 0.0F))));
    return scalbnf(moved, static_cast<int>(unit));
  }

  __device__ void store(int row, int column, float value) const {
    const int key = tile_.at.key() + column;
    auto* to = reinterpret_cast<std::uint8_t*>(tile_.s.weights) +
               swizzled<kWeightBytes>(tile_.at.query() + row, key / 8) + key % 8 * 2;
    constexpr float kMostBf16 = 3.38953139e38F;
    *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(held(value, kMostBf16));
  }

  const PairTile& tile_;
  const Operand& op_;
  const RoundTo& to_;
  std::uint64_t stream_;
  bool quantized_;
};

/// All warps' squares. `folds` are those of the warp's own.
__device__ inline void write_weights(const PairTile& tile, const GradientWeights& weights, const Folds& folds) {
  const SquareWeights of(tile, weights.rule[tile.kind(weights.kinds) == kCutTiles ? kCutTiles : kWholeTiles],
                         weights.stream);
  const auto adaptive = [](const GradientRule& rule) { return rule.operand.second_level == SecondLevel::adaptive; };
  if (adaptive(weights.rule[0]) || (weights.kinds > 1 && adaptive(weights.rule[1]))) {
    __syncthreads();
    if (threadIdx.x < kTileRows) tile.s.most[threadIdx.x] = 0;
    __syncthreads();
    const SquareWeights measured(tile, weights.rule[adaptive(weights.rule[0]) ? 0 : 1], weights.stream);
    if (tile.seen()) measured.measure_second_level(folds);
    __syncthreads();
  }
  if (tile.seen()) of.write(folds);
}

}  // namespace mxflash::cuda
