// The CUDA engine against the reference on values that have rules of their own: NaN and Inf, huge and subnormal
// numbers, zero tokens, outliers, a token that draws most of the weight.
#include <limits>

#include "unit/cuda_running_support.hpp"
#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::Distribution;

class CudaValues : public test::OnDevice {};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void set_element(Tensor& tensor, std::int64_t token, std::int64_t head, std::int64_t dim, float value) {
  tensor.set((token * tensor.shape[1] + head) * tensor.shape[2] + dim, value);
}

/// Multiplies one token of all heads.
void scale_token(Tensor& tensor, std::int64_t token, float factor) {
  const std::int64_t row = tensor.shape[1] * tensor.shape[2];
  for (std::int64_t i = token * row; i < (token + 1) * row; ++i) tensor.set(i, tensor.at(i) * factor);
}

/// NaN in the same places: the reference's are those of exactly the rows that see the token.
void expect_same_nans(const Tensor& got, const Tensor& want, const std::string& where) {
  ASSERT_EQ(got.shape, want.shape);
  std::int64_t different = 0;
  std::int64_t first = -1;
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    if (std::isnan(got.at(i)) == std::isnan(want.at(i))) continue;
    if (first < 0) first = i;
    ++different;
  }
  EXPECT_EQ(different, 0) << where << ", first at " << test::place_of(want, std::max<std::int64_t>(first, 0));
}

/// The rows whose O `poisoned` leaves alone have the bits that they have without it. LSE of the others need not: a
/// poisoned V takes no part in the exponents that fold into P. Where tokens share a scale, the rows around a poisoned
/// one have another scale without it: of FP8 products those are the reference's, within its tolerance.
void expect_poison_stays(const Case& clean, const Case& poisoned, const Recipe& recipe, const std::string& where) {
  const ForwardResult was = test::device_forward(clean, recipe);
  const ForwardResult got = test::device_forward(poisoned, recipe);
  const ForwardResult want = test::forward(poisoned, recipe, test::on_engine("reference"));
  expect_same_nans(got.o, want.o, fmt::format("o of {}, {}", recipe.name, where));
  test::expect_lse_like(got.lse, want.lse, recipe, fmt::format("of {}, {}", recipe.name, where));
  const std::int64_t dims = want.o.shape[2];
  std::int64_t poisoned_rows = 0;
  for (std::int64_t row = 0; row < want.lse.elements(); ++row) {
    if (std::isnan(want.o.at(row * dims))) {
      ++poisoned_rows;
      continue;
    }
    if (recipe.claims.forward != Causality::exact) continue;  // It takes no part in the others' scales.
    ASSERT_EQ(test::element_bits(got.lse, row), test::element_bits(was.lse, row))
        << "lse of " << recipe.name << ", " << where << " at " << test::place_of(want.lse, row);
    for (std::int64_t i = row * dims; i < (row + 1) * dims; ++i) {
      ASSERT_EQ(test::element_bits(got.o, i), test::element_bits(was.o, i))
          << "o of " << recipe.name << ", " << where << " at " << test::place_of(want.o, i);
    }
  }
  if (test::multiplies_fp8(recipe) && recipe.claims.forward != Causality::exact) {
    test::expect_outputs_like(got, want, poisoned, recipe, where);
  }
  EXPECT_GT(poisoned_rows, 0) << "no row was poisoned: this tests nothing, " << where;
}

TEST_F(CudaValues, C20_NanAndInfPoisonTheRowsThatSeeThem) {
  const Packing packing = test::pack({{40, 40}, {130, 140}, {33, 33}});
  for (const Recipe& recipe : test::device_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(20, 10)}) {
      for (const float value : {kNan, kInf, -kInf}) {
        Case clean = test::random_case(packing, {4, 2, 64, 64}, DType::bf16, 3);
        clean.problem.mask = mask;
        const auto check = [&](Tensor Case::* tensor, std::int64_t token, std::int64_t head, const char* name) {
          Case poisoned = clean;
          set_element(poisoned.*tensor, token, head, 17, value);
          expect_poison_stays(
              clean, poisoned, recipe,
              fmt::format("{} in {}[{}, {}, 17], window ({}, {})", value, name, token, head, mask.left, mask.right));
        };
        check(&Case::q, 55, 2, "q");
        check(&Case::k, 75, 1, "k");
        check(&Case::v, 75, 0, "v");
        check(&Case::v, 40, 1, "v");  // the first token of a document
      }
    }
  }
}

TEST_F(CudaValues, NanOfEveryTypeAndHeadDim) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t dims : {40, 128, 256}) {
        if (!test::runs_at(recipe, dims)) continue;
        const Case clean = test::random_case(test::pack_self({70, 33}), {2, 1, dims, dims}, dtype, 5);
        for (Tensor Case::* tensor : {&Case::q, &Case::k, &Case::v}) {
          Case poisoned = clean;
          set_element(poisoned.*tensor, 41, 0, dims - 1, kNan);
          expect_poison_stays(clean, poisoned, recipe, fmt::format("{} dims {}", name_of(dtype), dims));
        }
      }
    }
  }
}

/// All of a document's tokens poisoned, which a maximum over exponents must not trip over.
TEST_F(CudaValues, EveryTokenNan) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case clean = test::random_case(test::pack_self({40, 40}), {1, 1, 64, 64}, DType::bf16, 7);
    for (Tensor Case::* tensor : {&Case::k, &Case::v}) {
      Case poisoned = clean;
      for (std::int64_t token = 0; token < 40; ++token) test::set_row(poisoned.*tensor, token, 0, kNan);
      expect_poison_stays(clean, poisoned, recipe, "every token of a document");
    }
  }
}

/// Of BF16 and FP16 so far down only that O's own steps stay small beside it.
TEST_F(CudaValues, HugeAndSubnormalV) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const auto& [dtype, factor] : {std::pair{DType::f32, 1e37F},
                                        {DType::f32, 1e-30F},
                                        {DType::f32, 1e-39F},
                                        {DType::bf16, 1e37F},
                                        {DType::bf16, 4e-38F},
                                        {DType::f16, 1e4F},
                                        {DType::f16, 1e-4F}}) {
      // Codes of four bits times 2^-127 are exact in BF16 only where that is no part of the product.
      if (factor == 1e-39F && recipe.o.tokens.encoding == Encoding::e4m3 && !recipe.o.tokens.folds()) continue;
      Case c = test::random_case(test::pack({{70, 70}, {130, 140}}), {2, 1, 64, 64}, dtype, 13);
      c.v = test::scaled(std::move(c.v), factor);
      test::expect_like_reference(c, recipe, fmt::format("V times {} in {}", factor, name_of(dtype)));
    }
  }
}

/// Values of V from 2^-60 to 2^60 in one document, whose exponents fold into P.
TEST_F(CudaValues, UnevenV) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const int spread : {8, 20, 120}) {
      Case c = test::random_case(test::pack_self({150, 290}), {2, 1, 64, 64}, DType::f32, 17);
      for (std::int64_t token = 0; token < c.v.shape[0]; ++token) {
        const int exponent = static_cast<int>(test::uniform(18, 0, token) * spread) - spread / 2;
        scale_token(c.v, token, std::ldexp(1.0F, exponent));
      }
      test::expect_like_reference(c, recipe, fmt::format("V uneven by 2^{}", spread));
    }
  }
}

/// A first key whose unit the row sums have, and many so far below that they are counted apart: the sum is their number
/// times up to 2^60 of its units.
TEST_F(CudaValues, ManyKeysFarBelowTheFirst) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const int below : {20, 50, 52, 54, 58, 70}) {
      Case c = test::random_case(test::pack_self({600}), {2, 1, 64, 64}, DType::f32, 19);
      for (std::int64_t token = 0; token < c.v.shape[0]; ++token) {
        scale_token(c.v, token, std::ldexp(1.0F, token == 0 ? -53 : -53 - below));
      }
      test::expect_like_reference(c, recipe, fmt::format("V 2^{} below the first key's", below));
    }
  }
}

TEST_F(CudaValues, C15_TokensOfZeros) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case base = test::random_case(test::pack_self({70, 150}), {2, 1, 64, 64}, DType::bf16, 19);
    for (Tensor Case::* tensor : {&Case::q, &Case::k, &Case::v}) {
      for (const std::int64_t step : {1, 2, 33}) {
        Case c = base;
        for (std::int64_t token = 0; token < c.k.shape[0]; token += step) scale_token(c.*tensor, token, 0.0F);
        test::expect_like_reference(c, recipe, fmt::format("every {} tokens zero", step));
      }
    }
    Case c = base;
    for (std::int64_t token = 0; token < 64; ++token) scale_token(c.v, token, 0.0F);
    test::expect_like_reference(c, recipe, "the first two blocks of V zero");
  }
}

/// The first token has most of the weight and next to no V: the other keys, with little weight, make up O.
Case with_sink(float height, float v) {
  Case c = test::random_case(test::pack_self({300, 40}), {2, 1, 64, 64}, DType::f32, 23);
  for (std::int64_t i = 0; i < c.q.elements(); ++i) c.q.set(i, c.q.at(i) + 1);
  for (const std::int64_t first : {0, 300}) {
    test::set_row(c.k, first, 0, height);
    scale_token(c.v, first, v);
  }
  return c;
}
constexpr float kSinkHeights[] = {0.5F, 1.0F, 2.0F};
constexpr float kSinkValues[] = {0x1p-4F, 0x1p-10F, 0.0F};

/// Where V's scale is that of 32 tokens, the sink's weight does not show that it has no V: at height 2 the others are
/// 2^-17 of it and less, at the bottom of what P's codes hold, and all of O. FP8 products are compared with what their
/// running reference keeps of them; how far that is from the reference engine is the next test's.
TEST_F(CudaValues, AttentionSink) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const float height : kSinkHeights) {
      for (const float v : kSinkValues) {
        const Case c = with_sink(height, v);
        const ForwardResult want = test::multiplies_fp8(recipe)
                                       ? test::running_forward(c, recipe).outputs
                                       : test::forward(c, recipe, test::on_engine("reference"));
        test::expect_outputs_like(test::device_forward(c, recipe), want, c, recipe,
                                  fmt::format("of {}, a sink of height {} with V times {}", recipe.name, height, v));
      }
    }
  }
}

/// The bound of numerics.md, section 6, on what a running reference keeps and the reference engine flushes. Needs no
/// device.
TEST(CudaRunningReference, KeepsWhatTheDocumentsSay) {
  for (const std::string_view name : {"mxfp8", "mxfp8-tokenblock"}) {
    const Recipe recipe = test::recipe_named(name);
    for (const float height : kSinkHeights) {
      for (const float v : kSinkValues) {
        const Case c = with_sink(height, v);
        const test::Running got = test::running_forward(c, recipe);
        const ForwardResult want = test::forward(c, recipe, test::on_engine("reference"));
        const std::string where = fmt::format("{}, a sink of height {} with V times {}", name, height, v);
        const auto bound = [&](std::int64_t i) {
          return static_cast<double>(got.slack.at(i)) + 0x1p-22 * std::fabs(static_cast<double>(want.o.at(i)));
        };
        EXPECT_TRUE(test::within(got.outputs.o, want.o, bound)) << "o of " << where;
        test::expect_lse_like(got.outputs.lse, want.lse, recipe, where);
      }
    }
    // Of usual rows nothing to speak of: every other test compares with the reference engine itself.
    const Case usual = test::random_case(test::pack_self({300, 40}), {2, 1, 64, 64}, DType::f32, 23);
    EXPECT_LE(test::relative_l2(test::running_forward(usual, recipe).outputs.o,
                                test::forward(usual, recipe, test::on_engine("reference")).o),
              1e-6);
  }
}

TEST_F(CudaValues, C2_OutlierColumns) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const std::int64_t dims : {64, 128}) {
      Case c = test::random_case(test::pack_self({150, 70}), {2, 1, dims, dims}, DType::bf16, 29);
      c.k = test::random_tensor(DType::bf16, c.k.shape, Distribution::outliers, 31);
      test::expect_like_reference(c, recipe, fmt::format("an outlier column of k, dims {}", dims));
      c.v = test::random_tensor(DType::bf16, c.v.shape, Distribution::wide, 37);
      test::expect_like_reference(c, recipe, fmt::format("and wide V, dims {}", dims));
    }
  }
}

/// Logits of tens of thousands: one key has all of the weight, and nothing overflows.
TEST_F(CudaValues, C4_HugeLogits) {
  for (const Recipe& recipe : test::device_recipes()) {
    Case c = test::random_case(test::pack_self({100, 33}), {2, 1, 64, 64}, DType::f32, 41);
    c.q = test::scaled(std::move(c.q), 100);
    c.k = test::scaled(std::move(c.k), 100);
    const ForwardResult got = test::device_forward(c, recipe);
    EXPECT_TRUE(test::all_finite(got.o)) << recipe.name;
    EXPECT_TRUE(test::all_finite(got.lse)) << recipe.name;
    // O is a mean of V whichever of nearly equal logits is the largest.
    const std::vector<double> size = test::largest_visible_v(c);
    const double step_of_v = test::step_of(recipe.o.tokens);  // What rounding V adds at most.
    for (std::int64_t i = 0; i < got.o.elements() && recipe.row_sum == RowSum::quantized; ++i) {
      ASSERT_LE(std::fabs(got.o.at(i)), size[static_cast<std::size_t>(i / 64)] * (1 + step_of_v)) << i;
    }
    // LSE is the largest logit, which is off by the accumulator's 2^-13 of its largest products.
    const ForwardResult want = test::forward(c, recipe, test::on_engine("reference"));
    EXPECT_TRUE(test::within(got.lse, want.lse, 0x1p-9 * test::largest(want.lse))) << recipe.name;
  }
}

}  // namespace
}  // namespace mxflash
