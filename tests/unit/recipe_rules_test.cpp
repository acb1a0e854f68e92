// What a recipe may not be: one test a rule.
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "unit/recipe_support.hpp"

namespace mxflash {
namespace {

using test::changed;
using test::expect_accepted;
using test::expect_refused;
using test::shipped;

TEST(RecipeRules, Name) {
  for (const std::string name : {"", "Mx", "a b", "a_b", "a\nb", "\xC3\xA9"}) {
    expect_refused(changed("mxfp8", [&](Recipe& r) { r.name = name; }), {"name is \"", "a-z, 0-9 and -"});
  }
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.name = "my-8"; }));
}

TEST(RecipeRules, BetaIsAPowerOfTwo) {
  for (const int beta : {0, -1, 3, 255, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    expect_refused(changed("mxfp8", [&](Recipe& r) { r.beta = beta; }),
                   {"beta is " + std::to_string(beta), "a power of two"});
  }
}

TEST(RecipeRules, TauIsNotNegative) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.tau = -1; }), {"tau is -1", "0 to 32"});
  expect_refused(changed("bf16", [](Recipe& r) { r.tau = 33; }), {"tau is 33", "0 to 32"});
  expect_accepted(changed("bf16", [](Recipe& r) { r.tau = 32; }));
}

TEST(RecipeRules, BetaTwoToTauFitsThePFormat) {
  const auto with = [](int beta, int tau) {
    return changed("mxfp8", [&](Recipe& r) {
      r.beta = beta;
      r.tau = tau;
    });
  };
  expect_accepted(with(16, 4));
  expect_accepted(with(256, 0));
  expect_accepted(with(1, 8));
  expect_refused(with(256, 1), {"beta 2^tau is 512 (beta 256, tau 1)", "at most 448", "e4m3", "o.weights"});
  expect_refused(with(512, 0), {"beta 2^tau is 512", "448"});
  expect_refused(with(16, 5), {"beta 2^tau is 512", "448"});
  expect_refused(with(1 << 30, 32), {"beta 2^tau", "448"});
}

TEST(RecipeRules, TheMaximumIsThatOfTheFormat) {
  const auto with = [](Encoding encoding, int beta) {
    return changed("mxfp8", [&](Recipe& r) {
      r.o.weights.encoding = r.dv.weights.encoding = encoding;
      r.beta = beta;
    });
  };
  expect_accepted(with(Encoding::e5m2, 32768));
  expect_refused(with(Encoding::e5m2, 65536), {"beta 2^tau is 65536", "57344", "e5m2"});
  expect_accepted(with(Encoding::e3m2, 16));
  expect_refused(with(Encoding::e3m2, 32), {"beta 2^tau is 32", "28"});
  expect_accepted(with(Encoding::e2m3, 4));
  expect_refused(with(Encoding::e2m3, 8), {"beta 2^tau is 8", "7.5"});
  expect_accepted(with(Encoding::e2m1, 4));
  expect_refused(with(Encoding::e2m1, 8), {"beta 2^tau is 8", "at most 6"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dv.weights.encoding = Encoding::e2m1; }),
                 {"beta 2^tau is 256", "at most 6", "dv.weights"});
  // Blocks with a scale of their own have no such limit.
  expect_accepted(changed("mxfp4-diagonal", [](Recipe& r) { r.beta = 256; }));
}

TEST(RecipeRules, PTakesNoNvfp4) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.o.weights = {Encoding::nvfp4, Block::dims16()}; }),
                 {"o.weights.encoding is nvfp4", "e4m3", "powers of two"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dv.weights = {Encoding::nvfp4, Block::channel16()}; }),
                 {"dv.weights.encoding is nvfp4"});
}

TEST(RecipeRules, PBlocksLieAlongTheContraction) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.o.weights.block = Block::channel32(); }),
                 {"o.weights.block is channel:32", "static, dims:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dv.weights.block = Block::dims32(); }),
                 {"dv.weights.block is dims:32", "static, channel:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.o.weights.block = Block::square32(); }),
                 {"o.weights.block is square:32", "static, dims:32"});
  expect_refused(changed("mxfp4-diagonal", [](Recipe& r) { r.o.cut->weights = {Encoding::e2m1, Block::channel32()}; }),
                 {"o.cut.weights.block is channel:32", "static, dims:32"});
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.dv.weights = {Encoding::bf16}; }));
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.o.weights = {Encoding::f32}; }));
}

TEST(RecipeRules, DsBlocksLieAlongTheContraction) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq.weights.block = Block::channel32(); }),
                 {"dq.weights.block is channel:32", "square:32, dims:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq.weights.block = Block::tensor(); }),
                 {"dq.weights.block is tensor", "square:32, dims:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dk.weights.block = Block::dims32(); }),
                 {"dk.weights.block is dims:32", "square:32, channel:32", "the whole operand as dq.weights"});
  expect_refused(changed("fp4", [](Recipe& r) { r.dq.weights.block = Block::channel16(); }),
                 {"dq.weights.block is channel:16", "dims:16 for nvfp4"});
  expect_refused(changed("fp4", [](Recipe& r) { r.dk.weights.block = Block::dims16(); }),
                 {"dk.weights.block is dims:16", "channel:16 for nvfp4"});
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.dk.weights.block = Block::channel32(); }));
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.dq.weights = r.dk.weights = {Encoding::bf16}; }));
}

TEST(RecipeRules, DkMayTakeTheRowCodesOfDq) {
  Recipe recipe = shipped("mxfp8");
  recipe.dq.weights.block = recipe.dk.weights.block = Block::dims32();
  expect_accepted(recipe);
  recipe.dk.weights.rounding = Rounding::stochastic;  // Other codes now: they would have to lie along queries.
  expect_refused(recipe, {"dk.weights.block is dims:32", "dq.weights"});
}

TEST(RecipeRules, Nvfp4AndBlocksOf16BelongTogether) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.block = Block::dims16(); }),
                 {"s.left.block is dims:16", "token, tokens:32, dims:32", "e4m3"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.o.tokens.block = Block::channel16(); }),
                 {"o.tokens.block is channel:16", "channel:32", "e4m3"});
  expect_refused(changed("nvfp4", [](Recipe& r) { r.s.right.block = Block::token(); }),
                 {"s.right.block is token", "dims:16 for nvfp4"});
  expect_refused(changed("fp4", [](Recipe& r) { r.dk.tokens.block = Block::channel32(); }),
                 {"dk.tokens.block is channel:32", "channel:16 for nvfp4"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dk.weights = {Encoding::e2m1, Block::channel16()}; }),
                 {"dk.weights.block is channel:16", "channel:32"});
}

TEST(RecipeRules, TokenBlocksSuitTheContraction) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.block = Block::channel32(); }),
                 {"s.left.block is channel:32", "dims:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dp.right.block = Block::channel32(); }),
                 {"dp.right.block is channel:32", "dims:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.o.tokens.block = Block::dims32(); }),
                 {"o.tokens.block is dims:32", "channel:32"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dv.tokens.block = Block::dims32(); }), {"dv.tokens.block"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq.tokens.block = Block::dims32(); }), {"dq.tokens.block"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dk.tokens.block = Block::dims32(); }), {"dk.tokens.block"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.block = {64, 0}; }), {"s.left.block is 64x0", "tokens:32"});
}

TEST(RecipeRules, AdaptiveIsForNvfp4) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dv.tokens.second_level = SecondLevel::adaptive; }),
                 {"dv.tokens.second_level is adaptive with e4m3", "nvfp4 only"});
}

TEST(RecipeRules, UosIsForE2m1) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.rule = ScaleRule::uos; }),
                 {"s.left.rule is uos with e4m3", "e2m1 only"});
  expect_refused(changed("fp4", [](Recipe& r) { r.s.left.rule = ScaleRule::uos; }), {"uos with nvfp4", "e2m1 only"});
  expect_accepted(changed("mxfp4-diagonal", [](Recipe& r) { r.s.left.rule = ScaleRule::uos; }));
}

TEST(RecipeRules, StochasticIsForTheBackwardAndNeverForP) {
  const auto stochastic = [](Operand& operand) { operand.rounding = Rounding::stochastic; };
  expect_refused(changed("mxfp8", [&](Recipe& r) { stochastic(r.s.left); }),
                 {"s.left.rounding is stochastic", "nearest in the forward"});
  expect_refused(changed("mxfp8", [&](Recipe& r) { stochastic(r.o.weights); }), {"o.weights.rounding", "forward"});
  expect_refused(changed("fp4", [&](Recipe& r) { stochastic(r.o.cut->tokens); }), {"o.cut.tokens.rounding", "forward"});
  expect_refused(changed("mxfp8", [&](Recipe& r) { stochastic(r.dv.weights); }),
                 {"dv.weights.rounding is stochastic", "nearest for P"});
  expect_refused(changed("bf16", [&](Recipe& r) { stochastic(r.dq.weights); }),
                 {"dq.weights.rounding is stochastic with bf16", "nearest"});
  expect_accepted(changed("mxfp8", [&](Recipe& r) {
    stochastic(r.dp.left);
    stochastic(r.dv.tokens);
    stochastic(r.dq.tokens);
    stochastic(r.dk.tokens);
    stochastic(r.dq.weights);
    stochastic(r.dk.weights);
  }));
}

TEST(RecipeRules, CutTokensShareNoScaleOfTokens) {
  expect_refused(changed("fp4", [](Recipe& r) { r.o.cut->tokens.block = Block::channel32(); }),
                 {"o.cut.tokens.block is channel:32", "token", "bf16"});
  expect_refused(changed("mxfp4-diagonal", [](Recipe& r) { r.dq.cut->tokens = {Encoding::e4m3, Block::tokens32()}; }),
                 {"dq.cut.tokens.block is tokens:32", "token"});
  expect_accepted(changed("fp4", [](Recipe& r) { r.o.cut->tokens = {Encoding::f32}; }));
}

TEST(RecipeRules, ProductsOverQueriesHaveNoCut) {
  const WeightPair pair{{Encoding::bf16}, {Encoding::bf16}};
  expect_refused(changed("mxfp8", [&](Recipe& r) { r.dv.cut = pair; }), {"dv.cut", "null", "queries"});
  expect_refused(changed("mxfp8", [&](Recipe& r) { r.dk.cut = pair; }), {"dk.cut", "null", "queries"});
}

TEST(RecipeRules, UnquantizedRowSumIsForNegatives) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.row_sum = RowSum::unquantized; }),
                 {"row_sum is unquantized", "quantized", "training"});
  expect_refused(changed("mxattention", [](Recipe& r) { r.row_sum = RowSum::unquantized; }),
                 {"row_sum is unquantized", "inference"});
}

TEST(RecipeRules, ApproximateExponentialsAreForInference) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.exponential = Exponential::schraudolph; }),
                 {"exponential is schraudolph", "exact", "training"});
  expect_refused(changed("fp4", [](Recipe& r) { r.exponential = Exponential::mitchell; }),
                 {"exponential is mitchell", "exact", "training"});
  expect_refused(changed("naive-fp4", [](Recipe& r) { r.exponential = Exponential::mitchell; }),
                 {"exponential is mitchell", "negative"});
}

TEST(RecipeRules, EachApproximateExponentialHasItsP) {
  expect_accepted(changed("mxattention", [](Recipe& r) { r.exponential = Exponential::mitchell; }));
  expect_refused(changed("mxattention", [](Recipe& r) { r.exponential = Exponential::schraudolph; }),
                 {"exponential is schraudolph with o.weights.encoding e2m1", "e4m3 only"});
  Recipe recipe = changed("mxattention", [](Recipe& r) {
    r.o.weights = r.o.cut->weights = {Encoding::e4m3, Block::tensor()};
    r.exponential = Exponential::schraudolph;
  });
  expect_accepted(recipe);
  recipe.exponential = Exponential::mitchell;
  expect_refused(recipe, {"exponential is mitchell with o.weights.encoding e4m3", "e2m1 only"});
  recipe.exponential = Exponential::schraudolph;
  recipe.o.cut->weights = {Encoding::bf16};
  expect_refused(recipe, {"schraudolph with o.cut.weights.encoding bf16", "e4m3 only"});
}

TEST(RecipeRules, TrainingNeedsEveryBackwardOperand) {
  using Pick = std::function<Operand&(Recipe&)>;
  const std::vector<std::pair<std::string, Pick>> operands{
      {"dp.left", [](Recipe& r) -> Operand& { return r.dp.left; }},
      {"dp.right", [](Recipe& r) -> Operand& { return r.dp.right; }},
      {"dv.weights", [](Recipe& r) -> Operand& { return r.dv.weights; }},
      {"dv.tokens", [](Recipe& r) -> Operand& { return r.dv.tokens; }},
      {"dq.weights", [](Recipe& r) -> Operand& { return r.dq.weights; }},
      {"dq.tokens", [](Recipe& r) -> Operand& { return r.dq.tokens; }},
      {"dk.weights", [](Recipe& r) -> Operand& { return r.dk.weights; }},
      {"dk.tokens", [](Recipe& r) -> Operand& { return r.dk.tokens; }}};
  for (const auto& [path, pick] : operands) {
    const std::string field = path + ".encoding is ";
    expect_refused(changed("mxfp8", [&](Recipe& r) { pick(r) = {}; }), {field + "f32", "bf16", "training"});
    expect_refused(changed("fp8-tensor", [&](Recipe& r) { pick(r) = {}; }), {field + "f32", "bf16", "negative"});
    expect_refused(changed("mxattention", [&](Recipe& r) { pick(r) = {Encoding::bf16}; }),
                   {field + "bf16", "f32", "inference"});
  }
  expect_refused(changed("mxattention", [](Recipe& r) { r.purpose = Purpose::training; }),
                 {"dp.left.encoding is f32", "training"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.purpose = Purpose::inference; }),
                 {"dp.left.encoding is e4m3", "inference"});
  expect_refused(changed("mxattention", [](Recipe& r) { r.dq.cut = WeightPair{}; }), {"dq.cut", "null"});
}

/// What a caller's memory may hold though no enumerator has it.
template <class Enum>
Enum outside() {
  return std::bit_cast<Enum>(std::underlying_type_t<Enum>{9});
}

TEST(RecipeRules, ValuesOutsideAnEnumerationAreNamed) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.purpose = outside<Purpose>(); }), {"purpose", "training"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.hadamard = outside<Hadamard>(); }), {"hadamard", "at_128"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.exponential = outside<Exponential>(); }), {"mitchell"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.row_sum = outside<RowSum>(); }), {"row_sum", "quantized"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq_accumulation = outside<DqAccumulation>(); }),
                 {"dq_accumulation", "f16_causal"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.claims.forward = outside<Causality>(); }),
                 {"claims.forward", "leaks"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.claims.backward = outside<Causality>(); }),
                 {"claims.backward", "leaks"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dk.tokens.encoding = outside<Encoding>(); }),
                 {"dk.tokens.encoding", "nvfp4"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.rule = outside<ScaleRule>(); }), {"s.left.rule", "floor"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.rounding = outside<Rounding>(); }),
                 {"s.left.rounding", "nearest"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.second_level = outside<SecondLevel>(); }),
                 {"s.left.second_level", "fixed"});
}

TEST(RecipeRules, EightAndSixBitFormatsStandWhereE4m3Does) {
  for (const Encoding encoding : {Encoding::e5m2, Encoding::e2m3, Encoding::e3m2}) {
    Recipe recipe = shipped("mxfp8");
    recipe.beta = 4;
    for (DimProduct* product : {&recipe.s, &recipe.dp}) product->left.encoding = product->right.encoding = encoding;
    for (TokenProduct* product : {&recipe.o, &recipe.dv, &recipe.dq, &recipe.dk}) {
      product->weights.encoding = product->tokens.encoding = encoding;
    }
    expect_accepted(recipe);
  }
}

}  // namespace
}  // namespace mxflash
