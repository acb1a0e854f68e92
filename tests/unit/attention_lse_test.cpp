// The gradient of a loss that uses lse: float64 truth against finite differences, every recipe against that truth, and
// what it must not change.
#include <algorithm>
#include <cmath>

#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;

std::vector<Recipe> with_backward() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : test::every_recipe()) {
    if (test::has_backward(recipe)) all.push_back(recipe);
  }
  return all;
}

class LseGradient : public testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Attention, LseGradient, testing::ValuesIn(with_backward()), test::name_of_recipe);

// ---- Truth ----

/// q, k and v in double, and sum dO o + sum dlse lse of them.
class Loss {
 public:
  explicit Loss(const Case& c) : case_(c), q(values(c.q)), k(values(c.k)), v(values(c.v)) {}

  [[nodiscard]] double operator()() const {
    double sum = 0;
    for (const Document& document : case_.problem.packing.documents()) {
      for (std::int64_t query = 0; query < document.q_length; ++query) {
        for (std::int64_t head = 0; head < case_.q.shape[1]; ++head) sum += of_row(document, query, head);
      }
    }
    return sum;
  }

 private:
  const Case& case_;

 public:
  std::vector<double> q, k, v;

 private:
  static std::vector<double> values(const Tensor& tensor) {
    std::vector<double> all;
    all.reserve(static_cast<std::size_t>(tensor.elements()));
    for (std::int64_t i = 0; i < tensor.elements(); ++i) all.push_back(tensor.at(i));
    return all;
  }

  [[nodiscard]] double of_row(const Document& document, std::int64_t query, std::int64_t head) const {
    const KeyRange range = visible_keys(document, case_.problem.mask, query);
    if (range.empty()) return 0;
    const std::int64_t heads = case_.q.shape[1];
    const std::int64_t kv_heads = case_.k.shape[1];
    const std::int64_t dims = case_.q.shape[2];
    const std::int64_t value_dims = case_.v.shape[2];
    const std::int64_t row = (document.q_begin + query) * heads + head;
    const double scale = 1 / std::sqrt(static_cast<double>(dims));
    double sum = 0;
    double weighted = 0;  // sum exp(s) dO . V
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      const std::int64_t at = (document.k_begin + key) * kv_heads + head / (heads / kv_heads);
      double s = 0;
      for (std::int64_t d = 0; d < dims; ++d) s += q[index(row, dims, d)] * k[index(at, dims, d)];
      double dp = 0;
      for (std::int64_t d = 0; d < value_dims; ++d) {
        dp += static_cast<double>(case_.dout.at(row * value_dims + d)) * v[index(at, value_dims, d)];
      }
      const double weight = std::exp(scale * s);
      sum += weight;
      weighted += weight * dp;
    }
    return weighted / sum + static_cast<double>(case_.dlse->at(row)) * std::log(sum);
  }

  static std::size_t index(std::int64_t row, std::int64_t dims, std::int64_t d) {
    return static_cast<std::size_t>(row * dims + d);
  }
};

/// Central differences with steps of h = 2^-13. Along one element of q or k every logit s of a row is linear with
/// slopes of at most a; the third derivative of lse is then the third cumulant of those slopes, at most a^3, that of O
/// at most 8 a^3 |V|. With a <= 1.5 here that leaves h^2 / 6 27 = 2^-23.8 times what the rows weigh in the loss. Twice
/// as much is allowed, which also holds the rounding of the gradients to FP32; that of the loss, 2^-53 of it over h, is
/// far below.
TEST(ExactLseGradient, IsThatOfFiniteDifferences) {
  const Packing packing = test::pack({{4, 6}, {5, 3}, {1, 1}, {2, 0}, {0, 2}});
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(2, 1)}) {
    Case c = test::with_dlse(test::random_case(packing, {.heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 16}));
    c.problem.mask = mask;
    for (Tensor* tensor : {&c.q, &c.k}) *tensor = test::scaled(*tensor, 0.75F);
    double size = 0;
    for (std::int64_t i = 0; i < c.dlse->elements(); ++i) size += std::fabs(c.dlse->at(i));
    for (std::int64_t i = 0; i < c.dout.elements(); ++i) size += std::fabs(c.dout.at(i));
    const BackwardResult got = test::exact_gradients(c);
    Loss loss(c);
    const auto differences = [&](std::vector<double>& values, const Tensor& like) {
      constexpr double kStep = 0x1p-13;
      Tensor gradient = Tensor::zeros(DType::f32, like.shape);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double value = values[i];
        values[i] = value + kStep;
        const double above = loss();
        values[i] = value - kStep;
        const double below = loss();
        values[i] = value;
        gradient.set(static_cast<std::int64_t>(i), static_cast<float>((above - below) / (2 * kStep)));
      }
      return gradient;
    };
    const double allowed = 0x1p-23 * size;
    const std::string where = fmt::format("window ({}, {})", mask.left, mask.right);
    EXPECT_TRUE(test::within(got.dq, differences(loss.q, c.q), allowed)) << "dq, " << where;
    EXPECT_TRUE(test::within(got.dk, differences(loss.k, c.k), allowed)) << "dk, " << where;
    EXPECT_TRUE(test::within(got.dv, differences(loss.v, c.v), allowed)) << "dv, " << where;
  }
}

/// Without dO, dQ is dlse times the mean of the keys, by the weights: of the only key of a row, the key itself.
TEST(ExactLseGradient, OfARowWithOneKeyIsTheKey) {
  Case c = test::with_dlse(test::random_case(test::pack_self({1, 1}), {.heads = 1, .kv_heads = 1}));
  c.problem.scale = 0.5F;
  const BackwardResult got = test::exact_gradients(c);
  for (std::int64_t i = 0; i < got.dq.elements(); ++i) {
    const float half = 0.5F * c.dlse->at(i / 32);
    EXPECT_EQ(got.dq.at(i), half * c.k.at(i)) << i;
    EXPECT_EQ(got.dk.at(i), half * c.q.at(i)) << i;
  }
}

// ---- Recipes ----

double relative_l2(const Tensor& got, const Tensor& want) {
  double error = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    error += std::pow(static_cast<double>(got.at(i)) - static_cast<double>(want.at(i)), 2);
    norm += std::pow(static_cast<double>(want.at(i)), 2);
  }
  return std::sqrt(error / norm);
}

/// dP - D and dlse meet the same weights, are quantized in the same blocks and multiply the same K and Q, so that dQ
/// and dK have the relative error that they have without dlse, or less: dlse has no error of its own, as dO and V have.
/// A tenth more is allowed, since errors are random.
TEST_P(LseGradient, IsAsAccurateAsThatOfO) {
  const Recipe& recipe = GetParam();
  const Case plain = test::random_case(test::pack({{70, 70}, {33, 97}, {40, 9}, {1, 1}}), {.heads = 4, .kv_heads = 2});
  const BackwardResult plain_got = test::backward(plain, recipe);
  const BackwardResult plain_want = test::exact_gradients(plain);
  const double dq = 1.1 * relative_l2(plain_got.dq, plain_want.dq);
  const double dk = 1.1 * relative_l2(plain_got.dk, plain_want.dk);
  for (const float size : {0.1F, 1.0F, 30.0F}) {
    Case c = test::with_dlse(plain);
    c.dlse = test::scaled(*c.dlse, size);
    const BackwardResult got = test::backward(c, recipe);
    const BackwardResult want = test::exact_gradients(c);
    EXPECT_LE(relative_l2(got.dq, want.dq), dq) << "dq " << size;
    EXPECT_LE(relative_l2(got.dk, want.dk), dk) << "dk " << size;
    EXPECT_TRUE(test::same_bits(got.dv, plain_got.dv)) << "dv " << size;
  }
  Case alone = test::with_dlse(plain);
  alone.dout = test::scaled(alone.dout, 0.0F);
  const BackwardResult got = test::backward(alone, recipe);
  const BackwardResult want = test::exact_gradients(alone);
  EXPECT_LE(relative_l2(got.dq, want.dq), dq) << "dq without dO";
  EXPECT_LE(relative_l2(got.dk, want.dk), dk) << "dk without dO";
  EXPECT_TRUE(test::all_zero(got.dv)) << "dv without dO";
}

TEST_P(LseGradient, OfZeroIsThatOfNone) {
  const Recipe& recipe = GetParam();
  for (const Mask& mask : {Mask::causal(), Mask::window(20, 3)}) {
    Case c = test::random_case(test::pack({{70, 70}, {33, 97}, {40, 9}, {6, 0}}), {.heads = 2, .kv_heads = 1});
    c.problem.mask = mask;
    const BackwardResult want = test::backward(c, recipe);
    for (const float zero : {0.0F, -0.0F}) {
      c.dlse = test::constant_tensor(DType::f32, {149, 2, 1}, zero);
      const BackwardResult got = test::backward(c, recipe);
      EXPECT_TRUE(test::same_bits(got.dq, want.dq)) << "dq";
      EXPECT_TRUE(test::same_bits(got.dk, want.dk)) << "dk";
      EXPECT_TRUE(test::same_bits(got.dv, want.dv)) << "dv";
    }
  }
}

TEST_P(LseGradient, C13_StridesAreTakenAsTheyCome) {
  const Recipe& recipe = GetParam();
  const Case c = test::with_dlse(test::random_case(test::pack_self({33, 7}), {.heads = 2, .kv_heads = 2}));
  const BackwardResult want = test::backward(c, recipe);
  // A base offset of one element, not aligned, with gaps; transposed; dims of any stride.
  for (const std::array<std::int64_t, 3>& stride : {std::array<std::int64_t, 3>{5, 2, 1}, {1, 40, 0}, {3, 200, 7}}) {
    const test::StridedCopy dlse(*c.dlse, stride, 1);
    Inputs inputs = c.inputs();
    inputs.dlse = dlse.view();
    const Result<BackwardResult> got = attention_backward(c.problem, recipe, inputs, test::two_threads());
    ASSERT_TRUE(got.ok());
    EXPECT_TRUE(test::same_bits(got->dq, want.dq)) << "dq, strides " << stride[0] << " " << stride[1];
    EXPECT_TRUE(test::same_bits(got->dk, want.dk)) << "dk, strides " << stride[0] << " " << stride[1];
  }
}

/// One number for all, as the gradient of lse.sum() is.
TEST_P(LseGradient, C13_AnExpandedOne) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({33, 7}), {.heads = 2, .kv_heads = 2});
  const Tensor one = test::constant_tensor(DType::f32, {1, 1, 1}, 0.3F);
  Inputs inputs = c.inputs();
  inputs.dlse = TensorView{one.data.data(), DType::f32, {40, 2, 1}, {0, 0, 0}};
  c.dlse = test::constant_tensor(DType::f32, {40, 2, 1}, 0.3F);
  const BackwardResult want = test::backward(c, recipe);
  const Result<BackwardResult> got = attention_backward(c.problem, recipe, inputs, test::two_threads());
  ASSERT_TRUE(got.ok());
  EXPECT_TRUE(test::same_bits(got->dq, want.dq));
  EXPECT_TRUE(test::same_bits(got->dk, want.dk));
}

/// FP32 has room for it, and no other document or head knows of it.
TEST_P(LseGradient, TheLargestStaysInItsDocumentAndHead) {
  const Recipe& recipe = GetParam();
  Case c = test::with_dlse(test::random_case(test::pack_self({40, 70, 33}), {.heads = 2, .kv_heads = 2}));
  const BackwardResult want = test::backward(c, recipe);
  // Products of codes alone, up to 448 each, meet a tensor-wide scale last.
  const float huge = recipe.dq.tokens.block == Block::tensor() ? 1e35F : 3.4e38F;
  test::set_row(*c.dlse, 40 + 37, 1, -huge);
  const BackwardResult got = test::backward(c, recipe);
  for (const auto& [now, before] : {std::pair{&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
    EXPECT_TRUE(test::all_finite(*now));
    for (std::int64_t i = 0; i < now->elements(); ++i) {
      const std::int64_t token = i / 64;
      if (i / 32 % 2 == 1 && token >= 40 && token < 110) continue;
      ASSERT_EQ(test::element_bits(*now, i), test::element_bits(*before, i)) << test::place_of(*now, i);
    }
  }
}

TEST(LseGradientRefusals, ShapesAndTypes) {
  const Recipe recipe = test::recipe_named("mxfp8");
  const Case c = test::with_dlse(test::random_case(test::pack_self({6}), {.heads = 4, .kv_heads = 2}));
  Inputs inputs = c.inputs();
  const auto refused = [&](const std::vector<std::string>& words) {
    EXPECT_TRUE(test::refused_with(exact_backward(c.problem, inputs, test::two_threads()), words));
    return test::refused_with(attention_backward(c.problem, recipe, inputs, test::two_threads()), words);
  };
  for (const auto& [axis, text] : {std::pair{0, "[5, 4]"}, {1, "[6, 5]"}, {2, "[6, 4, 5]"}}) {
    inputs = c.inputs();
    inputs.dlse->shape.at(static_cast<std::size_t>(axis)) = 5;
    EXPECT_TRUE(refused({"dlse", text, "[6, 4] allowed"}));
  }
  for (const auto& [type, name] : {std::pair{DType::bf16, "BF16"}, {DType::f16, "F16"}, {DType::i32, "I32"}}) {
    inputs = c.inputs();
    inputs.dlse->dtype = type;
    EXPECT_TRUE(refused({"dlse", name, "F32"}));
  }
  inputs.dout.reset();
  EXPECT_TRUE(refused({"do", "none"}));
}

}  // namespace
}  // namespace mxflash
