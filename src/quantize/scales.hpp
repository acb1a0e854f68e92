// Scales and element codes shared by the token operands (q, k, v, dO) and by the weights (P, dS).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mxflash/recipe.hpp"

namespace mxflash {

/// value 2^exponent, as std::ldexp and much faster: exact unless the result leaves double's normal range.
inline double times_pow2(double value, int exponent) {
  if (exponent < -1022 || exponent > 1023) return std::ldexp(value, exponent);
  return value * std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// nvfp4's adaptive second level: the smallest power of two that brings `maximum` within UE4M3 x E2M1 (448 x 6), kept
/// within the exponents of a normal float. Precondition: finite, not negative.
MXFLASH_HOST_DEVICE inline int second_level_exponent(float maximum) {
  if (maximum == 0.0F) return 0;
  constexpr float limit = 448.0F * 6.0F;
  int exponent = detail::floor_log2(detail::bits_of(maximum)) - detail::floor_log2(detail::bits_of(limit));
  if (exponent >= -126 && maximum * detail::pow2(-exponent) > limit) ++exponent;
  return exponent < -126 ? -126 : exponent;
}

/// One block's scale, as the engines store it.
struct BlockScale {
  std::uint8_t code = 0;  ///< E8M0 or UE4M3.
  int exponent = 0;       ///< Of an E8M0 scale.
  float divisor = 1;      ///< Of a UE4M3 scale; 0 for an all-zero block.
};

/// Precondition: the operand is quantized with block scales; maximum is finite and not negative.
MXFLASH_HOST_DEVICE inline BlockScale block_scale(const Operand& operand, float maximum) {
  if (operand.encoding == Encoding::nvfp4) {
    const std::uint8_t code = encode_nvfp4_scale(maximum);
    return {code, 0, decode_ue4m3(code)};
  }
  if (maximum == 0.0F) return {encode_e8m0(-kE8m0Bias), -kE8m0Bias, 1.0F};
  const std::uint8_t code = encode_e8m0(scale_exponent(*element_format(operand.encoding), operand.rule, maximum));
  return {code, static_cast<int>(code) - kE8m0Bias, 1.0F};
}

/// What multiplies a decoded element.
MXFLASH_HOST_DEVICE inline float scale_value(const Operand& operand, const BlockScale& scale) {
  return operand.encoding == Encoding::nvfp4 ? scale.divisor : detail::pow2(scale.exponent);
}

/// The code of one element. NVFP4 divides, correctly rounded: a multiplication by the reciprocal moves ties.
MXFLASH_HOST_DEVICE inline std::uint8_t encode_element(const Operand& operand, const BlockScale& scale, float value,
                                                       std::uint32_t random) {
  if (operand.encoding == Encoding::nvfp4) {
    value = scale.divisor == 0.0F ? 0.0F : value / scale.divisor;
  } else {
    value *= detail::pow2(-scale.exponent);
  }
  const Format format = *element_format(operand.encoding);
  return operand.rounding == Rounding::stochastic ? encode_stochastic(format, value, random) : encode(format, value);
}

/// Streams of random bits, by operand; dS takes two, one for each of its products.
enum class Stream : std::uint64_t { none = 0, dout_dp = 1, dout_dv = 2, v_dp = 3, k_dq = 4, q_dk = 5, ds = 6 };

/// Keys the random bits of one element: place in the document, never in the pack, so that a document's codes do not
/// depend on its neighbours.
MXFLASH_HOST_DEVICE inline std::uint32_t element_random(std::uint64_t seed, std::uint64_t stream, std::int64_t head,
                                                        std::int64_t row, std::int64_t column) {
  return random_bits(seed, (stream << 32) | static_cast<std::uint64_t>(head),
                     (static_cast<std::uint64_t>(row) << 32) | static_cast<std::uint64_t>(column));
}

/// Rows of a tile over which nvfp4's adaptive second level is shared.
inline constexpr std::int64_t kSecondLevelRows = 128;

}  // namespace mxflash
