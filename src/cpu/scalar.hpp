// What kernels call out of line, once per row or block: shared inline code must not be instantiated where it would be
// compiled for one instruction set and linked into all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/plan.hpp"
#include "reference/weights.hpp"

namespace mxflash::cpu {

/// How a format rounds, in FP32 bits: adding and subtracting 1.5 2^(exponent + 23 - mantissa bits) leaves the mantissa
/// bits that the format has, with the exponent held at or above that of the smallest normal number.
struct RoundTo {
  bool rounds = false;           ///< Not for f32.
  bool saturates = false;        ///< Not for bf16.
  std::int32_t least_field = 0;  ///< Exponent field of the smallest normal number, in place.
  std::int32_t magic = 0;
  int mantissa_bits = 23;
  float max = 0;
};
RoundTo round_to(Encoding encoding);

/// A power-of-two scale's exponent: that of the maximum less `limit_exponent`, + 1 where the mantissa bits of the
/// maximum are above `limit_mantissa`.
struct ScaleLimit {
  std::int32_t limit_exponent = 0;
  std::int32_t limit_mantissa = 0;
};
ScaleLimit scale_limit(const Operand& operand);
/// FP16, held at its largest number.
RoundTo round_to_f16();

/// |x|_2 and the largest |x| of 32 tokens, x [dims][32] times 2^exponents times `scale`.
struct TokenSizes {
  double norm[32] = {};
  double largest[32] = {};
};
TokenSizes token_sizes(const float* x, std::size_t dims, const std::int32_t* exponents, float scale);
/// The power of two that keeps an FP16 dQ of this bound below 2^14.
std::int32_t dq_exponent(double bound);

/// nvfp4's adaptive second level.
void second_levels(int count, const float* maxima, std::int32_t* exponents);

/// One row of any type and strides, widened.
void load_row(const TensorView& tensor, std::int64_t token, std::int64_t head, float* row);

/// An element of every token in [token, token + count) of a head, of any strides; a [tokens, heads, 1] tensor.
void load_tokens(const TensorView& tensor, std::int64_t token, std::int64_t count, std::int64_t head, float* values);

/// To any type, from element `offset` on; NaN stays NaN.
void convert_row(DType dtype, const float* row, std::int64_t count, std::byte* data, std::int64_t offset);

/// Natural logarithm of sum 2^reference; -inf where nothing is seen.
float log_sum(bool sees, double sum, float reference);

/// A weight 2^exponent / sum of the forward.
void count_probability(OctaveCounter& counter, double exponent, double sum, bool flushed);
/// dS before and after quantization.
void count_gradients(OctaveCounter& counter, const float* before, const float* after, int count);

/// Exponent that static weights are encoded with: log2 of what multiplies them.
int static_exponent(const Operand& weights);

}  // namespace mxflash::cpu
