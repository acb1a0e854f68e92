// Formats by name, float patterns, and a count of comparisons.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mxflash/formats.hpp"

namespace mxflash::test {

inline constexpr std::array kFormats = {Format::e4m3, Format::e5m2, Format::e2m3, Format::e3m2, Format::e2m1};
inline constexpr std::uint32_t kSign = 0x80000000U;
inline constexpr std::uint32_t kInf = 0x7F800000U;

inline std::string_view name_of(Format format) {
  constexpr std::array<std::string_view, 5> names = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1"};
  return names.at(static_cast<std::size_t>(format));
}

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

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
inline std::vector<float> magnitudes(Format format) {
  std::vector<float> values;
  for (int code = 0; code < code_count(format) / 2; ++code) {
    const float value = decode(format, static_cast<std::uint8_t>(code));
    if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

/// Float patterns at `bits` and up to `reach` to each side, finite and positive.
inline std::vector<std::uint32_t> neighbours(std::uint32_t bits, std::uint32_t reach = 4) {
  std::vector<std::uint32_t> result;
  for (std::uint32_t b = bits < reach ? 0 : bits - reach; b <= bits + reach; ++b) {
    if (b > 0 && b < kInf) result.push_back(b);
  }
  return result;
}

}  // namespace mxflash::test
