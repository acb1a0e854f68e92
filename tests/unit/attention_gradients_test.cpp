// Gradients of the documented codes: q, k, v and dO as quantize() stores them, everything after that in double. What is
// left of a recipe's error is the rounding of P and of dS, whose bound goes through the same sums, element by element.
#include <algorithm>
#include <cmath>

#include "mxflash/quantize.hpp"
#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;

/// Whether weights have one scale known beforehand, or none: their rounding error has a bound without the other
/// weights.
bool has_static_weights(const Recipe& recipe) {
  const auto suits = [](const Operand& p) {
    return p.encoding == Encoding::bf16 || (p.encoding == Encoding::e4m3 && p.block == Block::tensor());
  };
  return test::has_backward(recipe) && suits(recipe.o.weights) && suits(recipe.dv.weights) && !recipe.o.cut;
}

std::vector<Recipe> static_recipes() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : test::every_recipe()) {
    if (has_static_weights(recipe)) all.push_back(recipe);
  }
  return all;
}

class StaticWeights : public testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(AttentionGradients, StaticWeights, testing::ValuesIn(static_recipes()), test::name_of_recipe);

/// Rounding to nearest: up to `relative` of the number, or `absolute` of the unit of its scale where it is subnormal.
struct RoundingBound {
  double relative = 0;
  double absolute = 0;
};

RoundingBound rounding_bound(const Operand& operand) {
  if (operand.encoding == Encoding::bf16) return {0x1p-8, 0};
  return {0x1p-4, 0x1p-10};  // E4M3: half a unit of a number, half of its smallest
}

/// An operand in double, [tokens, heads, dims], and how many octaves its tokens' folding exponents span.
struct Codes {
  std::vector<double> values;
  std::int64_t heads = 0;
  std::int64_t dims = 0;
  double spread = 1;  ///< 2^(largest exponent - smallest)

  Codes(const Case& c, const Tensor& tensor, const Operand& operand, Side side) {
    const Result<Quantized> codes =
        quantize(test::view(tensor), c.problem.packing, {.operand = operand, .side = side}, 1);
    EXPECT_TRUE(codes.ok());
    heads = tensor.shape[1];
    dims = tensor.shape[2];
    for (std::int64_t t = 0; t < tensor.shape[0]; ++t) {
      for (std::int64_t i = 0; i < heads * dims; ++i) {
        values.push_back(static_cast<double>(codes->dequantized(t, i / dims, i % dims)));
      }
    }
    if (!operand.folds()) return;
    const auto [least, most] = std::ranges::minmax(codes->exponents);
    spread = std::ldexp(1.0, most - least);
  }

  [[nodiscard]] const double* row(std::int64_t token, std::int64_t head) const {
    return values.data() + (token * heads + head) * dims;
  }
};

double dot(const double* a, const double* b, std::int64_t dims) {
  double sum = 0;
  for (std::int64_t d = 0; d < dims; ++d) sum += a[d] * b[d];
  return sum;
}

/// What FP32 sums may be off relative to the sum of their terms' magnitudes: up to 64 terms, then longer sums of those.
/// The reference sums in double.
double fp32_noise() { return test::is_reference() ? 0 : 64 * 0x1p-24; }

double magnitude(const double* a, const double* b, std::int64_t dims) {
  double sum = 0;
  for (std::int64_t d = 0; d < dims; ++d) sum += std::fabs(a[d] * b[d]);
  return sum;
}

/// A gradient, its bound, and the sum of the operand's magnitudes, which absolute errors of the weights multiply.
class Gradient {
 public:
  explicit Gradient(const Tensor& like)
      : shape_(like.shape),
        values_(static_cast<std::size_t>(like.elements())),
        bounds_(values_.size()),
        magnitudes_(values_.size()) {}

  /// Row += weight x, where the weight may be off by `error`.
  void add(std::int64_t token, std::int64_t head, double weight, double error, const double* x) {
    const auto dims = static_cast<std::size_t>(shape_[2]);
    const auto begin = static_cast<std::size_t>(token * shape_[1] + head) * dims;
    for (std::size_t d = 0; d < dims; ++d) {
      values_[begin + d] += weight * x[d];
      bounds_[begin + d] += error * std::fabs(x[d]);
      magnitudes_[begin + d] += std::fabs(x[d]);
    }
  }

  /// `absolute`: what every weight may be off besides. 2^-22 covers FP32's rounding of the output and of this.
  [[nodiscard]] testing::AssertionResult bounds(const Tensor& got, double absolute) const {
    Tensor want = Tensor::zeros(DType::f32, shape_);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      want.set(static_cast<std::int64_t>(i), static_cast<float>(values_[i]));
    }
    return test::within(got, want, [&](std::int64_t i) {
      const auto at = static_cast<std::size_t>(i);
      return bounds_[at] + absolute * magnitudes_[at] + 0x1p-22 * std::fabs(values_[at]) + 1e-30;
    });
  }

 private:
  std::vector<std::int64_t> shape_;
  std::vector<double> values_;
  std::vector<double> bounds_;
  std::vector<double> magnitudes_;
};

class Documented {
 public:
  Documented(const Case& c, const Recipe& recipe)
      : case_(c),
        recipe_(recipe),
        q_(c, c.q, recipe.s.left, Side::query),
        k_(c, c.k, recipe.s.right, Side::key),
        v_o_(c, c.v, recipe.o.tokens, Side::key),
        dout_dp_(c, c.dout, recipe.dp.left, Side::query),
        v_dp_(c, c.v, recipe.dp.right, Side::key),
        dout_dv_(c, c.dout, recipe.dv.tokens, Side::query),
        k_dq_(c, c.k, recipe.dq.tokens, Side::key),
        q_dk_(c, c.q, recipe.dk.tokens, Side::query),
        scale_(c.problem.scale ? static_cast<double>(*c.problem.scale) : 1 / std::sqrt(static_cast<double>(q_.dims))),
        dq_(c.q),
        dk_(c.k),
        dv_(c.v) {
    for (const Document& document : c.problem.packing.documents()) {
      for (std::int64_t query = 0; query < document.q_length; ++query) {
        for (std::int64_t head = 0; head < q_.heads; ++head) add_row(document, query, head);
      }
    }
  }

  void expect_bounds(const BackwardResult& got, std::string_view what) const {
    // dS by the ceil rule: its block's unit is at most 2/448 of its largest. Where its codes move by K's or Q's
    // exponents they may be rounded again, in units up to `spread` larger.
    const double unit = 2.0 / 448 * largest_ds_;
    const double dq = 2 * rounding_bound(recipe_.dq.weights).absolute * unit * k_dq_.spread;
    const double dk = 2 * rounding_bound(recipe_.dk.weights).absolute * unit * q_dk_.spread;
    EXPECT_TRUE(dq_.bounds(got.dq, dq)) << "dq, " << what;
    EXPECT_TRUE(dk_.bounds(got.dk, dk)) << "dk, " << what;
    // P against dO has the multiplier 256.
    const double dv = rounding_bound(recipe_.dv.weights).absolute / 256 * dout_dv_.spread;
    EXPECT_TRUE(dv_.bounds(got.dv, dv)) << "dv, " << what;
  }

 private:
  /// One query and head, adding to all three gradients.
  void add_row(const Document& document, std::int64_t query, std::int64_t head) {
    const KeyRange range = visible_keys(document, case_.problem.mask, query);
    if (range.empty()) return;
    const std::int64_t token = document.q_begin + query;
    const std::int64_t kv_head = head / (q_.heads / k_.heads);
    std::vector<double> w;
    std::vector<double> dp;
    double logit_noise = 0;
    double dp_noise = 0;
    for (std::int64_t key = document.k_begin + range.begin; key < document.k_begin + range.end; ++key) {
      w.push_back(scale_ * dot(q_.row(token, head), k_.row(key, kv_head), q_.dims));
      dp.push_back(dot(dout_dp_.row(token, head), v_dp_.row(key, kv_head), v_dp_.dims));
      logit_noise = std::max(logit_noise, magnitude(q_.row(token, head), k_.row(key, kv_head), q_.dims));
      dp_noise = std::max(dp_noise, magnitude(dout_dp_.row(token, head), v_dp_.row(key, kv_head), v_dp_.dims));
    }
    logit_noise *= scale_ * fp32_noise();
    dp_noise *= 3 * fp32_noise();  // of dP, of the sum of D, and of what its weights add up to
    const double largest = *std::ranges::max_element(w);
    double sum = 0;
    for (double& x : w) sum += x = std::exp(x - largest);
    double delta = 0;
    for (std::size_t j = 0; j < w.size(); ++j) delta += (w[j] /= sum) * dp[j];

    // P is rounded where its largest, V's exponents in, is in (1/2, 1]; so is then the sum that it is divided by.
    const RoundingBound p = rounding_bound(recipe_.o.weights);
    const double flush = 2 * p.absolute / recipe_.beta * v_o_.spread;
    const double of_sum = p.relative + 2 * logit_noise + static_cast<double>(w.size()) * flush;
    const auto weight_error = [&](double x) {
      return (x * (p.relative + 2 * logit_noise + of_sum) + flush) / (1 - of_sum);
    };
    // Rows of the weights add up to 1 whatever their rounding: D is off by what they are off in dP - D.
    double delta_error = dp_noise;
    for (std::size_t j = 0; j < w.size(); ++j) delta_error += weight_error(w[j]) * std::fabs(dp[j] - delta);

    const double dlse = case_.dlse ? case_.dlse->at(token * q_.heads + head) : 0.0;
    const double noise = dp_noise + fp32_noise() * std::fabs(dlse);
    const double own = rounding_bound(recipe_.dv.weights).relative;
    const double of_ds = rounding_bound(recipe_.dq.weights).relative;
    for (std::size_t j = 0; j < w.size(); ++j) {
      const std::int64_t key = document.k_begin + range.begin + static_cast<std::int64_t>(j);
      const double error = weight_error(w[j]);
      dv_.add(key, kv_head, w[j], error + own * (w[j] + error), dout_dv_.row(token, head));
      const double difference = dp[j] - delta + dlse;
      const double ds = scale_ * w[j] * difference;
      const double before = scale_ * ((w[j] + error) * delta_error + error * std::fabs(difference) + w[j] * noise);
      const double after = before + of_ds * (std::fabs(ds) + before);
      largest_ds_ = std::max(largest_ds_, std::fabs(ds) + before);
      dq_.add(token, head, ds, after, k_dq_.row(key, kv_head));
      dk_.add(key, kv_head, ds, after, q_dk_.row(token, head));
    }
  }

  const Case& case_;
  const Recipe& recipe_;
  Codes q_, k_, v_o_, dout_dp_, v_dp_, dout_dv_, k_dq_, q_dk_;
  double scale_;
  Gradient dq_, dk_, dv_;
  double largest_ds_ = 0;
};

void expect_documented(const Case& c, const Recipe& recipe, std::string_view what) {
  Documented(c, recipe).expect_bounds(test::backward(c, recipe), what);
}

TEST(AttentionGradients, EveryStaticRecipeIsThere) {
  std::vector<std::string> names;
  for (const Recipe& recipe : static_recipes()) names.push_back(recipe.name);
  const std::vector<std::string> expected = {"bf16",       "mxfp8",       "mxfp8-tokenblock", "nvfp4",
                                             "fp8-tensor", "mxfp8-32x32", "mxfp8-exact",      "nvfp4-exact"};
  EXPECT_EQ(names, expected);
}

TEST_P(StaticWeights, C2_GradientsOfTheDocumentedCodesWithAHotColumn) {
  const Recipe& recipe = GetParam();
  const Case plain = test::random_case(test::pack({{64, 64}, {33, 50}}), {.heads = 2, .kv_heads = 1});
  for (int hot = 0; hot < 4; ++hot) {
    // All the same, or uneven with a scale that spreads the weights: logits are then 2^-4 of 20 off those of q and k.
    for (const bool uneven : {false, true}) {
      Case c = plain;
      Tensor& tensor = hot == 0 ? c.q : hot == 1 ? c.k : hot == 2 ? c.v : c.dout;
      for (std::int64_t i = 7; i < tensor.elements(); i += 32) {
        tensor.set(i, uneven ? 1e3F * static_cast<float>(1 + 0.2 * test::uniform(3, 1, i)) : 1e3F);
      }
      if (uneven) c.problem.scale = 0.02F;
      expect_documented(c, recipe, fmt::format("{}column 7 of {}", uneven ? "uneven " : "", "qkvd"[hot]));
    }
  }
}

TEST_P(StaticWeights, GradientsOfTheDocumentedCodes) {
  Case c = test::random_case(test::pack({{64, 64}, {33, 50}, {50, 33}, {1, 1}}), {.heads = 4, .kv_heads = 2});
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(20, 3)}) {
    c.problem.mask = mask;
    expect_documented(c, GetParam(), fmt::format("window ({}, {})", mask.left, mask.right));
  }
}

TEST_P(StaticWeights, GradientsOfTheDocumentedCodesWithAGradientOfLse) {
  const Packing packing = test::pack({{64, 64}, {33, 50}, {50, 33}, {1, 1}});
  Case c = test::with_dlse(test::random_case(packing, {.heads = 4, .kv_heads = 2}));
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(20, 3)}) {
    c.problem.mask = mask;
    expect_documented(c, GetParam(), fmt::format("window ({}, {})", mask.left, mask.right));
  }
}

TEST_P(StaticWeights, C9_GradientsOfLongDocuments) {
  Case c = test::random_case(test::pack_self({1023, 1024, 1025, 2081}), {1, 1, 8, 8});
  c.problem.mask = Mask::window(70, 0);
  expect_documented(c, GetParam(), "window (70, 0)");
}

TEST(AttentionGradients, C9_ALongDocumentWithoutAWindow) {
  const Case c = test::random_case(test::pack_self({2081}), {1, 1, 8, 8});
  expect_documented(c, test::recipe_named("mxfp8"), "causal");
}

}  // namespace
}  // namespace mxflash
