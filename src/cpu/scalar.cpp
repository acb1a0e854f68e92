#include "cpu/scalar.hpp"

#include <cmath>
#include <limits>
#include <numbers>

#include "quantize/scales.hpp"

namespace mxflash::cpu {

RoundTo round_to(Encoding encoding) {
  constexpr int kFp32Mantissa = 23;
  if (encoding == Encoding::f32) return {};
  RoundTo out;
  out.rounds = true;
  int least = -126;
  out.mantissa_bits = 7;  // bf16
  if (const auto format = element_format(encoding)) {
    const FormatSpec spec = spec_of(*format);
    out.saturates = true;
    out.max = spec.max;
    out.mantissa_bits = spec.mantissa_bits;
    least = 1 - spec.bias;
  }
  out.least_field = (least + 127) << kFp32Mantissa;
  out.magic = ((kFp32Mantissa - out.mantissa_bits) << kFp32Mantissa) + 0x400000;
  return out;
}

ScaleLimit scale_limit(const Operand& operand) {
  constexpr std::uint32_t kMantissa = 0x7FFFFF;
  const Format format = *element_format(operand.encoding);
  const FormatSpec spec = spec_of(format);
  if (operand.rule == ScaleRule::floor) return {spec.max_exponent, static_cast<std::int32_t>(kMantissa)};
  const auto bits = detail::bits_of(operand.rule == ScaleRule::uos ? uos_threshold(format) : spec.max);
  return {detail::floor_log2(bits), static_cast<std::int32_t>(bits & kMantissa)};
}

RoundTo round_to_f16() {
  constexpr int kMantissa = 10;
  constexpr int kLeast = -14;
  RoundTo out;
  out.rounds = out.saturates = true;
  out.mantissa_bits = kMantissa;
  out.max = 65504.0F;
  out.least_field = (kLeast + 127) << 23;
  out.magic = ((23 - kMantissa) << 23) + 0x400000;
  return out;
}

TokenSizes token_sizes(const float* x, std::size_t dims, const std::int32_t* exponents, float scale) {
  TokenSizes out;
  for (std::size_t lane = 0; lane < 32; ++lane) {
    double sum = 0;
    double largest = 0;
    for (std::size_t d = 0; d < dims; ++d) {
      const double value = static_cast<double>(x[d * 32 + lane]) * static_cast<double>(scale);
      sum += value * value;
      largest = std::fmax(largest, std::fabs(value));
    }
    out.norm[lane] = std::ldexp(std::sqrt(sum), exponents[lane]);
    out.largest[lane] = std::ldexp(largest, exponents[lane]);
  }
  return out;
}

std::int32_t dq_exponent(double bound) {
  if (!(bound > 0) || std::isinf(bound)) return 0;
  return 14 - static_cast<std::int32_t>(std::ceil(std::log2(bound)));
}

void second_levels(int count, const float* maxima, std::int32_t* exponents) {
  for (int i = 0; i < count; ++i) exponents[i] = second_level_exponent(maxima[i]);
}

void load_row(const TensorView& tensor, std::int64_t token, std::int64_t head, float* row) {
  for (std::int64_t d = 0; d < tensor.dims(); ++d) row[d] = tensor.at(token, head, d);
}

void load_tokens(const TensorView& tensor, std::int64_t token, std::int64_t count, std::int64_t head, float* values) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = tensor.at(token + i, head, 0);
}

void convert_row(DType dtype, const float* row, std::int64_t count, std::byte* data, std::int64_t offset) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) store_element(data + (offset + i) * size, dtype, row[i]);
}

float log_sum(bool sees, double sum, float reference) {
  if (!sees) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(std::numbers::ln2 * (static_cast<double>(reference) + std::log2(sum)));
}

void count_probability(OctaveCounter& counter, double exponent, double sum, bool flushed) {
  counter.count(static_cast<float>(std::exp2(exponent) / sum), flushed);
}

void count_gradients(OctaveCounter& counter, const float* before, const float* after, int count) {
  for (int i = 0; i < count; ++i) counter.count(before[i], after[i] == 0.0F);
}

int static_exponent(const Operand& weights) { return spec_of(*element_format(weights.encoding)).max_exponent; }

}  // namespace mxflash::cpu
