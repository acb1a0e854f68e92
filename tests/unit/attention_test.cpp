// Causality, packing, masks, lengths, shapes and views: what has to be the same, bit for bit, and what has to be
// refused.
#include <array>
#include <limits>

#include "mxflash/quantize.hpp"
#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::Distribution;

constexpr float kInf = std::numeric_limits<float>::infinity();

class EveryRecipe : public testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Attention, EveryRecipe, testing::ValuesIn(test::every_recipe()), test::name_of_recipe);

bool tensor_wide(const Recipe& recipe) { return recipe.s.left.block == Block::tensor(); }

// ---- C1: a later token changes nothing before it ----

/// The first token whose results a change of token t and later ones may move.
std::int64_t first_movable(Causality level, std::int64_t t) { return level == Causality::block ? t - t % kBlock : t; }

/// Rows of the only document before the change, as far as the recipe's claims go.
void expect_earlier_rows_same(const Recipe& recipe, const Case& before, const Case& after, std::int64_t t) {
  const std::vector<test::Output> was = test::outputs(before, recipe);
  const std::vector<test::Output> is = test::outputs(after, recipe);
  for (std::size_t i = 0; i < was.size() && i < 3; ++i) {  // o, lse, dq
    const Causality level = i < 2 ? recipe.claims.forward : recipe.claims.backward;
    if (level == Causality::leaks) continue;
    const std::int64_t end = first_movable(level, t);
    EXPECT_TRUE(test::same_bits(test::rows_of(is[i].tensor, 0, end), test::rows_of(was[i].tensor, 0, end)))
        << was[i].name << ", changed from token " << t;
  }
}

/// One to change: row t of it becomes `value`, of every later row too where `later`.
struct Change {
  std::int64_t token = 0;
  float value = 0;
  bool later = false;
};

Tensor changed(Tensor tensor, const Change& change) {
  const std::int64_t end = change.later ? tensor.shape[0] : change.token + 1;
  for (std::int64_t t = change.token; t < end; ++t) test::set_row(tensor, t, 0, change.value);
  return tensor;
}

TEST_P(EveryRecipe, C1_NoLeakThroughALaterToken) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({128}), {.heads = 1, .kv_heads = 1, .head_dim = 128, .value_dim = 128});
  c.q = c.k = test::constant_tensor(DType::f32, {128, 1, 128}, 1);
  c.v = Tensor::zeros(DType::f32, {128, 1, 128});
  c.v.set(0, std::ldexp(1.0F, -20));
  for (const std::int64_t token : {16, 32}) {
    Case v = c;
    v.v.set(token * 128, 1);
    expect_earlier_rows_same(recipe, c, v, token);
    Case k = c;
    k.k = changed(c.k, {token, 7.0F, false});
    expect_earlier_rows_same(recipe, c, k, token);
    Case q = c;
    q.q = changed(c.q, {token, -3.0F, false});
    expect_earlier_rows_same(recipe, c, q, token);
  }
}

TEST_P(EveryRecipe, C1_NoLeakOnRandomTokens) {
  const Recipe& recipe = GetParam();
  const Case c = test::random_case(test::pack_self({150}), {.heads = 1, .kv_heads = 1});
  for (const Change& change :
       {Change{1, 500, true}, Change{45, 0, true}, Change{64, 1e4F, false}, Change{131, 1e-30F, true}}) {
    Case after = c;
    after.q = changed(c.q, change);
    after.k = changed(c.k, change);
    after.v = changed(c.v, change);
    after.dout = changed(c.dout, change);
    expect_earlier_rows_same(recipe, c, after, change.token);
  }
}

/// The other neighbour of C1: whether there are later tokens at all. A document that goes on gives its first rows the
/// bits that they had when it ended there, as a model that writes token by token needs.
TEST_P(EveryRecipe, C1_ADocumentThatGoesOnKeepsItsFirstRows) {
  const Recipe& recipe = GetParam();
  const Case whole = test::random_case(test::pack_self({130}), {.heads = 2, .kv_heads = 1});
  const std::vector<test::Output> want = test::outputs(whole, recipe);
  for (const int length : {1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 96, 97, 128, 129}) {
    Case part = whole;
    part.problem.packing = test::pack_self({length});
    for (Tensor* tensor : {&part.q, &part.k, &part.v, &part.dout}) *tensor = test::rows_of(*tensor, 0, length);
    const std::vector<test::Output> got = test::outputs(part, recipe);
    for (std::size_t i = 0; i < got.size() && i < 3; ++i) {  // o, lse, dq
      const Causality level = i < 2 ? recipe.claims.forward : recipe.claims.backward;
      if (level == Causality::leaks) continue;
      const std::int64_t end = level == Causality::exact ? length : length - length % kBlock;
      EXPECT_TRUE(test::same_bits(test::rows_of(got[i].tensor, 0, end), test::rows_of(want[i].tensor, 0, end)))
          << got[i].name << " of the first " << length << " tokens";
    }
  }
}

/// The neighbour of C1: tokens whose V is zero, or tiny, still have their share of the row. They are many orders below
/// the others in what multiplies V, not in the sum of the weights.
TEST_P(EveryRecipe, C1_TokensWithoutAValueKeepTheirShareOfTheRow) {
  const Recipe& recipe = GetParam();
  for (const float small : {0.0F, 1e-30F, std::ldexp(1.0F, -12)}) {
    Case c = test::random_case(test::pack_self({70}), {.heads = 1, .kv_heads = 1});
    c.q = c.k = test::constant_tensor(DType::f32, {70, 1, 32}, 0);
    c.v = test::constant_tensor(DType::f32, {70, 1, 32}, small);
    test::set_row(c.v, 0, 0, 1.5F);
    c.dout = test::constant_tensor(DType::f32, {70, 1, 32}, 1);
    const ForwardResult f = test::forward(c, recipe);
    for (std::int64_t i = 0; i < 70; ++i) {
      const double want = 1.5 / static_cast<double>(i + 1);
      ASSERT_NEAR(static_cast<double>(f.o.at(i * 32)), want, 1e-3) << small << " row " << i;
      ASSERT_NEAR(static_cast<double>(f.lse.at(i)), std::log(static_cast<double>(i + 1)), 1e-3) << small;
    }
    if (!test::has_backward(recipe)) continue;
    const BackwardResult b = test::backward(c, recipe);
    const BackwardResult want = test::exact_gradients(c);
    // P in E2M1 with 32 queries to a scale: a column of 1/(i+1) loses what is below a twelfth of its largest.
    EXPECT_TRUE(test::within(b.dv, want.dv, [&](std::int64_t i) { return 0.05 + 0.3 * std::fabs(want.dv.at(i)); }));
  }
}

// ---- C3: neighbours and the place in the pack ----

TEST_P(EveryRecipe, C3_NeighboursAndThePlaceInThePackChangeNothing) {
  const Recipe& recipe = GetParam();
  if (tensor_wide(recipe)) GTEST_SKIP() << "one scale for the whole tensor";
  const Case packed = test::random_case(test::pack({{1, 3}, {45, 50}, {33, 40}}), {.heads = 2, .kv_heads = 1});
  Case alone = packed;
  alone.problem.packing = test::pack({{45, 50}});
  alone.q = test::rows_of(packed.q, 1, 46);
  alone.dout = test::rows_of(packed.dout, 1, 46);
  alone.k = test::rows_of(packed.k, 3, 53);
  alone.v = test::rows_of(packed.v, 3, 53);
  std::vector<test::Output> inside = test::outputs(packed, recipe);
  for (std::size_t i = 0; i < inside.size(); ++i) {
    inside[i].tensor = i < 3 ? test::rows_of(inside[i].tensor, 1, 46) : test::rows_of(inside[i].tensor, 3, 53);
  }
  test::expect_same(inside, test::outputs(alone, recipe), "in a pack");
}

// ---- C4: masked weights are zero ----

TEST_P(EveryRecipe, C4_AMaskedWeightIsZeroHoweverLowTheOthers) {
  const Recipe& recipe = GetParam();
  if (recipe.claims.forward == Causality::leaks) GTEST_SKIP() << "the masked V of 96 rounds the visible one away";
  Case c = test::random_case(test::pack_self({2}), {.heads = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 8});
  c.problem.scale = 1.0F;
  c.q = c.k = c.v = Tensor::zeros(DType::f32, {2, 1, 8});
  c.q.set(0, -20000);
  c.k.set(0, 1);
  test::set_row(c.v, 0, 0, 1);
  test::set_row(c.v, 1, 0, 96);
  EXPECT_EQ(test::forward(c, recipe).o.at(0), 1.0F);
}

Case huge_logits() {
  Case c =
      test::random_case(test::pack_self({64}), {.heads = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 8}, DType::bf16);
  c.problem.scale = 0.29F;
  c.q = c.k = Tensor::zeros(DType::bf16, {64, 1, 8});
  for (std::int64_t t = 0; t < 64; ++t) {
    c.q.set(t * 8, -448 + static_cast<float>(t));
    c.k.set(t * 8, 1880 - 8 * static_cast<float>(t));  // logits down to -2.45e5
  }
  return c;
}

TEST(Attention, C4_HugeLogitsGiveTheExactResultInBf16) {
  const Case c = huge_logits();
  const ForwardResult f = test::forward(c, test::recipe_named("bf16"));
  const ForwardResult want = test::exact(c);
  // Output 2^-8 of itself (below 4), weights 2^-8 of at most 4; a logit has 1e-11 of its own size.
  EXPECT_TRUE(test::within(f.o, want.o, 0.032));
  EXPECT_TRUE(test::within(f.lse, want.lse, [&](std::int64_t i) { return 0.01 + 1e-7 * std::fabs(want.lse.at(i)); }));
}

TEST_P(EveryRecipe, C4_HugeLogitsStayFinite) {
  for (const test::Output& output : test::outputs(huge_logits(), GetParam())) {
    EXPECT_TRUE(test::all_finite(output.tensor)) << output.name;
  }
}

TEST_P(EveryRecipe, C4_LogitsBeyondEveryIntegerStayFinite) {
  Case c = test::random_case(test::pack_self({40}), {.heads = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 8});
  for (std::int64_t i = 0; i < c.q.elements(); ++i) {
    c.q.set(i, 1e36F * c.q.at(i));  // logits up to 1e73
    c.k.set(i, 1e36F * c.k.at(i));
  }
  const ForwardResult f = test::forward(c, GetParam());
  EXPECT_TRUE(test::all_finite(f.o));
  double largest = 0;
  for (std::int64_t i = 0; i < c.v.elements(); ++i) largest = std::fmax(largest, std::fabs(c.v.at(i)));
  for (std::int64_t i = 0; i < f.o.elements(); ++i) EXPECT_LE(std::fabs(f.o.at(i)), 1.5 * largest) << i;
}

// ---- C5 .. C9: rows, windows, lengths ----

/// Row `token` of every head.
void expect_empty_row(const ForwardResult& f, const Tensor* dq, std::int64_t token) {
  EXPECT_TRUE(test::all_zero(test::rows_of(f.o, token, token + 1))) << token;
  for (std::int64_t h = 0; h < f.lse.shape[1]; ++h) EXPECT_EQ(f.lse.at(token * f.lse.shape[1] + h), -kInf) << token;
  if (dq != nullptr) {
    EXPECT_TRUE(test::all_zero(test::rows_of(*dq, token, token + 1))) << token;
  }
}

TEST_P(EveryRecipe, C5_RowsWithoutKeysAndKeysWithoutRows) {
  const Recipe& recipe = GetParam();
  // Three empty rows, two that see keys; queries alone; keys alone.
  const Case c = test::random_case(test::pack({{5, 2}, {4, 0}, {0, 3}}), {});
  const ForwardResult f = test::forward(c, recipe);
  std::optional<BackwardResult> b;
  if (test::has_backward(recipe)) b = test::backward(c, recipe);
  for (const std::int64_t token : {0, 1, 2, 5, 6, 7, 8}) expect_empty_row(f, b ? &b->dq : nullptr, token);
  for (const std::int64_t token : {3, 4}) EXPECT_TRUE(test::all_finite(test::rows_of(f.lse, token, token + 1)));
  EXPECT_TRUE(test::all_finite(f.o));
  if (!b) return;
  EXPECT_TRUE(test::all_finite(b->dq));
  EXPECT_TRUE(test::all_finite(b->dk));
  EXPECT_TRUE(test::all_finite(b->dv));
  EXPECT_TRUE(test::all_zero(test::rows_of(b->dk, 2, 5)));
  EXPECT_TRUE(test::all_zero(test::rows_of(b->dv, 2, 5)));
}

TEST(Attention, C5_LopsidedDocuments) {
  const Recipe recipe = test::recipe_named("mxfp8");
  for (const auto& lengths : {std::vector<test::Lengths>{{0, 100}, {150, 0}, {0, 100}, {150, 100}},
                              std::vector<test::Lengths>{{0, 100}, {150, 100}, {150, 100}},
                              std::vector<test::Lengths>{{270, 2022}, {6898, 0}, {1785, 540}}}) {
    const Case c = test::random_case(test::pack(lengths), {.heads = 1, .kv_heads = 1, .head_dim = 16, .value_dim = 16});
    const ForwardResult f = test::forward(c, recipe);
    const BackwardResult b = test::backward(c, recipe);
    for (const Document& document : c.problem.packing.documents()) {
      for (std::int64_t i = 0; i < document.q_length; ++i) {
        const bool empty = visible_keys(document, c.problem.mask, i).empty();
        ASSERT_EQ(f.lse.at(document.q_begin + i) == -kInf, empty) << i;
      }
    }
    for (const Tensor* tensor : {&f.o, &b.dq, &b.dk, &b.dv}) EXPECT_TRUE(test::all_finite(*tensor));
    // Normal q, k, v of 16 dims in E4M3: an output is a mean of values of size 4 at most, 2^-4 off, and weights are
    // 2^-4 of logits (about 5 at the most) off.
    EXPECT_TRUE(test::within(f.o, test::exact(c).o, 0.7));
  }
}

TEST_P(EveryRecipe, C6_ShortKeyDocumentsHaveFiniteGradients) {
  Case c = test::random_case(test::pack({{76, 1}, {34, 1}, {146, 1}}), {.heads = 1, .kv_heads = 1}, DType::f16);
  for (Tensor* tensor : {&c.q, &c.k, &c.v}) *tensor = test::scaled(*tensor, 3);
  c.dout = test::constant_tensor(DType::f16, c.q.shape, 1);
  for (const Mask& mask : {Mask::causal(), Mask::full()}) {
    c.problem.mask = mask;
    for (const test::Output& output : test::outputs(c, GetParam())) {
      if (output.name != "lse") {
        EXPECT_TRUE(test::all_finite(output.tensor)) << output.name;
      }
    }
  }
}

TEST(Attention, C7_QueriesAreAlignedWithTheLastKeys) {
  Case c = test::random_case(test::pack({{2, 5}, {5, 2}, {3, 3}}), {.heads = 1, .kv_heads = 1, .head_dim = 8});
  c.q = c.k = test::constant_tensor(DType::f32, {10, 1, 8}, 0);
  const ForwardResult f = test::forward(c, test::recipe_named("mxfp8"));
  // Equal logits: exp(LSE) counts the keys that a row sees.
  const std::array<int, 10> seen = {4, 5, 0, 0, 0, 1, 2, 1, 2, 3};
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_NEAR(std::exp(static_cast<double>(f.lse.at(static_cast<std::int64_t>(i)))), seen[i], 1e-5) << i;
  }
}

TEST_P(EveryRecipe, C8_WindowsThatEqualOtherMasks) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({70, 33}), {.heads = 1, .kv_heads = 1});
  const std::vector<test::Output> causal = test::outputs(c, recipe);
  c.problem.mask = Mask::window(69, 0);
  test::expect_same(test::outputs(c, recipe), causal, "window (S-1, 0)");
  c.problem.mask = Mask::full();
  const std::vector<test::Output> full = test::outputs(c, recipe);
  c.problem.mask = Mask::window(INT32_MAX, INT32_MAX);
  test::expect_same(test::outputs(c, recipe), full, "window (INT_MAX, INT_MAX)");
  c.problem.mask = Mask::window(7, -8);
  const ForwardResult f = test::forward(c, recipe);
  for (std::int64_t token = 0; token < 103; ++token) expect_empty_row(f, nullptr, token);
}

/// One key a row: O is that key's V as the recipe stores it, and the weight cancels.
TEST_P(EveryRecipe, C8_AWindowOfOneKeyGivesItsValue) {
  const Recipe& recipe = GetParam();
  if (recipe.row_sum == RowSum::unquantized) GTEST_SKIP() << "the weight does not cancel";
  Case c = test::random_case(test::pack({{40, 70}}), {.heads = 1, .kv_heads = 1});
  c.problem.mask = Mask::window(0, 0);
  const QuantizeOptions options{.operand = recipe.o.cut ? recipe.o.cut->tokens : recipe.o.tokens, .side = Side::key};
  const Result<Quantized> v = quantize(test::view(c.v), c.problem.packing, options, 1);
  ASSERT_TRUE(v.ok());
  const ForwardResult f = test::forward(c, recipe);
  for (std::int64_t i = 0; i < 40; ++i) {
    for (std::int64_t d = 0; d < 32; ++d) {
      ASSERT_FLOAT_EQ(f.o.at(i * 32 + d), v->dequantized(i + 30, 0, d)) << i << ", " << d;
    }
  }
}

TEST_P(EveryRecipe, C9_LengthsAroundTheBlocks) {
  const Recipe& recipe = GetParam();
  const Case c = test::random_case(test::pack_self({1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129}),
                                   {.heads = 1, .kv_heads = 1, .head_dim = 16, .value_dim = 16});
  const ForwardResult want = test::exact(c);
  const ForwardResult f = test::forward(c, recipe);
  EXPECT_TRUE(test::all_finite(f.o));
  // Far off only if a block went to the wrong place: in 4 bits a logit (about 5 at the most) is 0.25 off, its key's
  // weight by as much of itself, and V by a quarter of its block's largest.
  const bool four_bits = recipe.s.left.encoding == Encoding::e2m1 || recipe.s.left.encoding == Encoding::nvfp4;
  EXPECT_TRUE(test::within(f.o, want.o, four_bits ? 2.5 : 0.7));
}

TEST_P(EveryRecipe, C9_LengthsAroundAThousandAndMore) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({1023, 1024, 1025, 2081}), {1, 1, 8, 8});
  c.problem.mask = Mask::window(70, 0);
  const bool four_bits = recipe.s.left.encoding == Encoding::e2m1 || recipe.s.left.encoding == Encoding::nvfp4;
  EXPECT_TRUE(test::within(test::forward(c, recipe).o, test::exact(c).o, four_bits ? 2.5 : 0.7));
}

TEST(Attention, C9_TimeFollowsTheTokens) {
  std::vector<std::int32_t> lengths(57344, 1);
  lengths.push_back(2048);
  const Case c =
      test::random_case(test::pack_self(lengths), {.heads = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 8});
  const ForwardResult f = test::forward(c, test::recipe_named("mxfp8"));
  for (std::int64_t i = 0; i < std::int64_t{57344} * 8; ++i) {
    // E4M3: half a unit in the last place of a number up to 2^-4 of it; of small ones, 2^-10 of the token's largest.
    ASSERT_NEAR(f.o.at(i), c.v.at(i), std::fabs(c.v.at(i)) / 16 + 0.01F) << test::place_of(c.v, i);
  }
  EXPECT_TRUE(test::all_finite(f.o));
}

// ---- C10, C11: dims and heads ----

TEST(Attention, C10_HeadDims) {
  for (const std::string_view name : {"bf16", "mxfp8", "mxfp8-tokenblock", "nvfp4", "fp4", "mxfp4-diagonal"}) {
    for (const auto& [head_dim, value_dim] : {std::pair<int, int>{8, 8},
                                              {40, 40},
                                              {72, 72},
                                              {80, 80},
                                              {96, 96},
                                              {104, 104},
                                              {120, 120},
                                              {128, 128},
                                              {192, 192},
                                              {256, 256},
                                              {192, 128}}) {
      const Case c = test::random_case(test::pack_self({33}), {1, 1, head_dim, value_dim});
      const ForwardResult f = test::forward(c, test::recipe_named(name));
      // The scale comes from the true dims: a wrong one is off by a constant factor in every logit.
      const bool four_bits = name.find("fp4") != std::string_view::npos;
      EXPECT_TRUE(test::within(f.o, test::exact(c).o, four_bits ? 2.5 : 0.5)) << name << " " << head_dim;
      EXPECT_TRUE(test::within(f.lse, test::exact(c).lse, four_bits ? 1.0 : 0.2)) << name << " " << head_dim;
      EXPECT_TRUE(test::all_finite(test::backward(c, test::recipe_named(name)).dq)) << name << " " << head_dim;
    }
  }
}

TEST(Attention, C10_ARequiredHadamardNamesItsLimit) {
  for (const std::int64_t dims : {40, 96, 192}) {
    const Case c = test::random_case(test::pack_self({8}), {1, 1, dims, dims});
    EXPECT_TRUE(test::refused_with(attention_forward(c.problem, test::recipe_named("mxattention"), c.inputs(), {}),
                                   {"head_dim", std::to_string(dims), "power of two"}));
  }
}

TEST_P(EveryRecipe, C11_QueryHeadsReadTheirGroupsHead) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({40}), {.heads = 4, .kv_heads = 2});
  for (std::int64_t t = 0; t < 40; ++t) {
    test::set_row(c.v, t, 0, 1.5F);
    test::set_row(c.v, t, 1, -3.0F);
  }
  const ForwardResult f = test::forward(c, recipe);
  for (std::int64_t i = 0; i < f.o.elements(); ++i) {
    const double want = i / 32 % 4 < 2 ? 1.5 : -3;
    // naive-fp4 normalizes by what it did not multiply.
    ASSERT_NEAR(static_cast<double>(f.o.at(i)), want, recipe.row_sum == RowSum::quantized ? 1e-6 : 1.0);
  }
}

/// Four query heads on two key/value heads, against the same with each key/value head repeated.
TEST_P(EveryRecipe, C11_GradientsAddUpOverTheGroup) {
  const Recipe& recipe = GetParam();
  if (!test::has_backward(recipe)) GTEST_SKIP() << "no backward";
  const Case grouped = test::random_case(test::pack_self({40}), {.heads = 4, .kv_heads = 2});
  Case repeated = grouped;
  repeated.k = repeated.v = Tensor::zeros(DType::f32, {40, 4, 32});
  for (std::int64_t i = 0; i < repeated.k.elements(); ++i) {
    const std::int64_t from = (i / 128 * 2 + i / 32 % 4 / 2) * 32 + i % 32;
    repeated.k.set(i, grouped.k.at(from));
    repeated.v.set(i, grouped.v.at(from));
  }
  const BackwardResult got = test::backward(grouped, recipe);
  const BackwardResult each = test::backward(repeated, recipe);
  EXPECT_TRUE(test::same_bits(got.dq, each.dq));
  for (std::int64_t i = 0; i < got.dk.elements(); ++i) {
    const std::int64_t first = (i / 64 * 4 + i / 32 % 2 * 2) * 32 + i % 32;
    ASSERT_NEAR(got.dk.at(i), each.dk.at(first) + each.dk.at(first + 32), 1e-5F);
    ASSERT_NEAR(got.dv.at(i), each.dv.at(first) + each.dv.at(first + 32), 1e-5F);
  }
}

// ---- C13, C17, C23 ----

TEST_P(EveryRecipe, C13_ViewsGiveTheSameBits) {
  const Recipe& recipe = GetParam();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c = test::random_case(test::pack_self({33, 7}), {.heads = 2, .kv_heads = 2}, dtype);
    for (std::int64_t t = 0; t < 40; ++t) {  // dO of one row for all tokens
      for (std::int64_t i = 0; i < 64; ++i) c.dout.set(t * 64 + i, c.dout.at(i));
    }
    const std::vector<test::Output> want = test::outputs(c, recipe);
    const test::StridedCopy q(c.q, {64, 32, 1}, 1);            // a base offset of one element, not aligned
    const test::StridedCopy k(c.k, {2L * 64, 32, 1}, 0);       // the first half of a fused [T, 2, H, D]
    const test::StridedCopy v(c.v, {2, 40L * 64 * 2, 80}, 3);  // transposed, last stride 80
    TensorView dout = test::view(c.dout);
    dout.stride[0] = 0;  // expanded
    const Inputs inputs{q.view(), k.view(), v.view(), dout};
    const Result<ForwardResult> f = attention_forward(c.problem, recipe, inputs, test::two_threads());
    ASSERT_TRUE(f.ok());
    EXPECT_TRUE(test::same_bits(f->o, want[0].tensor));
    EXPECT_TRUE(test::same_bits(f->lse, want[1].tensor));
    if (!test::has_backward(recipe)) continue;
    const Result<BackwardResult> b = attention_backward(c.problem, recipe, inputs, test::two_threads());
    ASSERT_TRUE(b.ok());
    EXPECT_TRUE(test::same_bits(b->dq, want[2].tensor));
    EXPECT_TRUE(test::same_bits(b->dk, want[3].tensor));
    EXPECT_TRUE(test::same_bits(b->dv, want[4].tensor));
  }
}

TEST_P(EveryRecipe, C17_PowersOfTwoGiveTheExactlyScaledResult) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({70}), {.heads = 1, .kv_heads = 1});
  c.problem.scale = 0.2F;
  const std::vector<test::Output> base = test::outputs(c, recipe);
  for (const int shift : {-2, 2}) {
    const float factor = std::ldexp(1.0F, shift);
    Case q = c;
    q.q = test::scaled(c.q, factor);
    q.problem.scale = 0.2F / factor;
    std::vector<test::Output> want = base;
    if (want.size() > 2) want[2].tensor = test::scaled(want[2].tensor, 1 / factor);
    test::expect_same(test::outputs(q, recipe), want, "scaling q");

    Case v = c;
    v.v = test::scaled(c.v, factor);
    want = base;
    for (const std::size_t i : {0U, 2U, 3U}) {
      if (i < want.size()) want[i].tensor = test::scaled(want[i].tensor, factor);
    }
    test::expect_same(test::outputs(v, recipe), want, "scaling v");

    Case dout = c;
    dout.dout = test::scaled(c.dout, factor);
    want = base;
    for (const std::size_t i : {2U, 3U, 4U}) {
      if (i < want.size()) want[i].tensor = test::scaled(want[i].tensor, factor);
    }
    test::expect_same(test::outputs(dout, recipe), want, "scaling do");
  }
}

TEST_P(EveryRecipe, C23_RunsAndThreadsGiveTheSameBits) {
  const Recipe& recipe = GetParam();
  const Case c = test::random_case(test::pack_self({33, 7, 1, 40}), {.heads = 4, .kv_heads = 2, .head_dim = 16});
  Options options = test::two_threads();
  options.threads = 1;
  options.seed = 5;
  const std::vector<test::Output> want = test::outputs(c, recipe, options);
  for (int run = 0; run < 6; ++run) {
    options.threads = std::array{1, 2, 5}[static_cast<std::size_t>(run % 3)];
    test::expect_same(test::outputs(c, recipe, options), want, "again");
  }
}

TEST(Attention, TheSeedMovesStochasticGradientsAlone) {
  const Case c = test::random_case(test::pack_self({70}), {});
  Options other = test::two_threads();
  other.seed = 99;
  for (const Recipe& recipe : recipes()) {
    if (!test::has_backward(recipe)) continue;
    const bool stochastic = recipe.dq.weights.rounding == Rounding::stochastic;
    const bool same =
        static_cast<bool>(test::same_bits(test::backward(c, recipe).dq, test::backward(c, recipe, other).dq));
    EXPECT_EQ(same, !stochastic) << recipe.name;
    EXPECT_TRUE(test::same_bits(test::forward(c, recipe).o, test::forward(c, recipe, other).o)) << recipe.name;
  }
}

// ---- C12 and other refusals; nothing at all ----

class Refusals : public testing::Test {
 protected:
  [[nodiscard]] testing::AssertionResult refused(const std::vector<std::string>& words) const {
    const Recipe recipe = test::recipe_named("mxfp8");
    return test::refused_with(attention_backward(c.problem, recipe, inputs, options), words);
  }

  Case c = test::random_case(test::pack_self({6}), {.heads = 4, .kv_heads = 2, .head_dim = 16, .value_dim = 16});
  Inputs inputs = c.inputs();
  Options options;
};

TEST_F(Refusals, TypesThatDiffer) {
  const Tensor k = test::random_tensor(DType::bf16, c.k.shape, Distribution::normal, 1);
  inputs.k = test::view(k);
  EXPECT_TRUE(refused({"k", "BF16", "F32"}));
  inputs = c.inputs();
  const Tensor dout = test::random_tensor(DType::f16, c.dout.shape, Distribution::normal, 1);
  inputs.dout = test::view(dout);
  EXPECT_TRUE(refused({"do", "F16", "F32"}));
  inputs = c.inputs();
  inputs.q.dtype = DType::i32;
  EXPECT_TRUE(refused({"q", "I32", "BF16"}));
}

TEST_F(Refusals, Dims) {
  for (const std::int64_t dims : {0, 4, 12, 264}) {
    inputs.q.shape[2] = inputs.k.shape[2] = dims;
    EXPECT_TRUE(refused({"head_dim", std::to_string(dims), "8", "256"}));
  }
  inputs = c.inputs();
  inputs.v.shape[2] = 12;
  EXPECT_TRUE(refused({"value_dim", "12", "8", "256"}));
}

TEST_F(Refusals, C11_HeadsThatDoNotDivide) {
  for (const auto& [heads, kv_heads] : {std::pair<int, int>{33, 2}, {3, 2}, {2, 4}, {0, 2}, {4, 0}}) {
    inputs.q.shape[1] = heads;
    inputs.k.shape[1] = inputs.v.shape[1] = kv_heads;
    EXPECT_TRUE(refused({"heads", std::to_string(heads), std::to_string(kv_heads)}));
  }
}

TEST_F(Refusals, Shapes) {
  inputs.v.shape[1] = 4;
  EXPECT_TRUE(refused({"v", "[6, 4, 16]", "[6, 2, 16]"}));
  inputs = c.inputs();
  inputs.k.shape[2] = 8;
  EXPECT_TRUE(refused({"k", "[6, 2, 8]", "[6, 2, 16]"}));
  inputs = c.inputs();
  inputs.dout->shape[2] = 8;
  EXPECT_TRUE(refused({"do", "[6, 4, 8]", "[6, 4, 16]"}));
}

TEST_F(Refusals, C12_APackingThatDoesNotCoverTheRows) {
  c.problem.packing = test::pack_self({5});
  EXPECT_TRUE(refused({"q", "[6, 4, 16]", "[5, 4, 16]", "cu_seqlens_q"}));
  c.problem.packing = test::pack({{6, 7}});
  EXPECT_TRUE(refused({"k", "[6, 2, 16]", "[7, 2, 16]", "cu_seqlens_k"}));
}

TEST_F(Refusals, OptionsAndScale) {
  for (const float scale : {std::nanf(""), kInf}) {
    c.problem.scale = scale;
    EXPECT_TRUE(refused({"scale", "finite"}));
  }
  c.problem.scale.reset();
  for (const int threads : {-1, 100000}) {
    options.threads = threads;
    EXPECT_TRUE(refused({"threads", std::to_string(threads)}));
  }
  options.threads = 1;
  options.engine = "warp";
  EXPECT_TRUE(refused({"engine", "warp", "auto", "reference"}));
  EXPECT_EQ(attention_forward(c.problem, test::recipe_named("mxfp8"), inputs, options).error().kind,
            ErrorKind::invalid_argument);
}

TEST_F(Refusals, BackwardWithoutDoOrOfARecipeWithout) {
  inputs.dout.reset();
  EXPECT_TRUE(refused({"do", "none"}));
  EXPECT_TRUE(attention_forward(c.problem, test::recipe_named("mxfp8"), inputs, options).ok());
  for (const std::string_view name : {"mxattention", "naive-fp4"}) {
    EXPECT_TRUE(test::refused_with(attention_backward(c.problem, test::recipe_named(name), c.inputs(), options),
                                   {std::string(name), "backward"}));
  }
}

TEST_P(EveryRecipe, NoTokensAndNoDocuments) {
  const std::vector<std::int32_t> no_documents = {0};
  for (const Packing& packing :
       {test::pack_self({0, 0}), *Packing::make(no_documents, no_documents, 0, 0), test::pack({{3, 0}})}) {
    const Case c = test::random_case(packing, {});
    for (const test::Output& output : test::outputs(c, GetParam())) {
      const bool keys = output.name == "dk" || output.name == "dv";
      EXPECT_EQ(output.tensor.shape[0], keys ? 0 : packing.tokens_q()) << output.name;
    }
  }
}

}  // namespace
}  // namespace mxflash
