// Scale rules against their definitions in long double, which holds every product here without rounding.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
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
using test::magnitudes;
using test::name_of;
using test::neighbours;
using test::Tally;

constexpr std::array kRules = {ScaleRule::floor, ScaleRule::ceil, ScaleRule::uos};

// ---- Power-of-two scales ----

/// The definition of each rule, in long double (every product is exact there).
bool is_scale_exponent(Format format, ScaleRule rule, std::pair<float, int> maximum_and_exponent) {
  const auto [maximum, exponent] = maximum_and_exponent;
  const auto m = static_cast<long double>(maximum);
  if (rule == ScaleRule::floor) {  // 2^(e + emax) <= M < 2^(e + emax + 1)
    const long double power = std::ldexp(1.0L, exponent + spec_of(format).max_exponent);
    return power <= m && m < 2 * power;
  }
  const auto limit = static_cast<long double>(rule == ScaleRule::uos ? uos_threshold(format) : spec_of(format).max);
  const long double reach = std::ldexp(limit, exponent);  // the least e with M <= limit 2^e
  return m <= reach && m > reach / 2;
}

TEST(Formats, ScaleExponentFollowsItsDefinitionOverAllFp32) {
  std::vector<std::uint32_t> patterns;
  for (std::uint32_t bits = 1; bits < kInf; bits += 32749) patterns.push_back(bits);
  for (std::uint32_t bits = 1; bits < 2048; ++bits) patterns.push_back(bits);  // subnormals
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (const float edge : {1.0F, 448.0F, 57344.0F, 7.5F, 28.0F, 6.0F, 7.25F, 7.875F}) {
      const float centre = std::ldexp(edge, exponent - std::ilogb(edge));
      for (const std::uint32_t bits : neighbours(bits_of(centre))) patterns.push_back(bits);
    }
  }
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kRules) {
      Tally tally(fmt::format("{} rule {}", name_of(format), static_cast<int>(rule)));
      for (const std::uint32_t bits : patterns) {
        const int exponent = scale_exponent(format, rule, float_of(bits));
        tally.compare(bits, is_scale_exponent(format, rule, {float_of(bits), exponent}) ? 1 : 0, 1);
      }
    }
  }
}

TEST(Formats, CeilNeverSaturatesAndNeverWastesAnOctave) {
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    for (std::uint32_t bits = 0x00800000U; bits < kInf; bits += 65521) {
      const int exponent = scale_exponent(format, ScaleRule::ceil, float_of(bits));
      const double scaled = std::ldexp(static_cast<double>(float_of(bits)), -exponent);
      const auto max = static_cast<double>(spec_of(format).max);
      tally.compare(bits, scaled <= max && 2 * scaled > max ? 1 : 0, 1);
    }
  }
}

/// A block of one element: scale by the rule, encode, decode, scale back.
float quantized(Format format, ScaleRule rule, float value) {
  const int exponent = scale_exponent(format, rule, std::abs(value));
  return std::ldexp(decode(format, encode(format, std::ldexp(value, -exponent))), exponent);
}

TEST(Formats, C18_E4m3BlockMaximaByFloorAndCeil) {
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::floor, 957), 896);
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::ceil, 957), 960);
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::floor, 449), 448);
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::ceil, 449), 448);
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::floor, 511), 448);
  EXPECT_EQ(quantized(Format::e4m3, ScaleRule::ceil, 511), 512);
}

TEST(Formats, C18_E2m1BlockMaxima) {
  for (const ScaleRule rule : kRules) {
    EXPECT_EQ(quantized(Format::e2m1, rule, 2.7F), 3.0F);
    EXPECT_EQ(quantized(Format::e2m1, rule, 5.5F), 6.0F);
    EXPECT_EQ(quantized(Format::e2m1, rule, 1.2F), 1.0F);
  }
  for (const float value : {7.0F, 7.99F}) {
    EXPECT_EQ(quantized(Format::e2m1, ScaleRule::floor, value), 6.0F);
    EXPECT_EQ(quantized(Format::e2m1, ScaleRule::ceil, value), 8.0F);
  }
  EXPECT_EQ(quantized(Format::e2m1, ScaleRule::uos, 7.25F), 6.0F);
  EXPECT_EQ(quantized(Format::e2m1, ScaleRule::uos, std::nextafter(7.25F, 8.0F)), 8.0F);
}

TEST(Formats, C17_ScalingTheMaximumScalesTheResult) {
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kRules) {
      for (const float value : {1.0F, 1.2F, 2.7F, 5.5F, 7.99F, 449.0F}) {
        for (const int power : {-60, -1, 1, 13, 60}) {
          EXPECT_EQ(quantized(format, rule, std::ldexp(value, power)),
                    std::ldexp(quantized(format, rule, value), power));
        }
      }
    }
  }
}

TEST(Formats, E8m0ClampsAndRoundTrips) {
  for (int exponent = -127; exponent <= 127; ++exponent) {
    const std::uint8_t code = encode_e8m0(exponent);
    EXPECT_EQ(code, exponent + 127);
    EXPECT_EQ(decode_e8m0(code), std::ldexp(1.0F, exponent));
  }
  for (const int exponent : {-128, -300, std::numeric_limits<int>::min()}) EXPECT_EQ(encode_e8m0(exponent), 0);
  for (const int exponent : {128, 300, std::numeric_limits<int>::max()}) EXPECT_EQ(encode_e8m0(exponent), 254);
  EXPECT_TRUE(std::isnan(decode_e8m0(kE8m0Nan)));
}

// ---- NVFP4's scales ----

/// E4M3 of M / 6 by comparing M with six times each tie: exact in long double.
int nvfp4_scale_by_ties(const std::vector<float>& values, float maximum) {
  int code = 0;
  for (std::size_t i = 1; i < values.size(); ++i) {
    const long double tie = 3.0L * (static_cast<long double>(values[i - 1]) + static_cast<long double>(values[i]));
    const auto m = static_cast<long double>(maximum);
    if (m > tie || (m == tie && i % 2 == 0)) code = static_cast<int>(i);
  }
  return maximum > 0 ? std::max(code, 1) : 0;
}

TEST(Formats, C16_Nvfp4ScaleIsTheNearestE4m3OfASixth) {
  const std::vector<float> values = magnitudes(Format::e4m3);
  std::vector<std::uint32_t> patterns;
  for (std::size_t i = 1; i < values.size(); ++i) {
    for (const std::uint32_t bits : neighbours(bits_of(3.0F * (values[i - 1] + values[i])))) patterns.push_back(bits);
    for (const std::uint32_t bits : neighbours(bits_of(6.0F * values[i]))) patterns.push_back(bits);
  }
  for (std::uint32_t bits = 0; bits < kInf; bits += 131071) patterns.push_back(bits);
  for (std::uint32_t bits = bits_of(0.001F); bits < bits_of(3000.0F); bits += 8191) patterns.push_back(bits);
  for (const std::uint32_t bits : {1U, 2U, 0x007FFFFFU, 0x00800000U, 0x7F7FFFFFU}) patterns.push_back(bits);
  Tally tally("by ties");
  Tally division("by the FPU's division");
  for (const std::uint32_t bits : patterns) {
    const float maximum = float_of(bits);
    const int code = encode_nvfp4_scale(maximum);
    tally.compare(bits, code, nvfp4_scale_by_ties(values, maximum));
    const int divided = encode(Format::e4m3, maximum / 6.0F);
    division.compare(bits, code, maximum > 0 ? std::max(divided, 1) : 0);
  }
}

TEST(Formats, C16_Nvfp4ScaleReachesEveryCode) {
  for (int i = 1; i <= 126; ++i) {
    const auto code = static_cast<std::uint8_t>(i);
    EXPECT_EQ(encode_nvfp4_scale(6.0F * decode_ue4m3(code)), code);
  }
  for (int i = 1; i <= 7; ++i) {
    EXPECT_EQ(decode_ue4m3(static_cast<std::uint8_t>(i)), static_cast<float>(i) / 512.0F);
  }
  EXPECT_TRUE(std::isnan(decode_ue4m3(0x7F)));
  EXPECT_EQ(decode_ue4m3(0xFE), 448.0F) << "the sign bit is ignored";
}

TEST(Formats, C16_Nvfp4ScaleOnTiesAndBeyondTheRange) {
  // 17 and 19 of E4M3's units in [16, 32): amax / 6 exactly between two codes goes to the even one.
  EXPECT_EQ(decode_ue4m3(encode_nvfp4_scale(6.0F * 17.0F)), 16.0F);
  EXPECT_EQ(decode_ue4m3(encode_nvfp4_scale(6.0F * 19.0F)), 20.0F);
  EXPECT_EQ(decode_ue4m3(encode_nvfp4_scale(2688.0F)), 448.0F);
  EXPECT_EQ(decode_ue4m3(encode_nvfp4_scale(2689.0F)), 448.0F);
  EXPECT_EQ(decode_ue4m3(encode_nvfp4_scale(std::numeric_limits<float>::max())), 448.0F);
}

TEST(Formats, C15_Nvfp4ScaleOfTinyBlocksIsNotZero) {
  EXPECT_EQ(encode_nvfp4_scale(0.0F), 0);
  EXPECT_EQ(encode_nvfp4_scale(-0.0F), 0);
  for (const float maximum : {std::numeric_limits<float>::denorm_min(), 1e-30F, 6.0F / 1024.0F, 6.0F / 512.0F}) {
    EXPECT_EQ(encode_nvfp4_scale(maximum), 1) << maximum;
  }
}

}  // namespace
}  // namespace mxflash
