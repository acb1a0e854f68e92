// The formats against three oracles: tables of two libraries (scripts/make_format_tables.py), the FPU's own rounding in
// double precision, and exact comparisons in long double, which holds every product here without rounding.
#include "mxflash/formats.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

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
#include <string_view>
#include <utility>
#include <vector>

namespace mxflash {
namespace {

constexpr std::array kFormats = {Format::e4m3, Format::e5m2, Format::e2m3, Format::e3m2, Format::e2m1};
constexpr std::array kRules = {ScaleRule::floor, ScaleRule::ceil, ScaleRule::uos};
constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInf = 0x7F800000U;

std::string_view name_of(Format format) {
  constexpr std::array<std::string_view, 5> names = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1"};
  return names.at(static_cast<std::size_t>(format));
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// Counts comparisons and keeps the first that failed, so that a broken codec prints one line and not a million.
class Tally {
 public:
  explicit Tally(std::string what) : what_(std::move(what)) {}
  ~Tally() {
    EXPECT_GT(compared_, 0) << what_ << ": nothing was compared";
    EXPECT_EQ(failed_, 0) << what_ << ": of " << compared_ << ", the first at " << first_;
  }
  Tally(const Tally&) = delete;
  Tally& operator=(const Tally&) = delete;

  /// `place` is any unsigned pattern that finds the input again.
  void compare(std::uint64_t place, double got, double want) {
    ++compared_;
    const bool same = std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want);
    if (same) return;
    if (failed_++ == 0) first_ = fmt::format("0x{:08x}: got {:.9g}, want {:.9g}", place, got, want);
  }

 private:
  std::string what_;
  std::string first_;
  std::int64_t compared_ = 0;
  std::int64_t failed_ = 0;
};

/// The non-negative finite values of a format, ascending; their index is their code.
std::vector<float> magnitudes(Format format) {
  std::vector<float> values;
  for (int code = 0; code < code_count(format) / 2; ++code) {
    const float value = decode(format, static_cast<std::uint8_t>(code));
    if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

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

/// Float patterns at `bits` and up to `reach` to each side, finite and positive.
std::vector<std::uint32_t> neighbours(std::uint32_t bits, std::uint32_t reach = 4) {
  std::vector<std::uint32_t> result;
  for (std::uint32_t b = bits < reach ? 0 : bits - reach; b <= bits + reach; ++b) {
    if (b > 0 && b < kInf) result.push_back(b);
  }
  return result;
}

/// Round to nearest even by the FPU: `digits` bits after the point, no exponent below `min_exponent`, no upper limit.
double rounded_by_fpu(double x, int digits, int min_exponent) {
  if (x == 0.0) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), min_exponent) - digits);
  return std::copysign(std::nearbyint(x / unit) * unit, x);
}

double saturated(double x, double max) { return std::copysign(std::min(std::abs(x), max), x); }

// ---------------------------------------------------------------------------------------------------------- decoding

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

// ---------------------------------------------------------------------------------------------------------- encoding

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

// ------------------------------------------------------------------------------------------------ stochastic rounding

/// Up if and only if random < floor(fraction * 2^32), with the fraction from long double arithmetic.
void expect_threshold(Tally& tally, Format format, std::uint8_t below, float value) {
  const auto low = static_cast<long double>(decode(format, below));
  const auto high = static_cast<long double>(decode(format, static_cast<std::uint8_t>(below + 1)));
  const long double fraction = (static_cast<long double>(value) - low) / (high - low);
  const auto threshold = static_cast<std::int64_t>(std::floor(std::ldexp(fraction, 32)));
  const std::int64_t last = std::numeric_limits<std::uint32_t>::max();
  for (const std::int64_t random : {std::int64_t{0}, threshold - 1, threshold, threshold + 1, last}) {
    if (random < 0 || random > last) continue;
    const int want = below + (random < threshold ? 1 : 0);
    const auto bits = static_cast<std::uint32_t>(random);
    const std::uint64_t place = (static_cast<std::uint64_t>(bits) << 32) | bits_of(value);
    tally.compare(place, encode_stochastic(format, value, bits), want);
    tally.compare(place | kSign, encode_stochastic(format, -value, bits), want + (code_count(format) >> 1));
  }
}

TEST(Formats, StochasticRoundingHasTheExactThresholdBetweenAllCodes) {
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    const std::vector<float> values = magnitudes(format);
    for (std::size_t i = 0; i + 1 < values.size(); ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      for (int k = 0; k < 64; ++k) {
        expect_threshold(tally, format, code, values[i] + (values[i + 1] - values[i]) * static_cast<float>(k) / 64.0F);
      }
      for (std::uint32_t k = 1; k <= 4; ++k) {
        expect_threshold(tally, format, code, float_of(bits_of(values[i]) + k));
        expect_threshold(tally, format, code, float_of(bits_of(values[i + 1]) - k));
      }
    }
    // Far below the smallest value: the fraction shrinks to 2^-32 and then to nothing.
    for (int exponent = -149; exponent < std::ilogb(values[1]); ++exponent) {
      expect_threshold(tally, format, 0, std::ldexp(1.0F, exponent));
      expect_threshold(tally, format, 0, std::ldexp(1.99F, exponent));
    }
  }
}

TEST(Formats, StochasticRoundingCountsExactlyAndHasNoBias) {
  // Of 2^16 evenly spaced random words, a fraction k / 2^8 rounds up exactly k * 2^8 times.
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    const std::vector<float> values = magnitudes(format);
    for (std::size_t i = 0; i + 1 < values.size(); i += 1 + values.size() / 8) {
      for (int k = 0; k < 256; k += 15) {
        const float value = values[i] + (values[i + 1] - values[i]) * static_cast<float>(k) / 256.0F;
        int up = 0;
        for (std::uint32_t word = 0; word < 65536; ++word) {
          up += encode_stochastic(format, value, (word << 16) | 0x8000U) == i + 1 ? 1 : 0;
        }
        tally.compare(bits_of(value), up, k * 256);
      }
    }
  }
}

TEST(Formats, StochasticRoundingWithKeyedBitsHasTheRightMean) {
  constexpr int kCount = 1 << 18;
  for (const float value : {0.1F, 1.3F, 2.9F, 4.2F, 5.999F, -3.7F}) {
    for (const std::uint64_t seed : {0ULL, 7ULL}) {
      double sum = 0;
      for (std::uint64_t i = 0; i < kCount; ++i) {
        sum +=
            static_cast<double>(decode(Format::e2m1, encode_stochastic(Format::e2m1, value, random_bits(seed, 3, i))));
      }
      // The step is at most 2, so the deviation of one draw is at most 1: five deviations of the mean.
      EXPECT_NEAR(sum / kCount, static_cast<double>(value), 5.0 / std::sqrt(kCount)) << value;
    }
  }
}

TEST(Formats, StochasticRoundingNeverMovesARepresentableValue) {
  for (const Format format : kFormats) {
    Tally tally(std::string(name_of(format)));
    for (int code = 0; code < code_count(format); ++code) {
      const float value = decode(format, static_cast<std::uint8_t>(code));
      if (!std::isfinite(value)) continue;
      for (const std::uint32_t random : {0U, 1U, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFFFU}) {
        tally.compare(random, encode_stochastic(format, value, random), code);
      }
    }
  }
}

TEST(Formats, StochasticRoundingSaturatesAndKeepsNan) {
  for (const Format format : kFormats) {
    const float max = spec_of(format).max;
    for (const std::uint32_t random : {0U, 0x80000000U, 0xFFFFFFFFU}) {
      for (const float value : {std::nextafter(max, 1e38F), 1.01F * max, 1e30F, float_of(kInf)}) {
        EXPECT_EQ(decode(format, encode_stochastic(format, value, random)), max) << name_of(format);
        EXPECT_EQ(decode(format, encode_stochastic(format, -value, random)), -max) << name_of(format);
      }
      EXPECT_EQ(encode_stochastic(format, float_of(0x7FC00000U), random), encode(format, float_of(0x7FC00000U)));
    }
  }
}

TEST(Formats, RandomBitsMatchPhiloxsKnownAnswers) {
  // Random123's kat_vectors, philox4x32 with 10 rounds, word 0.
  EXPECT_EQ(random_bits(0, 0, 0), 0x6627e8d5U);
  EXPECT_EQ(random_bits(~0ULL, ~0ULL, ~0ULL), 0x408f276dU);
  EXPECT_EQ(random_bits(0x299f31d0a4093822ULL, 0x0370734413198a2eULL, 0x85a308d3243f6a88ULL), 0xd16cfe09U);
}

TEST(Formats, RandomBitsDependOnEveryBitOfTheKey) {
  // About half of the 32 bits change with any one bit of seed, stream or index; the same key gives the same bits.
  const std::array<std::uint64_t, 3> key = {42, 1, 1000};
  const std::uint32_t base = random_bits(key[0], key[1], key[2]);
  EXPECT_EQ(base, random_bits(key[0], key[1], key[2]));
  int total = 0;
  for (std::size_t argument = 0; argument < 3; ++argument) {
    for (int bit = 0; bit < 64; ++bit) {
      auto changed = key;
      changed[argument] ^= 1ULL << bit;
      const int distance = std::popcount(base ^ random_bits(changed[0], changed[1], changed[2]));
      EXPECT_GT(distance, 3) << "argument " << argument << ", bit " << bit;
      total += distance;
    }
  }
  EXPECT_NEAR(total / 192.0, 16.0, 1.0);
}

// --------------------------------------------------------------------------------------------------------- scale rules

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

// ---------------------------------------------------------------------------------------------------------- NVFP4
// scale

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

// -------------------------------------------------------------------------------------------------------- BF16 and
// FP16

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
TEST(Formats, F16IsTheCompilersConversion) {
  Tally encoding("encode");
  for (const std::uint32_t bits : sixteen_bit_sweep(0x7C00U, decode_f16)) {
    for (const std::uint32_t pattern : {bits, bits | kSign}) {
      const auto want = std::bit_cast<std::uint16_t>(static_cast<_Float16>(float_of(pattern)));
      encoding.compare(pattern, encode_f16(float_of(pattern)), want);
    }
  }
  Tally decoding("decode");
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto want = static_cast<double>(std::bit_cast<_Float16>(static_cast<std::uint16_t>(pattern)));
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

// ---------------------------------------------------------------------------------------------------- the uos
// threshold

/// The mean squared error of rounding x uniform on [0, M], by the exact integral over the format's grid, for the grid
/// itself (scale 1) and the grid doubled (scale 2). Derivation: docs/formats.md.
class RoundingError {
 public:
  explicit RoundingError(Format format) {
    for (const float value : magnitudes(format)) grid_.push_back(static_cast<long double>(value));
    const std::size_t n = grid_.size();
    for (std::size_t i = 0; i < n; ++i) {
      for (const long double scale : {1.0L, 2.0L}) {
        breaks_.push_back(scale * grid_[i]);
        if (i + 1 < n) breaks_.push_back(scale * (grid_[i] + grid_[i + 1]) / 2);
      }
    }
    std::ranges::sort(breaks_);
    breaks_.erase(std::ranges::unique(breaks_).begin(), breaks_.end());
    squares_.resize(breaks_.size());
    excess_.resize(breaks_.size());
    for (std::size_t i = 0; i + 1 < breaks_.size(); ++i) {
      squares_[i + 1] = squares_[i] + square(breaks_[i], breaks_[i + 1]);
      excess_[i + 1] = excess_[i] + difference(breaks_[i], breaks_[i + 1]);
    }
  }

  /// The integral over [0, m] of (x - Q(x))^2 at scale 1.
  [[nodiscard]] long double squared(long double m) const {
    const std::size_t i = segment(m);
    return squares_[i] + square(breaks_[i], m);
  }

  /// How much more the same integral is at scale 1 than at scale 2. The two are never subtracted: wherever both grids
  /// round alike they cancel exactly, which for E5M2 is the only way to see 2^-47 beside 2^40.
  [[nodiscard]] long double excess(long double m) const {
    const std::size_t i = segment(m);
    return excess_[i] + difference(breaks_[i], m);
  }

  /// The mean squared error relative to M^2, at scale 1 or 2.
  [[nodiscard]] long double relative(long double m) const { return squared(m) / (m * m * m); }
  [[nodiscard]] long double relative_doubled(long double m) const { return (squared(m) - excess(m)) / (m * m * m); }

 private:
  [[nodiscard]] std::size_t segment(long double m) const {
    const auto above = std::ranges::upper_bound(breaks_, m);
    return static_cast<std::size_t>(above - breaks_.begin()) - 1;
  }
  /// The value nearest to every point strictly inside (a, b), which holds no tie.
  [[nodiscard]] long double nearest(long double a, long double b, long double scale) const {
    const long double middle = (a + b) / 2;
    const auto closer = [&](long double x, long double y) {
      return std::abs(scale * x - middle) < std::abs(scale * y - middle);
    };
    return scale * *std::ranges::min_element(grid_, closer);
  }
  [[nodiscard]] long double square(long double a, long double b) const {
    const long double q = nearest(a, b, 1);
    return ((b - q) * (b - q) * (b - q) - (a - q) * (a - q) * (a - q)) / 3;
  }
  [[nodiscard]] long double difference(long double a, long double b) const {
    const long double q1 = nearest(a, b, 1);
    const long double q2 = nearest(a, b, 2);
    return (q2 - q1) * (b - a) * (a + b - q1 - q2);
  }

  std::vector<long double> grid_;
  std::vector<long double> breaks_;
  std::vector<long double> squares_;
  std::vector<long double> excess_;
};

/// The objective J(T) for thresholds T at the cells' edges of one octave [2^emax, 2^(emax + 1)]: below T scale 1, above
/// it scale 2. Index 0 is the octave's low end.
struct Objective {
  static constexpr int kCells = 1 << 12;
  std::vector<long double> mean = std::vector<long double>(kCells + 1);
  long double low = 0;

  [[nodiscard]] long double threshold(std::size_t i) const { return low * (1 + static_cast<long double>(i) / kCells); }
  [[nodiscard]] std::size_t index(long double t) const {
    return static_cast<std::size_t>(std::lround((t / low - 1) * kCells));
  }
  [[nodiscard]] std::size_t best() const {
    return static_cast<std::size_t>(std::ranges::min_element(mean) - mean.begin());
  }
};

enum class Spread { uniform, log_uniform };

Objective objective_of(Format format, Spread spread) {
  const RoundingError error(format);
  Objective objective;
  objective.low = std::ldexp(1.0L, spec_of(format).max_exponent);
  const auto weight = [&](std::size_t i) {
    return spread == Spread::uniform ? 1.0L : 1 / (objective.threshold(i) + objective.threshold(i + 1));
  };
  const auto centre = [&](std::size_t i) { return (objective.threshold(i) + objective.threshold(i + 1)) / 2; };
  long double total = 0;
  for (std::size_t i = 0; i < Objective::kCells; ++i) {
    objective.mean[0] += weight(i) * error.relative_doubled(centre(i));
    total += weight(i);
  }
  for (std::size_t i = 0; i < Objective::kCells; ++i) {
    const long double m = centre(i);
    objective.mean[i + 1] = objective.mean[i] + weight(i) * error.excess(m) / (m * m * m);
  }
  for (long double& mean : objective.mean) mean /= total;
  return objective;
}

/// The zero of the excess above max: where scale 1 stops being the better one.
long double crossing(Format format) {
  const RoundingError error(format);
  const std::vector<float> values = magnitudes(format);
  const auto max = static_cast<long double>(values.back());
  long double low = max;
  long double high = 2 * max - static_cast<long double>(values.at(values.size() - 2));
  EXPECT_LT(error.excess(low), 0) << name_of(format);
  EXPECT_GT(error.excess(high), 0) << name_of(format);
  for (int i = 0; i < 120; ++i) {
    const long double middle = (low + high) / 2;
    (error.excess(middle) < 0 ? low : high) = middle;
  }
  return (low + high) / 2;
}

/// max + h/2 + sqrt(delta / h): h is the step below max, delta = 2^(m-1) u^3 what scale 1's finer subnormals save.
long double closed_form(Format format) {
  const std::vector<float> values = magnitudes(format);
  const auto max = static_cast<long double>(values.back());
  const long double h = max - static_cast<long double>(values.at(values.size() - 2));
  const auto u = static_cast<long double>(values.at(1));
  const long double delta = std::ldexp(u * u * u, spec_of(format).mantissa_bits - 1);
  return max + h / 2 + std::sqrt(delta / h);
}

TEST(Formats, UosIntegralIsTheErrorOfTheCodec) {
  constexpr int kSamples = 1 << 14;
  for (const Format format : kFormats) {
    const RoundingError error(format);
    for (const float fraction : {0.3F, 0.7F, 1.0F, 1.1F}) {
      const float m = fraction * spec_of(format).max;
      double scale1 = 0;
      double scale2 = 0;
      for (int i = 0; i < kSamples; ++i) {
        const float x = m * (static_cast<float>(i) + 0.5F) / kSamples;
        scale1 += std::pow(static_cast<double>((x - decode(format, encode(format, x))) / m), 2) / kSamples;
        scale2 += std::pow(static_cast<double>((x - 2 * decode(format, encode(format, x / 2))) / m), 2) / kSamples;
      }
      const auto wide = static_cast<long double>(m);
      EXPECT_NEAR(scale1 / static_cast<double>(error.relative(wide)), 1.0, 2e-3) << name_of(format) << ' ' << fraction;
      EXPECT_NEAR(scale2 / static_cast<double>(error.relative_doubled(wide)), 1.0, 2e-3) << name_of(format);
    }
  }
}

TEST(Formats, UosThresholdOfE2m1SolvesTheCubic) {
  EXPECT_NEAR(static_cast<double>(crossing(Format::e2m1)), 7.25, 1e-9);
  const auto cubic = [](long double q) { return std::pow(q - 6, 3.0L) + std::pow(8 - q, 3.0L) - 19.0L / 8; };
  EXPECT_EQ(cubic(7.25L), 0.0L);
  // The cubic is three times the excess on [7, 8], and only there: its other root, 6.75, is not a minimum.
  const RoundingError error(Format::e2m1);
  for (int i = 0; i <= 64; ++i) {
    const long double t = 7 + static_cast<long double>(i) / 64;
    EXPECT_NEAR(static_cast<double>(cubic(t)), static_cast<double>(3 * error.excess(t)), 1e-15);
  }
  EXPECT_NEAR(static_cast<double>(cubic(6.75L)), 0.0, 1e-15);
  EXPECT_NEAR(static_cast<double>(error.excess(6.75L)), -0.125, 1e-15);
}

TEST(Formats, UosThresholdMinimisesTheObjectiveForAnySpreadOfMaxima) {
  for (const Spread spread : {Spread::uniform, Spread::log_uniform}) {
    const Objective e2m1 = objective_of(Format::e2m1, spread);
    EXPECT_EQ(e2m1.threshold(e2m1.best()), 7.25L);
    const Objective e2m3 = objective_of(Format::e2m3, spread);
    EXPECT_EQ(e2m3.threshold(e2m3.best()), 7.875L);
  }
  EXPECT_EQ(uos_threshold(Format::e2m1), 7.25F);
  EXPECT_EQ(uos_threshold(Format::e2m3), 7.875F);
}

TEST(Formats, UosOptimumOfEveryFormatHasTheClosedForm) {
  const std::map<Format, long double> optimum = {{Format::e4m3, 464 + std::ldexp(1.0L, -15)},
                                                 {Format::e5m2, 61440 + std::ldexp(1.0L, -30)},
                                                 {Format::e2m3, 7.875L},
                                                 {Format::e3m2, 30 + std::pow(2.0L, -6.5L)},
                                                 {Format::e2m1, 7.25L}};
  for (const auto& [format, want] : optimum) {
    EXPECT_NEAR(static_cast<double>(closed_form(format) - want), 0.0, 1e-12) << name_of(format);
    EXPECT_NEAR(static_cast<double>(crossing(format) - want), 0.0, 1e-12) << name_of(format);
  }
}

TEST(Formats, UosGainsOverCeilOnlyInE2m1AndE2m3) {
  // The share of the error that the optimal threshold saves, maxima log-uniform; docs/formats.md quotes these.
  struct Gain {
    double over_ceil;
    double over_floor;
  };
  const std::map<Format, Gain> gains = {{Format::e4m3, {0.0, 0.1078}},
                                        {Format::e5m2, {0.0, 0.0166}},
                                        {Format::e2m3, {0.0045, 0.0019}},
                                        {Format::e3m2, {0.0, 0.0166}},
                                        {Format::e2m1, {0.0298, 0.0562}}};
  for (const auto& [format, gain] : gains) {
    const Objective objective = objective_of(format, Spread::log_uniform);
    const long double least = objective.mean.at(objective.best());
    const long double ceil = objective.mean.at(objective.index(static_cast<long double>(spec_of(format).max)));
    const long double floor = objective.mean.back();  // floor's threshold is the octave's upper end
    EXPECT_NEAR(static_cast<double>(1 - least / ceil), gain.over_ceil, gain.over_ceil > 0 ? 1e-4 : 1e-5);
    EXPECT_NEAR(static_cast<double>(1 - least / floor), gain.over_floor, 1e-4) << name_of(format);
  }
}

TEST(Formats, UosIsFlatFromMaxToHalfAStepAbove) {
  const std::map<Format, double> flatness = {{Format::e4m3, 2e-12}, {Format::e5m2, 1e-24}, {Format::e3m2, 3e-5}};
  for (const auto& [format, bound] : flatness) {
    const RoundingError error(format);
    const std::vector<float> values = magnitudes(format);
    const auto max = static_cast<long double>(values.back());
    const long double half = (max - static_cast<long double>(values.at(values.size() - 2))) / 2;
    for (int i = 0; i <= 16; ++i) {
      const long double m = max + half * i / 16;
      const auto share = static_cast<double>(error.excess(m) / error.squared(m));
      EXPECT_LT(share, 0.0) << name_of(format);
      EXPECT_GT(share, -bound) << name_of(format) << ": not flat at " << static_cast<double>(m);
    }
    EXPECT_EQ(uos_threshold(format), spec_of(format).max) << name_of(format);
  }
}

// -------------------------------------------------------------------------------------------------------- compile time

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
