// The forward of FP8 products with its running reference, in double: numerics.md, section 6. What the reference engine
// flushes of a row and the device keeps is in it, so that a row which is made of that can be compared at all.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "reference/operands.hpp"
#include "reference/weights.hpp"
#include "unit/attention_support.hpp"

namespace mxflash::test {

/// One row: keys are met in tiles of 128 of the document, from the last to the first, and a code stays as it was
/// encoded, by the reference of its time.
class RunningRow {
 public:
  /// `t`: base-2 logits of the keys from `first` on.
  RunningRow(const Rows& v, std::int64_t first, std::vector<double> t)
      : v_(v), first_(first), t_(std::move(t)), o_(static_cast<std::size_t>(v.dims)), off_(o_) {
    double most = -std::numeric_limits<double>::infinity();
    for (std::int64_t key = first_; key < end(); ++key) {
      heaviest_ = std::max(heaviest_, v_.exponent(key));
      most = std::max(most, t_[index(key)] += v_.exponent(key));
    }
    last_ = std::ceil(most) - kOctaves;
    for (std::int64_t stop = end(); stop > first_;) {
      const std::int64_t begin = std::max((stop - 1) / kTile * kTile, first_);
      raise(begin, stop);
      for (std::int64_t key = begin; key < stop; ++key) add(key);
      stop = begin;
    }
  }

  [[nodiscard]] double o(std::int64_t dim) const { return o_[static_cast<std::size_t>(dim)] / sum_; }
  [[nodiscard]] double lse() const { return std::numbers::ln2 * (base_ + std::log2(sum_)); }
  /// How far an element may be from the reference engine's: what its terms and the sum may differ by.
  [[nodiscard]] double slack(std::int64_t dim) const {
    const double share = sum_off_ / sum_;
    return (off_[static_cast<std::size_t>(dim)] / sum_ + std::fabs(o(dim)) * share) / (1 - std::min(share, 0.5));
  }

 private:
  static constexpr std::int64_t kTile = 128;
  static constexpr double kOctaves = 8;        // Of the largest code that a fresh reference gives: beta = 256.
  static constexpr double kNormal = 0x1p-6;    // The smallest of E4M3.
  static constexpr double kFlushed = 0x1p-10;  // Half of its smallest number.
  static constexpr double kLargest = 448;

  [[nodiscard]] std::int64_t end() const { return first_ + static_cast<std::int64_t>(t_.size()); }
  [[nodiscard]] std::size_t index(std::int64_t key) const { return static_cast<std::size_t>(key - first_); }
  static double rounded(double weight) {
    return decode(Format::e4m3, encode(Format::e4m3, static_cast<float>(weight)));
  }

  void raise(std::int64_t begin, std::int64_t stop) {
    const double most = *std::max_element(t_.begin() + (begin - first_), t_.begin() + (stop - first_));
    if (!unset_ && rounded(std::exp2(most - base_)) < kLargest) return;
    const double by = unset_ ? 0.0 : std::exp2(base_ - (std::ceil(most) - kOctaves));
    for (double& x : o_) x *= by;
    for (double& x : off_) x *= by;
    sum_ *= by;
    sum_off_ *= by;
    base_ = std::ceil(most) - kOctaves;
    unset_ = false;
  }

  void add(std::int64_t key) {
    const double weight = std::exp2(t_[index(key)] - base_);
    const double code = rounded(weight);
    const int fold = v_.exponent(key);
    const bool light = fold == -kE8m0Bias || fold + kLightFold <= heaviest_;
    sum_ += std::ldexp(light && code < kNormal ? weight : code, -fold);
    for (std::int64_t d = 0; d < v_.dims; ++d) o_[static_cast<std::size_t>(d)] += code * v_.row(key)[d];
    if (t_[index(key)] - last_ >= std::log2(kNormal)) return;  // The same code by the last reference.
    const double off = kFlushed * std::exp2(last_ - base_);
    for (std::int64_t d = 0; d < v_.dims; ++d) off_[static_cast<std::size_t>(d)] += off * std::fabs(v_.row(key)[d]);
    // A light key is counted unquantized by the reference engine, here by a code that may be normal.
    sum_off_ += std::ldexp(light ? 0x1p-4 * weight : off, -fold);
  }

  const Rows& v_;
  std::int64_t first_;
  std::vector<double> t_;
  std::vector<double> o_;
  std::vector<double> off_;
  double sum_ = 0;
  double sum_off_ = 0;
  double base_ = 0;
  double last_ = 0;  ///< The reference that the whole row asks for.
  int heaviest_ = -kE8m0Bias;
  bool unset_ = true;
};

struct Running {
  ForwardResult outputs;
  Tensor slack;  ///< By element of O.
};

/// Of a recipe that FP8 products run and numbers without NaN and Inf.
inline Running running_forward(const Case& c, const Recipe& recipe) {
  const std::int64_t heads = c.q.shape[1];
  const std::int64_t dims = c.v.shape[2];
  Running result;
  result.outputs.o = Tensor::zeros(c.q.dtype, {c.q.shape[0], heads, dims});
  result.outputs.lse = Tensor::zeros(DType::f32, {c.q.shape[0], heads});
  result.slack = Tensor::zeros(DType::f32, result.outputs.o.shape);
  const Result<reference::Operands> operands = reference::quantize_operands(c.problem, recipe, c.inputs(), {}, false);
  EXPECT_TRUE(operands.ok());
  if (!operands.ok()) return result;
  const double scale =
      std::numbers::log2e * softmax_scale(c.problem.scale, rotation_of(recipe, c.q.shape[2]), c.q.shape[2]);
  const auto add_row = [&](const Strip& strip, const reference::ForwardRows& rows, std::int64_t place) {
    const KeyRange seen = strip.sees(strip.query_begin);
    result.outputs.lse.set(place, -std::numeric_limits<float>::infinity());
    if (seen.empty()) return;
    const std::vector<double> all = dot_products(strip, rows.q, rows.k_transposed, rows.keys);
    std::vector<double> logits(all.begin() + (seen.begin - strip.key_begin),
                               all.begin() + (seen.end - strip.key_begin));
    for (double& logit : logits) logit *= scale;
    const RunningRow row(rows.v, seen.begin, std::move(logits));
    result.outputs.lse.set(place, static_cast<float>(row.lse()));
    for (std::int64_t d = 0; d < dims; ++d) {
      result.outputs.o.set(place * dims + d, static_cast<float>(row.o(d)));
      result.slack.set(place * dims + d, static_cast<float>(row.slack(d)));
    }
  };
  for (const Document& document : c.problem.packing.documents()) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const reference::ForwardRows rows =
          reference::forward_rows(*operands, recipe, document, head, head / (heads / c.k.shape[1]));
      for (std::int64_t query = 0; query < document.q_length; ++query) {
        add_row(Strip(document, c.problem.mask, query, query + 1), rows, (document.q_begin + query) * heads + head);
      }
    }
  }
  return result;
}

}  // namespace mxflash::test
