// Low-bit number formats and scale rules, in exact integer arithmetic on float bits: constexpr, host and device, no
// dependency. Sources: OCP 8-bit Floating Point (E4M3, E5M2), OCP Microscaling Formats v1.0 (E2M3, E3M2, E2M1, E8M0),
// NVFP4's UE4M3 block scale. Conversions to the low-bit formats saturate. Nothing depends on log2f, the current
// rounding mode, flushed subnormals or a compiler's fast division. Proof and sources: docs/formats.md.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MXFLASH_HOST_DEVICE __host__ __device__
#else
#define MXFLASH_HOST_DEVICE
#endif

namespace mxflash {

/// Element formats; a code lies in the low bits of a byte, sign first.
enum class Format : std::uint8_t { e4m3, e5m2, e2m3, e3m2, e2m1 };

enum class Specials : std::uint8_t {
  none,     ///< Every code is a finite number.
  nan,      ///< All-ones exponent and mantissa is NaN; no Inf (E4M3).
  inf_nan,  ///< IEEE 754: all-ones exponent is Inf or NaN (E5M2).
};

/// The layout of a format, as data.
struct FormatSpec {
  int exponent_bits = 0;
  int mantissa_bits = 0;
  int bias = 0;
  int max_exponent = 0;  ///< floor(log2(max)).
  float max = 0;         ///< Largest finite value.
  Specials specials = Specials::none;
};

MXFLASH_HOST_DEVICE constexpr FormatSpec spec_of(Format format) {
  switch (format) {
    case Format::e4m3: return {4, 3, 7, 8, 448.0F, Specials::nan};
    case Format::e5m2: return {5, 2, 15, 15, 57344.0F, Specials::inf_nan};
    case Format::e2m3: return {2, 3, 1, 2, 7.5F, Specials::none};
    case Format::e3m2: return {3, 2, 3, 4, 28.0F, Specials::none};
    case Format::e2m1: return {2, 1, 1, 2, 6.0F, Specials::none};
  }
  return {};
}

/// Codes are 0 .. code_count - 1.
MXFLASH_HOST_DEVICE constexpr int code_count(Format format) {
  const FormatSpec spec = spec_of(format);
  return 1 << (1 + spec.exponent_bits + spec.mantissa_bits);
}

namespace detail {

// std::bit_cast and std::countl_zero are host functions to a CUDA compiler; the builtin works on both sides.
MXFLASH_HOST_DEVICE constexpr std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
MXFLASH_HOST_DEVICE constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr std::uint32_t kAbsMask = 0x7FFFFFFFU;
inline constexpr std::uint32_t kInfBits = 0x7F800000U;
inline constexpr std::uint32_t kNanBits = 0x7FC00000U;

/// |x| = significand * 2^exponent with the significand below 2^24; exact for every finite float.
struct Parts {
  std::uint32_t significand = 0;
  int exponent = 0;
};

MXFLASH_HOST_DEVICE constexpr Parts split(std::uint32_t abs_bits) {
  const auto field = static_cast<int>(abs_bits >> 23);
  const std::uint32_t fraction = abs_bits & 0x7FFFFFU;
  return field == 0 ? Parts{fraction, -149} : Parts{fraction | 0x800000U, field - 150};
}

/// 2^exponent; below 2^-149 gives 0, above 2^127 gives Inf.
MXFLASH_HOST_DEVICE constexpr float pow2(int exponent) {
  if (exponent > 127) return float_of(kInfBits);
  if (exponent >= -126) return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
  return exponent < -149 ? 0.0F : float_of(1U << (exponent + 149));
}

/// floor(log2(x)) of a positive finite float given by its bits, subnormals included.
MXFLASH_HOST_DEVICE constexpr int floor_log2(std::uint32_t abs_bits) {
  if (abs_bits >= 0x800000U) return static_cast<int>(abs_bits >> 23) - 127;
  int exponent = -150;
  for (; abs_bits != 0; abs_bits >>= 1) ++exponent;
  return exponent;
}

/// The significand with its leading one moved to bit 23.
MXFLASH_HOST_DEVICE constexpr std::uint32_t normalized_significand(std::uint32_t abs_bits) {
  const Parts parts = split(abs_bits);
  return parts.significand << (parts.exponent + 23 - floor_log2(abs_bits));
}

/// The magnitude code of |x|, with `round` deciding from (kept, remainder, shift): the integer part of |x| in units of
/// the target's last place, the bits below it, and how many those are.
template <class Round>
MXFLASH_HOST_DEVICE constexpr std::uint32_t encode_magnitude(const FormatSpec& spec, std::uint32_t abs_bits,
                                                             Round round) {
  const std::uint32_t max_bits = bits_of(spec.max);
  const int mantissa = spec.mantissa_bits;
  const auto max_code = static_cast<std::uint32_t>(((spec.max_exponent + spec.bias) << mantissa) |
                                                   static_cast<int>((max_bits & 0x7FFFFFU) >> (23 - mantissa)));
  if (abs_bits >= max_bits) return max_code;
  if (abs_bits == 0) return 0;
  const Parts parts = split(abs_bits);
  const int min_exponent = 1 - spec.bias;
  const int exponent = floor_log2(abs_bits) > min_exponent ? floor_log2(abs_bits) : min_exponent;
  // A float subnormal is never a normal of the target, so shift >= 23 - mantissa > 0 for every input below max.
  const int shift = exponent - mantissa - parts.exponent;
  const std::uint64_t kept = shift > 31 ? 0 : parts.significand >> shift;
  const std::uint64_t remainder = parts.significand - (kept << (shift > 31 ? 31 : shift));
  const std::uint64_t rounded = kept + (round(kept, remainder, shift) ? 1U : 0U);
  // `rounded` may carry into the next binade; adding rather than or-ing the exponent field makes the carry right. It
  // cannot pass max_code: the input is below max, so the code below it is not max_code yet.
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(exponent + spec.bias - 1) << mantissa) + rounded);
}

MXFLASH_HOST_DEVICE constexpr std::uint8_t with_sign(const FormatSpec& spec, std::uint32_t bits, std::uint32_t code) {
  const std::uint32_t sign = (bits >> 31) << (spec.exponent_bits + spec.mantissa_bits);
  return static_cast<std::uint8_t>(sign | code);
}

/// The NaN code, or 0 where the format has none: there the block's scale has to carry the NaN.
MXFLASH_HOST_DEVICE constexpr std::uint32_t nan_code(const FormatSpec& spec) {
  return spec.specials == Specials::none ? 0U : (1U << (spec.exponent_bits + spec.mantissa_bits)) - 1U;
}

}  // namespace detail

/// The value of a code. Bits above the format's width are ignored.
MXFLASH_HOST_DEVICE constexpr float decode(Format format, std::uint8_t code) {
  const FormatSpec spec = spec_of(format);
  const int width = spec.exponent_bits + spec.mantissa_bits;
  const std::uint32_t magnitude = code & ((1U << width) - 1U);
  const std::uint32_t sign = ((static_cast<std::uint32_t>(code) >> width) & 1U) << 31;
  const std::uint32_t fraction = magnitude & ((1U << spec.mantissa_bits) - 1U);
  const auto field = static_cast<int>(magnitude >> spec.mantissa_bits);
  const int top = (1 << spec.exponent_bits) - 1;
  if (spec.specials == Specials::nan && magnitude == detail::nan_code(spec)) {
    return detail::float_of(sign | detail::kNanBits);
  }
  if (spec.specials == Specials::inf_nan && field == top) {
    return detail::float_of(sign | (fraction == 0 ? detail::kInfBits : detail::kNanBits));
  }
  const std::uint32_t significand = field == 0 ? fraction : fraction | (1U << spec.mantissa_bits);
  const int exponent = (field == 0 ? 1 : field) - spec.bias - spec.mantissa_bits;
  const float value = static_cast<float>(significand) * detail::pow2(exponent);
  return detail::float_of(detail::bits_of(value) | sign);
}

/// Nearest code, ties to even, saturating (Inf too). NaN gives the NaN code, or 0 in a format without one.
MXFLASH_HOST_DEVICE constexpr std::uint8_t encode(Format format, float value) {
  const FormatSpec spec = spec_of(format);
  const auto bits = detail::bits_of(value);
  const std::uint32_t abs_bits = bits & detail::kAbsMask;
  if (abs_bits > detail::kInfBits) {
    return detail::nan_code(spec) == 0 ? std::uint8_t{0} : detail::with_sign(spec, bits, detail::nan_code(spec));
  }
  const auto nearest_even = [](std::uint64_t kept, std::uint64_t remainder, int shift) {
    if (shift > 31) return false;
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    return remainder > half || (remainder == half && (kept & 1U) != 0);
  };
  return detail::with_sign(spec, bits, detail::encode_magnitude(spec, abs_bits, nearest_even));
}

/// Rounds away from zero with the probability of the remainder, to 32 bits: up when random < remainder * 2^32. The
/// same `random` gives the same code on every engine. Saturation and NaN as in encode.
MXFLASH_HOST_DEVICE constexpr std::uint8_t encode_stochastic(Format format, float value, std::uint32_t random) {
  const FormatSpec spec = spec_of(format);
  const auto bits = detail::bits_of(value);
  const std::uint32_t abs_bits = bits & detail::kAbsMask;
  if (abs_bits > detail::kInfBits) return encode(format, value);
  const auto by_chance = [random](std::uint64_t, std::uint64_t remainder, int shift) {
    const std::uint64_t threshold = shift <= 32   ? remainder << (32 - shift)
                                    : shift <= 63 ? remainder >> (shift - 32)
                                                  : 0;
    return random < threshold;
  };
  return detail::with_sign(spec, bits, detail::encode_magnitude(spec, abs_bits, by_chance));
}

/// How a power-of-two scale follows from a block's maximum M.
enum class ScaleRule : std::uint8_t {
  floor,  ///< floor(log2 M) - floor(log2 max): OCP Microscaling; saturates the upper part of the last octave.
  ceil,   ///< ceil(log2(M / max)): never saturates.
  uos,    ///< ceil(log2(M / uos_threshold)): saturates a little, for the least mean squared relative error.
};

/// The block maximum T, in units of the scale, above which `uos` takes the next power of two: the minimiser of the mean
/// squared rounding error relative to the block maximum, for elements uniform up to it and a maximum spread over one
/// octave. E2M1: the root 7.25 of (T-6)^3 + (8-T)^3 = 19/8. E2M3: 7.875. E4M3, E5M2 and E3M2 are flat from max to half
/// a step above it (they gain less than 1e-5), so they keep max, where nothing saturates. Derived in docs/formats.md.
MXFLASH_HOST_DEVICE constexpr float uos_threshold(Format format) {
  switch (format) {
    case Format::e2m1: return 7.25F;
    case Format::e2m3: return 7.875F;
    default: return spec_of(format).max;
  }
}

/// The exponent of the scale, unclamped. Precondition: maximum is positive and finite.
MXFLASH_HOST_DEVICE constexpr int scale_exponent(Format format, ScaleRule rule, float maximum) {
  const auto bits = detail::bits_of(maximum);
  const int exponent = detail::floor_log2(bits);
  if (rule == ScaleRule::floor) return exponent - spec_of(format).max_exponent;
  const float limit = rule == ScaleRule::uos ? uos_threshold(format) : spec_of(format).max;
  const auto limit_bits = detail::bits_of(limit);
  const int limit_exponent = detail::floor_log2(limit_bits);
  const bool above = detail::normalized_significand(bits) > detail::normalized_significand(limit_bits);
  return exponent - limit_exponent + (above ? 1 : 0);
}

/// E8M0: a biased power of two, 2^-127 .. 2^127, no zero; 0xFF is NaN.
inline constexpr std::uint8_t kE8m0Nan = 0xFF;
inline constexpr int kE8m0Bias = 127;

/// Clamps to the representable exponents.
MXFLASH_HOST_DEVICE constexpr std::uint8_t encode_e8m0(int exponent) {
  const int clamped = exponent < -kE8m0Bias ? -kE8m0Bias : exponent > kE8m0Bias ? kE8m0Bias : exponent;
  return static_cast<std::uint8_t>(clamped + kE8m0Bias);
}

MXFLASH_HOST_DEVICE constexpr float decode_e8m0(std::uint8_t code) {
  return code == kE8m0Nan ? detail::float_of(detail::kNanBits) : detail::pow2(static_cast<int>(code) - kE8m0Bias);
}

/// UE4M3: E4M3 without its sign, the block scale of NVFP4. 0x7F is NaN; the sign bit is ignored.
MXFLASH_HOST_DEVICE constexpr float decode_ue4m3(std::uint8_t code) {
  return decode(Format::e4m3, static_cast<std::uint8_t>(code & 0x7FU));
}

namespace detail {

/// |x| / 6 rounded to odd, for quotients that are normal floats: a second rounding, to at most 22 bits, is then exact.
MXFLASH_HOST_DEVICE constexpr std::uint32_t sixth_to_odd(std::uint32_t abs_bits) {
  const std::uint32_t dividend = normalized_significand(abs_bits) << 2;  // x / 6 = dividend / 3 * 2^(exponent - 26)
  const std::uint32_t quotient = dividend / 3U;
  const std::uint32_t inexact = dividend % 3U != 0 ? 1U : 0U;
  const std::uint32_t carry = quotient >> 24;  // 1: the quotient has 25 bits
  const std::uint32_t significand = (quotient >> carry) | (quotient & carry) | inexact;
  const auto field = static_cast<std::uint32_t>(floor_log2(abs_bits) + 127 - 3) + carry;
  return (field << 23) | (significand & 0x7FFFFFU);
}

}  // namespace detail

/// NVFP4's block scale: E4M3 of maximum / 6, at least 2^-9 when the maximum is positive, 0 when it is 0.
/// Precondition: maximum is finite and not negative.
MXFLASH_HOST_DEVICE constexpr std::uint8_t encode_nvfp4_scale(float maximum) {
  constexpr std::uint32_t kSixOver512 = 0x3C400000U;  // 6 * 2^-9
  const std::uint32_t abs_bits = detail::bits_of(maximum) & detail::kAbsMask;
  if (abs_bits <= kSixOver512) return abs_bits == 0 ? std::uint8_t{0} : std::uint8_t{1};
  return encode(Format::e4m3, detail::float_of(detail::sixth_to_odd(abs_bits)));
}

/// BF16 bits of a float, nearest even; overflow gives Inf, NaN stays NaN (quiet, payload's top bits kept).
MXFLASH_HOST_DEVICE constexpr std::uint16_t encode_bf16(float value) {
  const auto bits = detail::bits_of(value);
  if ((bits & detail::kAbsMask) > detail::kInfBits) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

MXFLASH_HOST_DEVICE constexpr float decode_bf16(std::uint16_t bits) {
  return detail::float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// FP16 bits of a float, nearest even; overflow gives Inf.
MXFLASH_HOST_DEVICE constexpr std::uint16_t encode_f16(float value) {
  const auto bits = detail::bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t abs_bits = bits & detail::kAbsMask;
  if (abs_bits > detail::kInfBits) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (abs_bits >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // 65520 and above
  if (abs_bits == 0) return static_cast<std::uint16_t>(sign);
  const detail::Parts parts = detail::split(abs_bits);
  const int top = detail::floor_log2(abs_bits);
  const int exponent = top > -14 ? top : -14;
  const int shift = exponent - 10 - parts.exponent;
  if (shift < 1 || shift > 31) return static_cast<std::uint16_t>(sign);  // never below 1: FP16 keeps fewer bits
  const std::uint32_t kept = parts.significand >> shift;
  const std::uint32_t remainder = parts.significand & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1);
  const std::uint32_t up = remainder > half || (remainder == half && (kept & 1U) != 0) ? 1U : 0U;
  return static_cast<std::uint16_t>(sign | ((static_cast<std::uint32_t>(exponent + 14) << 10) + kept + up));
}

MXFLASH_HOST_DEVICE constexpr float decode_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const int field = (bits >> 10) & 0x1F;
  const std::uint32_t fraction = bits & 0x3FFU;
  if (field == 0x1F) return detail::float_of(sign | (fraction == 0 ? detail::kInfBits : detail::kNanBits));
  const std::uint32_t significand = field == 0 ? fraction : fraction | 0x400U;
  const float value = static_cast<float>(significand) * detail::pow2((field == 0 ? 1 : field) - 25);
  return detail::float_of(detail::bits_of(value) | sign);
}

/// 32 random bits for one element: Philox4x32-10 (Salmon et al., SC'11) of counter (index, stream) under key `seed`.
/// Keyed, not sequential: the same arguments give the same bits on every engine and in every order.
MXFLASH_HOST_DEVICE constexpr std::uint32_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  std::uint32_t counter[4] = {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                              static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
  auto key0 = static_cast<std::uint32_t>(seed);
  auto key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    const std::uint32_t next0 = static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
    const std::uint32_t next2 = static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
    counter[1] = static_cast<std::uint32_t>(product1);
    counter[3] = static_cast<std::uint32_t>(product0);
    counter[0] = next0;
    counter[2] = next2;
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return counter[0];
}

}  // namespace mxflash
