// The codecs against two oracles: tables of two libraries (scripts/make_format_tables.py), and the FPU's own rounding
// in double precision.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "unit/formats_support.hpp"

namespace mxflash {
namespace {

using test::bits_of;
using test::float_of;
using test::kFormats;
using test::kInf;
using test::kSign;
using test::magnitudes;
using test::name_of;
using test::neighbours;
using test::Tally;

/// Lines of a table as words, comments left out.
std::vector<std::vector<std::string>> read_table(const std::string& name) {
  std::ifstream file(std::string(MXFLASH_TEST_DATA) + "/formats/" + name);
  EXPECT_TRUE(file) << name << " cannot be read";
  std::vector<std::vector<std::string>> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    std::istringstream words(line);
    lines.emplace_back();
    for (std::string word; words >> word;) lines.back().push_back(word);
  }
  return lines;
}

std::uint32_t hex(const std::string& word) { return static_cast<std::uint32_t>(std::stoul(word, nullptr, 16)); }

/// Round to nearest even by the FPU: `digits` bits after the point, no exponent below `min_exponent`, no upper limit.
double rounded_by_fpu(double x, int digits, int min_exponent) {
  if (x == 0.0) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), min_exponent) - digits);
  return std::copysign(std::nearbyint(x / unit) * unit, x);
}

double saturated(double x, double max) { return std::copysign(std::min(std::abs(x), max), x); }

// ---- Decoding ----

TEST(Formats, SpecsDescribeTheCodes) {
  for (const Format format : kFormats) {
    const FormatSpec spec = spec_of(format);
    const std::vector<float> values = magnitudes(format);
    EXPECT_EQ(values.back(), spec.max) << name_of(format);
    EXPECT_EQ(std::ilogb(spec.max), spec.max_exponent) << name_of(format);
    EXPECT_EQ(values.at(1), std::ldexp(1.0F, 1 - spec.bias - spec.mantissa_bits)) << name_of(format);
    EXPECT_EQ(values.at(std::size_t{1} << spec.mantissa_bits), std::ldexp(1.0F, 1 - spec.bias)) << name_of(format);
    EXPECT_TRUE(std::ranges::is_sorted(values)) << name_of(format);
    EXPECT_EQ(std::ranges::adjacent_find(values), values.end()) << name_of(format);
  }
}

TEST(Formats, DecodesEveryCodeAsBothLibraries) {
  std::map<std::string, Tally> tallies;
  std::map<std::string, int> codes;
  for (const auto& line : read_table("decode.txt")) {
    const std::string& format = line.at(0);
    const auto code = static_cast<std::uint8_t>(hex(line.at(1)));
    Tally& tally = tallies.try_emplace(format, format).first->second;
    ++codes[format];
    float got = format == "e8m0" ? decode_e8m0(code) : decode_ue4m3(code);
    for (const Format f : kFormats) {
      if (name_of(f) == format) got = decode(f, code);
    }
    tally.compare(code, static_cast<double>(got), static_cast<double>(float_of(hex(line.at(2)))));
  }
  const std::map<std::string, int> all = {{"e4m3", 256}, {"e5m2", 256}, {"e2m3", 64},  {"e3m2", 64},
                                          {"e2m1", 16},  {"e8m0", 256}, {"ue4m3", 128}};
  EXPECT_EQ(codes, all);
}

TEST(Formats, C19_AllCodesRoundTripWithNegativeZero) {
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    for (int i = 0; i < code_count(format); ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      const float value = decode(format, code);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(decode(format, encode(format, value))));
      } else if (std::isinf(value)) {  // E5M2's Inf saturates, as every overflow does
        EXPECT_EQ(decode(format, encode(format, value)), std::copysign(57344.0F, value));
      } else {
        tally.compare(code, encode(format, value), code);
      }
    }
    EXPECT_EQ(encode(format, -0.0F), code_count(format) / 2) << name_of(format);
    EXPECT_TRUE(std::signbit(decode(format, encode(format, -0.0F)))) << name_of(format);
  }
}

TEST(Formats, DecodeIgnoresBitsAboveTheWidth) {
  for (const Format format : {Format::e2m3, Format::e3m2, Format::e2m1}) {
    Tally tally(std::string(name_of(format)));
    for (int code = 0; code < 256; ++code) {
      const float narrow = decode(format, static_cast<std::uint8_t>(code % code_count(format)));
      tally.compare(static_cast<std::uint64_t>(code),
                    static_cast<double>(decode(format, static_cast<std::uint8_t>(code))), static_cast<double>(narrow));
    }
  }
}

// ---- Encoding ----

TEST(Formats, EncodesEveryBf16ValueAsBothLibraries) {
  const auto lines = read_table("encode_bf16.txt");
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    int covered = 0;
    for (const auto& line : lines) {
      if (line.at(0) != name_of(format)) continue;
      for (std::uint32_t pattern = hex(line.at(1)); pattern <= hex(line.at(2)); ++pattern, ++covered) {
        tally.compare(pattern, encode(format, decode_bf16(static_cast<std::uint16_t>(pattern))), hex(line.at(3)));
      }
    }
    EXPECT_EQ(covered, 65536 - 2 * 127) << "every pattern but the 254 NaNs";
    for (std::uint32_t fraction = 1; fraction < 0x80; ++fraction) {
      for (const std::uint32_t pattern : {0x7F80U | fraction, 0xFF80U | fraction}) {
        const float got = decode(format, encode(format, decode_bf16(static_cast<std::uint16_t>(pattern))));
        const bool has_nan = spec_of(format).specials != Specials::none;
        tally.compare(pattern, static_cast<double>(got), has_nan ? std::nan("") : 0.0);
      }
    }
  }
}

TEST(Formats, EncodesAnFp32SweepAsBothLibraries) {
  for (const Format format : kFormats) {
    std::map<std::uint32_t, std::uint32_t> table;
    for (const auto& line : read_table(fmt::format("encode_fp32_{}.txt", name_of(format)))) {
      table[hex(line.at(0))] = hex(line.at(1));
    }
    Tally tally(std::string(name_of(format)));
    for (const auto& [pattern, code] : table) tally.compare(pattern, encode(format, float_of(pattern)), code);

    // The table must hold each tie with four floats to each side, both signs.
    std::vector<float> values = magnitudes(format);
    values.push_back(2 * values.back() - values.at(values.size() - 2));
    std::size_t missing = 0;
    for (std::size_t i = 1; i < values.size(); ++i) {
      for (const std::uint32_t bits : neighbours(bits_of((values[i - 1] + values[i]) / 2))) {
        missing += (table.contains(bits) ? 0U : 1U) + (table.contains(bits | kSign) ? 0U : 1U);
      }
    }
    EXPECT_EQ(missing, 0U) << name_of(format);
  }
}

TEST(Formats, EncodeIsTheFpusRoundingOverAllFp32) {
  for (const Format format : kFormats) {
    const FormatSpec spec = spec_of(format);
    Tally tally(std::string(name_of(format)));
    float previous = 0;
    for (std::uint32_t bits = 0; bits < kInf; bits += 9973) {
      const float value = float_of(bits);
      const double rounded = rounded_by_fpu(static_cast<double>(value), spec.mantissa_bits, 1 - spec.bias);
      const float got = decode(format, encode(format, value));
      tally.compare(bits, static_cast<double>(got), saturated(rounded, static_cast<double>(spec.max)));
      tally.compare(bits | kSign, static_cast<double>(decode(format, encode(format, -value))),
                    -static_cast<double>(got));
      ASSERT_LE(previous, got) << name_of(format) << " is not monotonic at " << value;
      previous = got;
    }
  }
}

TEST(Formats, C19_RoundsE2m1TiesToEven) {
  const std::vector<std::pair<float, float>> cases = {
      {0.25F, 0.0F}, {0.25000006F, 0.5F}, {0.75F, 1.0F}, {1.25F, 1.0F},      {1.75F, 2.0F},
      {2.5F, 2.0F},  {3.5F, 4.0F},        {5.0F, 4.0F},  {5.0000005F, 6.0F}, {-1.25F, -1.0F}};
  for (const auto& [value, want] : cases) {
    EXPECT_EQ(decode(Format::e2m1, encode(Format::e2m1, value)), want) << value;
    EXPECT_EQ(decode(Format::e2m1, encode(Format::e2m1, -value)), -want) << -value;
  }
}

TEST(Formats, C20_E4m3SaturatesAndKeepsNan) {
  for (const float value : {464.0F, 465.0F, 1000.0F, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(decode(Format::e4m3, encode(Format::e4m3, value)), 448.0F) << value;
    EXPECT_EQ(decode(Format::e4m3, encode(Format::e4m3, -value)), -448.0F) << -value;
  }
  for (const std::uint32_t bits : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU}) {
    EXPECT_EQ(encode(Format::e4m3, float_of(bits)), 0x7F);
    EXPECT_EQ(encode(Format::e4m3, float_of(bits | kSign)), 0xFF);
    EXPECT_TRUE(std::isnan(decode(Format::e5m2, encode(Format::e5m2, float_of(bits)))));
  }
}

TEST(Formats, C20_InfSaturatesInEveryFormat) {
  // The code of an Inf says nothing about it: whoever quantizes has to put a NaN in the scale.
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Format format : kFormats) {
    EXPECT_EQ(decode(format, encode(format, kInfinity)), spec_of(format).max) << name_of(format);
    EXPECT_EQ(decode(format, encode(format, -kInfinity)), -spec_of(format).max) << name_of(format);
  }
}

// ---- BF16 and FP16 ----

/// Every tie of a 16-bit format with four floats to each side, and a scan of all patterns; positive and finite.
template <class Decode>
std::vector<std::uint32_t> sixteen_bit_sweep(std::uint32_t inf_pattern, Decode decode_pattern) {
  std::vector<std::uint32_t> patterns;
  for (std::uint32_t p = 0; p + 1 < inf_pattern; ++p) {
    const auto low = static_cast<double>(decode_pattern(static_cast<std::uint16_t>(p)));
    const auto high = static_cast<double>(decode_pattern(static_cast<std::uint16_t>(p + 1)));
    for (const std::uint32_t bits : neighbours(bits_of(static_cast<float>((low + high) / 2)))) patterns.push_back(bits);
  }
  for (std::uint32_t bits = 0; bits < kInf; bits += 9973) patterns.push_back(bits);
  for (const std::uint32_t bits : neighbours(0x477FF000U, 8)) patterns.push_back(bits);   // FP16 overflows at 65520
  for (std::uint32_t bits = 0x7F7F7FF0U; bits <= kInf; ++bits) patterns.push_back(bits);  // BF16 overflows here
  return patterns;
}

double overflowed(double x, double max) {
  return std::abs(x) > max ? std::copysign(std::numeric_limits<double>::infinity(), x) : x;
}

TEST(Formats, Bf16IsTheFpusRounding) {
  Tally tally("bf16");
  for (const std::uint32_t bits : sixteen_bit_sweep(0x7F80U, decode_bf16)) {
    const auto x = static_cast<double>(float_of(bits));
    const double rounded = std::isinf(x) ? x : rounded_by_fpu(x, 7, -126);
    const double want = overflowed(rounded, static_cast<double>(float_of(0x7F7F0000U)));
    tally.compare(bits, static_cast<double>(decode_bf16(encode_bf16(float_of(bits)))), want);
    tally.compare(bits | kSign, static_cast<double>(decode_bf16(encode_bf16(float_of(bits | kSign)))), -want);
  }
}

TEST(Formats, F16IsTheFpusRounding) {
  Tally tally("f16");
  for (const std::uint32_t bits : sixteen_bit_sweep(0x7C00U, decode_f16)) {
    const auto x = static_cast<double>(float_of(bits));
    const double want = overflowed(std::isinf(x) ? x : rounded_by_fpu(x, 10, -14), 65504.0);
    tally.compare(bits, static_cast<double>(decode_f16(encode_f16(float_of(bits)))), want);
    tally.compare(bits | kSign, static_cast<double>(decode_f16(encode_f16(float_of(bits | kSign)))), -want);
  }
}

#ifdef __FLT16_MAX__
#ifdef __ARM_FP16_FORMAT_IEEE
using Half = __fp16;  // There g++ 12 has no _Float16 in C++.
#else
using Half = _Float16;
#endif
TEST(Formats, F16IsTheCompilersConversion) {
  Tally encoding("encode");
  for (const std::uint32_t bits : sixteen_bit_sweep(0x7C00U, decode_f16)) {
    for (const std::uint32_t pattern : {bits, bits | kSign}) {
      const auto want = std::bit_cast<std::uint16_t>(static_cast<Half>(float_of(pattern)));
      encoding.compare(pattern, encode_f16(float_of(pattern)), want);
    }
  }
  Tally decoding("decode");
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto want = static_cast<double>(std::bit_cast<Half>(static_cast<std::uint16_t>(pattern)));
    decoding.compare(pattern, static_cast<double>(decode_f16(static_cast<std::uint16_t>(pattern))), want);
  }
}
#endif

TEST(Formats, SixteenBitPatternsRoundTrip) {
  Tally tally("bf16 and f16");
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    const bool bf16_nan = std::isnan(decode_bf16(pattern));
    const bool f16_nan = std::isnan(decode_f16(pattern));
    EXPECT_EQ(bf16_nan, (i & 0x7FFFU) > 0x7F80U);
    EXPECT_EQ(f16_nan, (i & 0x7FFFU) > 0x7C00U);
    if (bf16_nan) {
      tally.compare(i, encode_bf16(decode_bf16(pattern)), static_cast<double>(i | 0x40U));
    } else {
      tally.compare(i, encode_bf16(decode_bf16(pattern)), i);
    }
    if (f16_nan) {
      EXPECT_TRUE(std::isnan(decode_f16(encode_f16(decode_f16(pattern)))));
    } else {
      tally.compare(i, encode_f16(decode_f16(pattern)), i);
    }
  }
}

// ---- Compile time ----

static_assert(decode(Format::e4m3, 0x7E) == 448.0F && encode(Format::e4m3, 464.5F) == 0x7E);
static_assert(decode(Format::e5m2, 0x01) == 0x1p-16F && encode(Format::e5m2, 1e9F) == 0x7B);
static_assert(encode(Format::e2m3, -0.0625F) == 0x20 && decode(Format::e2m3, 0x1F) == 7.5F);
static_assert(encode(Format::e3m2, 28.0F) == 0x1F && code_count(Format::e3m2) == 64);
static_assert(encode(Format::e2m1, 5.0F) == 0x6 && encode(Format::e2m1, 0x1p-149F) == 0);
static_assert(encode_stochastic(Format::e2m1, 5.0F, 0x7FFFFFFFU) == 0x7);
static_assert(encode_stochastic(Format::e2m1, 5.0F, 0x80000000U) == 0x6);
static_assert(scale_exponent(Format::e4m3, ScaleRule::floor, 0x1p-149F) == -157);
static_assert(scale_exponent(Format::e2m1, ScaleRule::ceil, 6.0F) == 0);
static_assert(scale_exponent(Format::e2m1, ScaleRule::uos, 7.5F) == 1);
static_assert(decode_e8m0(encode_e8m0(-127)) == 0x1p-127F && decode_e8m0(254) == 0x1p127F);
static_assert(encode_nvfp4_scale(2689.0F) == 0x7E && decode_ue4m3(encode_nvfp4_scale(1e-20F)) == 0x1p-9F);
static_assert(encode_bf16(1.00390625F) == 0x3F80 && decode_bf16(0x3F80) == 1.0F);
static_assert(encode_f16(65520.0F) == 0x7C00 && decode_f16(encode_f16(0x1p-24F)) == 0x1p-24F);
static_assert(random_bits(0, 0, 0) == 0x6627e8d5U);

}  // namespace
}  // namespace mxflash
