// What causality follows from the blocks, and how a recipe gets a stronger one.
#include "unit/recipe_support.hpp"

namespace mxflash {
namespace {

using test::changed;
using test::expect_accepted;
using test::expect_refused;
using test::expect_words;
using test::shipped;

// ---- Claims ----

void expect_claims(const Recipe& recipe, Causality forward, Causality backward) {
  const Claims claims = derive_claims(recipe);
  EXPECT_EQ(to_string(claims.forward), to_string(forward));
  EXPECT_EQ(to_string(claims.backward), to_string(backward));
}

TEST(RecipeClaims, SharedScalesOfTheForwardReachBothClaims) {
  constexpr auto kExact = Causality::exact;
  constexpr auto kBlock = Causality::block;
  constexpr auto kLeaks = Causality::leaks;
  const auto with = [](const std::function<void(Recipe&)>& change) { return changed("bf16", change); };
  expect_claims(with([](Recipe& r) { r.s.left = {Encoding::e4m3, Block::tokens32()}; }), kBlock, kBlock);
  expect_claims(with([](Recipe& r) { r.s.right = {Encoding::e4m3, Block::square32()}; }), kBlock, kBlock);
  expect_claims(with([](Recipe& r) { r.s.right = {Encoding::e4m3, Block::tensor()}; }), kLeaks, kLeaks);
  expect_claims(with([](Recipe& r) { r.s.right = {Encoding::e4m3, Block::dims32()}; }), kExact, kExact);
  expect_claims(with([](Recipe& r) { r.o.tokens = {Encoding::e4m3, Block::channel32()}; }), kBlock, kBlock);
  expect_claims(with([](Recipe& r) { r.o.tokens = {Encoding::nvfp4, Block::channel16()}; }), kBlock, kBlock);
  expect_claims(with([](Recipe& r) { r.o.weights = {Encoding::e4m3, Block::tensor()}; }), kExact, kExact);
  expect_claims(with([](Recipe& r) { r.o.weights = {Encoding::e2m1, Block::dims32()}; }), kExact, kExact);
}

TEST(RecipeClaims, SharedScalesOfTheBackwardReachItsClaimAlone) {
  constexpr auto kExact = Causality::exact;
  constexpr auto kBlock = Causality::block;
  constexpr auto kLeaks = Causality::leaks;
  const auto with = [](const std::function<void(Recipe&)>& change) { return changed("bf16", change); };
  expect_claims(with([](Recipe& r) { r.dp.left = {Encoding::e4m3, Block::tokens32()}; }), kExact, kBlock);
  expect_claims(with([](Recipe& r) { r.dp.right = {Encoding::e4m3, Block::tensor()}; }), kExact, kLeaks);
  expect_claims(with([](Recipe& r) { r.dq.weights = {Encoding::e4m3, Block::square32()}; }), kExact, kBlock);
  expect_claims(with([](Recipe& r) { r.dq.weights = {Encoding::e4m3, Block::dims32()}; }), kExact, kExact);
  expect_claims(with([](Recipe& r) { r.dq.tokens = {Encoding::e4m3, Block::channel32()}; }), kExact, kBlock);
  expect_claims(with([](Recipe& r) { r.dq.tokens = {Encoding::e4m3, Block::token()}; }), kExact, kExact);
  expect_claims(with([](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_sequence; }), kExact, kLeaks);
  expect_claims(with([](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_causal; }), kExact, kExact);
}

TEST(RecipeClaims, ProductsOverQueriesLeakOnlyTensorWide) {
  Recipe recipe = shipped("bf16");
  recipe.dv = {{Encoding::e2m1, Block::channel32()}, {Encoding::e2m1, Block::channel32()}, std::nullopt};
  recipe.dk = {{Encoding::e4m3, Block::square32()}, {Encoding::e4m3, Block::tokens32()}, std::nullopt};
  expect_claims(recipe, Causality::exact, Causality::exact);
  recipe.dv.weights = {Encoding::e4m3, Block::tensor()};  // Of P: static.
  expect_claims(recipe, Causality::exact, Causality::exact);
  recipe.dv.tokens = {Encoding::e4m3, Block::tensor()};
  expect_claims(recipe, Causality::exact, Causality::leaks);
  recipe.dv.tokens = {Encoding::bf16};
  recipe.dk.tokens = {Encoding::e4m3, Block::tensor()};
  expect_claims(recipe, Causality::exact, Causality::leaks);
}

TEST(RecipeClaims, ACutClosesBlocksButNotWiderScales) {
  Recipe recipe = shipped("bf16");
  const WeightPair unquantized{{Encoding::bf16}, {Encoding::bf16}};
  recipe.o.tokens = recipe.dq.tokens = {Encoding::nvfp4, Block::channel16()};
  recipe.o.cut = recipe.dq.cut = unquantized;
  expect_claims(recipe, Causality::exact, Causality::exact);
  recipe.dq.tokens.second_level = SecondLevel::adaptive;  // 128 tokens: more than the tile that is cut.
  expect_claims(recipe, Causality::exact, Causality::leaks);
  recipe.o.tokens.second_level = SecondLevel::adaptive;
  expect_claims(recipe, Causality::leaks, Causality::leaks);
  recipe.o.tokens = {Encoding::e4m3, Block::tensor()};
  expect_claims(recipe, Causality::leaks, Causality::leaks);
  recipe.o.tokens = {Encoding::e4m3, Block::channel32()};
  recipe.dq = {{Encoding::e4m3, Block::square32()}, {Encoding::bf16}, unquantized};  // Rows of a square stay shared.
  expect_claims(recipe, Causality::exact, Causality::block);
}

TEST(RecipeClaims, AnAdaptiveSecondLevelAlongTheRowIsRowLocal) {
  Recipe recipe = shipped("bf16");
  recipe.dp.left =
      recipe.dq.weights = {Encoding::nvfp4, Block::dims16(), ScaleRule::ceil, Rounding::nearest, SecondLevel::adaptive};
  expect_claims(recipe, Causality::exact, Causality::exact);
}

TEST(RecipeClaims, AClaimBeyondTheScalesIsRefusedWithTheOperand) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.claims.backward = Causality::exact; }),
                 {"claims.backward is exact", "allowed: block", "dq.weights", "square:32", "32 tokens"});
  expect_refused(changed("mxfp8-tokenblock", [](Recipe& r) { r.claims.forward = Causality::exact; }),
                 {"claims.forward is exact", "allowed: block", "s.left", "tokens:32"});
  expect_refused(changed("fp4", [](Recipe& r) { r.o.cut.reset(); }),
                 {"claims.forward is exact", "o.tokens", "16 tokens"});
  expect_refused(changed("fp4", [](Recipe& r) { r.o.tokens.second_level = SecondLevel::adaptive; }),
                 {"claims.forward is exact", "allowed: leaks", "o.tokens", "128 tokens"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_sequence; }),
                 {"claims.backward is block", "allowed: leaks", "dq_accumulation f16_sequence"});
  expect_refused(changed("fp8-tensor", [](Recipe& r) { r.claims.forward = Causality::block; }),
                 {"claims.forward is block", "allowed: leaks", "s.left", "all tokens"});
  expect_accepted(changed("mxfp8", [](Recipe& r) { r.claims = {Causality::block, Causality::leaks}; }));
}

// ---- with_causality ----

TEST(RecipeCausality, ExactGivesDsARowScale) {
  for (const char* name : {"mxfp8", "nvfp4"}) {
    const Recipe before = shipped(name);
    const Result<Recipe> after = with_causality(before, Causality::exact);
    ASSERT_TRUE(after.ok()) << after.error().message;
    Recipe expected = before;
    expected.dq.weights.block = expected.dk.weights.block = Block::dims32();
    expected.claims.backward = Causality::exact;
    EXPECT_EQ(*after, expected) << to_json(*after);
    expect_accepted(*after);
  }
}

TEST(RecipeCausality, SeparateCodesOfDkStay) {
  Recipe recipe = shipped("mxfp8");
  recipe.dk.weights.rounding = Rounding::stochastic;
  const Result<Recipe> after = with_causality(recipe, Causality::exact);
  ASSERT_TRUE(after.ok()) << after.error().message;
  EXPECT_EQ(after->dq.weights.block, Block::dims32());
  EXPECT_EQ(after->dk.weights, recipe.dk.weights);
}

TEST(RecipeCausality, ASquareOnCutTilesIsTurnedToo) {
  Recipe recipe = shipped("mxfp8");
  recipe.dq.cut = WeightPair{recipe.dq.weights, recipe.dq.tokens};
  const Result<Recipe> after = with_causality(recipe, Causality::exact);
  ASSERT_TRUE(after.ok()) << after.error().message;
  EXPECT_EQ(after->dq.cut->weights.block, Block::dims32());
}

TEST(RecipeCausality, AlreadyExactIsUnchanged) {
  for (const char* name : {"bf16", "fp4", "mxfp4-diagonal", "mxattention"}) {
    for (const Causality level : {Causality::exact, Causality::block}) {
      const Result<Recipe> after = with_causality(shipped(name), level);
      ASSERT_TRUE(after.ok()) << after.error().message;
      EXPECT_EQ(*after, shipped(name)) << name;
    }
  }
}

TEST(RecipeCausality, ExactIsRefusedWhereAnOperandSpansTokens) {
  const auto refusal = [](const char* name, Causality level) {
    const Result<Recipe> after = with_causality(shipped(name), level);
    EXPECT_FALSE(after.ok()) << name;
    return after.ok() ? Error{} : after.error();
  };
  expect_words(refusal("mxfp8-tokenblock", Causality::exact),
               {"\"mxfp8-tokenblock\" is exact", "allowed: block", "s.left", "tokens:32", "32 tokens"});
  expect_words(refusal("mxfp8-1x32", Causality::exact), {"o.tokens", "channel:32"});
  expect_words(refusal("fp8-tensor", Causality::block), {"allowed: leaks", "s.left", "all tokens"});
  expect_words(refusal("mxfp8", Causality::leaks), {"causality is leaks", "allowed: exact, block"});
  Recipe keys = shipped("mxfp8");
  keys.dq.tokens.block = Block::tokens32();
  const Result<Recipe> after = with_causality(keys, Causality::exact);
  ASSERT_FALSE(after.ok());
  expect_words(after.error(), {"dq.tokens", "tokens:32"});
}

TEST(RecipeCausality, BlockLeavesTheRecipeAsItIs) {
  for (const char* name : {"mxfp8", "mxfp8-tokenblock", "nvfp4", "mxfp8-32x32", "mxfp4-leaky"}) {
    const Result<Recipe> after = with_causality(shipped(name), Causality::block);
    ASSERT_TRUE(after.ok()) << after.error().message;
    EXPECT_EQ(*after, shipped(name)) << name;
  }
  EXPECT_FALSE(with_causality(changed("mxfp8", [](Recipe& r) { r.beta = 0; }), Causality::block).ok());
}

}  // namespace
}  // namespace mxflash
