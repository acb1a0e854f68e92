// Stochastic rounding: its threshold exactly, against long double, and the random bits that it is given.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
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
using test::Tally;

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

}  // namespace
}  // namespace mxflash
