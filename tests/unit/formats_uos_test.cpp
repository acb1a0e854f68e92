// The threshold of uos against the exact integral of the rounding error (docs/formats.md).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "unit/formats_support.hpp"

namespace mxflash {
namespace {

using test::kFormats;
using test::magnitudes;
using test::name_of;

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

}  // namespace
}  // namespace mxflash
