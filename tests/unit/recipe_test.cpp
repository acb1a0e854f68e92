#include "mxflash/recipe.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace mxflash {
namespace {

using Json = nlohmann::ordered_json;

Recipe shipped(std::string_view name) {
  const Result<Recipe> recipe = find_recipe(name);
  if (!recipe) ADD_FAILURE() << recipe.error().message;
  return recipe ? *recipe : Recipe{};
}

void expect_words(const Error& error, std::initializer_list<std::string_view> words) {
  EXPECT_EQ(error.kind, ErrorKind::invalid_argument);
  EXPECT_EQ(error.message.find('\n'), std::string::npos) << error.message;
  for (const std::string_view word : words) {
    EXPECT_NE(error.message.find(word), std::string::npos) << "no \"" << word << "\" in: " << error.message;
  }
}

void expect_refused(const Recipe& recipe, std::initializer_list<std::string_view> words) {
  const Status status = validate(recipe);
  ASSERT_FALSE(status.ok()) << "accepted, though it should name " << *words.begin();
  expect_words(status.error(), words);
}

void expect_accepted(const Recipe& recipe) {
  const Status status = validate(recipe);
  EXPECT_TRUE(status.ok()) << status.error().message;
}

/// The shipped recipe after a change.
Recipe changed(std::string_view name, const std::function<void(Recipe&)>& change) {
  Recipe recipe = shipped(name);
  change(recipe);
  return recipe;
}

// ---- Catalogue ----

TEST(Recipes, CatalogueHasItsRecipesInOrderAndNegativesLast) {
  std::vector<std::string> names;
  for (const Recipe& recipe : recipes()) names.push_back(recipe.name);
  const std::vector<std::string> expected{
      "bf16",       "mxfp8",       "mxfp8-tokenblock", "nvfp4",       "fp4",         "mxattention", "mxfp4-diagonal",
      "fp8-tensor", "mxfp8-floor", "mxfp8-1x32",       "mxfp8-32x32", "mxfp4-leaky", "naive-fp4"};
  EXPECT_EQ(names, expected);
  for (std::size_t i = 0; i < recipes().size(); ++i) {
    EXPECT_EQ(recipes()[i].purpose == Purpose::negative, i >= 7) << recipes()[i].name;
    EXPECT_FALSE(recipes()[i].summary.empty()) << recipes()[i].name;
  }
}

TEST(Recipes, EveryShippedRecipeIsValid) {
  for (const Recipe& recipe : recipes()) {
    const Status status = validate(recipe);
    EXPECT_TRUE(status.ok()) << recipe.name << ": " << status.error().message;
  }
}

TEST(Recipes, ShippedClaimsAreDerivedAndNegativesAreNotExact) {
  for (const Recipe& recipe : recipes()) {
    const Claims derived = derive_claims(recipe);
    if (recipe.purpose == Purpose::negative) {
      EXPECT_GT(derived.forward, Causality::exact) << recipe.name;
      EXPECT_GT(derived.backward, Causality::exact) << recipe.name;
      EXPECT_GE(recipe.claims.forward, derived.forward) << recipe.name;
    } else {
      EXPECT_EQ(derived, recipe.claims) << recipe.name << " derives " << to_string(derived.forward) << "/"
                                        << to_string(derived.backward);
    }
  }
}

TEST(Recipes, ClaimsAreTheDocumentedOnes) {
  const auto claims_of = [](std::string_view name) { return shipped(name).claims; };
  EXPECT_EQ(claims_of("bf16"), (Claims{Causality::exact, Causality::exact}));
  EXPECT_EQ(claims_of("mxfp8"), (Claims{Causality::exact, Causality::block}));
  EXPECT_EQ(claims_of("mxfp8-tokenblock"), (Claims{Causality::block, Causality::block}));
  EXPECT_EQ(claims_of("nvfp4"), (Claims{Causality::exact, Causality::block}));
  EXPECT_EQ(claims_of("fp4"), (Claims{Causality::exact, Causality::exact}));
  EXPECT_EQ(claims_of("mxattention"), (Claims{Causality::exact, Causality::exact}));
  EXPECT_EQ(claims_of("mxfp4-diagonal"), (Claims{Causality::exact, Causality::exact}));
}

TEST(Recipes, UnknownNameListsAllNames) {
  const Result<Recipe> recipe = find_recipe("mxfp9\n");
  ASSERT_FALSE(recipe.ok());
  expect_words(recipe.error(), {"recipe is \"mxfp9\\n\"", "allowed: bf16, mxfp8,", "mxfp4-leaky, naive-fp4"});
}

TEST(Recipes, BackwardIsRefusedByName) {
  for (const Recipe& recipe : recipes()) {
    const Status status = validate_backward(recipe);
    const bool without = recipe.name == "mxattention" || recipe.name == "naive-fp4";
    EXPECT_EQ(status.ok(), !without) << recipe.name;
    if (!status) expect_words(status.error(), {"\"" + recipe.name + "\"", "no backward", "training"});
  }
  const Status invalid_recipe = validate_backward(changed("mxfp8", [](Recipe& r) { r.beta = 3; }));
  ASSERT_FALSE(invalid_recipe.ok());
  expect_words(invalid_recipe.error(), {"beta is 3"});
}

// ---- Names ----

TEST(RecipeNames, ElementFormats) {
  EXPECT_EQ(element_format(Encoding::f32), std::nullopt);
  EXPECT_EQ(element_format(Encoding::bf16), std::nullopt);
  EXPECT_EQ(element_format(Encoding::e4m3), Format::e4m3);
  EXPECT_EQ(element_format(Encoding::e5m2), Format::e5m2);
  EXPECT_EQ(element_format(Encoding::e2m3), Format::e2m3);
  EXPECT_EQ(element_format(Encoding::e3m2), Format::e3m2);
  EXPECT_EQ(element_format(Encoding::e2m1), Format::e2m1);
  EXPECT_EQ(element_format(Encoding::nvfp4), Format::e2m1);
  EXPECT_EQ(element_format(static_cast<Encoding>(99)), std::nullopt);
}

template <class Parse, class Value>
void expect_round_trip(const Parse& parse, std::initializer_list<std::pair<std::string_view, Value>> words) {
  for (const auto& [text, value] : words) {
    const auto parsed = parse(text);
    ASSERT_TRUE(parsed.ok()) << parsed.error().message;
    EXPECT_EQ(*parsed, value) << text;
    EXPECT_EQ(to_string(value), text);
  }
}

TEST(RecipeNames, RoundTrip) {
  expect_round_trip<decltype(parse_encoding), Encoding>(parse_encoding, {{"f32", Encoding::f32},
                                                                         {"bf16", Encoding::bf16},
                                                                         {"e4m3", Encoding::e4m3},
                                                                         {"e5m2", Encoding::e5m2},
                                                                         {"e2m3", Encoding::e2m3},
                                                                         {"e3m2", Encoding::e3m2},
                                                                         {"e2m1", Encoding::e2m1},
                                                                         {"nvfp4", Encoding::nvfp4}});
  expect_round_trip<decltype(parse_block), Block>(parse_block, {{"token", Block::token()},
                                                                {"tokens:32", Block::tokens32()},
                                                                {"dims:16", Block::dims16()},
                                                                {"dims:32", Block::dims32()},
                                                                {"channel:16", Block::channel16()},
                                                                {"channel:32", Block::channel32()},
                                                                {"square:32", Block::square32()},
                                                                {"tensor", Block::tensor()}});
  expect_round_trip<decltype(parse_scale_rule), ScaleRule>(
      parse_scale_rule, {{"floor", ScaleRule::floor}, {"ceil", ScaleRule::ceil}, {"uos", ScaleRule::uos}});
  expect_round_trip<decltype(parse_rounding), Rounding>(
      parse_rounding, {{"nearest", Rounding::nearest}, {"stochastic", Rounding::stochastic}});
  expect_round_trip<decltype(parse_causality), Causality>(
      parse_causality, {{"exact", Causality::exact}, {"block", Causality::block}, {"leaks", Causality::leaks}});
  EXPECT_EQ(to_string(Purpose::training), "training");
  EXPECT_EQ(to_string(Purpose::inference), "inference");
  EXPECT_EQ(to_string(Purpose::negative), "negative");
  const Result<Block> of_p = parse_block("static");
  ASSERT_TRUE(of_p.ok());
  EXPECT_EQ(*of_p, Block::tensor());
  EXPECT_EQ(to_string(Block{5, 7}), "5x7");
}

TEST(RecipeNames, ParseErrorsListWhatIsAllowed) {
  const auto error_of = [](const auto& result) { return result.ok() ? Error{} : result.error(); };
  expect_words(error_of(parse_encoding("E4M3")), {"encoding is \"E4M3\"", "f32, bf16, e4m3", "nvfp4"});
  expect_words(error_of(parse_block("tokens:64")), {"block is \"tokens:64\"", "token, tokens:32", "square:32, tensor"});
  expect_words(error_of(parse_scale_rule("")), {"scale rule is \"\"", "floor, ceil, uos"});
  expect_words(error_of(parse_rounding("even")), {"rounding is \"even\"", "nearest, stochastic"});
  expect_words(error_of(parse_causality("strict")), {"causality is \"strict\"", "exact, block, leaks"});
  const std::string hostile = "\x1b[2J\n" + std::string(100000, 'x');
  expect_words(error_of(parse_encoding(hostile)), {"\\x1b[2J\\n", "...", "f32"});
  EXPECT_LT(error_of(parse_encoding(hostile)).message.size(), 300U);
}

// ---- Validation: one test a rule ----

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

TEST(RecipeRules, ValuesOutsideAnEnumerationAreNamed) {
  expect_refused(changed("mxfp8", [](Recipe& r) { r.purpose = static_cast<Purpose>(9); }), {"purpose", "training"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.hadamard = static_cast<Hadamard>(9); }), {"hadamard", "at_128"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.exponential = static_cast<Exponential>(9); }), {"mitchell"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.row_sum = static_cast<RowSum>(9); }), {"row_sum", "quantized"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dq_accumulation = static_cast<DqAccumulation>(9); }),
                 {"dq_accumulation", "f16_causal"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.claims.forward = static_cast<Causality>(9); }),
                 {"claims.forward", "leaks"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.claims.backward = static_cast<Causality>(9); }),
                 {"claims.backward", "leaks"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.dk.tokens.encoding = static_cast<Encoding>(9); }),
                 {"dk.tokens.encoding", "nvfp4"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.rule = static_cast<ScaleRule>(9); }),
                 {"s.left.rule", "floor"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.rounding = static_cast<Rounding>(9); }),
                 {"s.left.rounding", "nearest"});
  expect_refused(changed("mxfp8", [](Recipe& r) { r.s.left.second_level = static_cast<SecondLevel>(9); }),
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

// ---- JSON ----

Error json_error(const std::string& text) {
  const Result<Recipe> recipe = recipe_from_json(text);
  EXPECT_FALSE(recipe.ok()) << "accepted: " << text.substr(0, 2000);
  return recipe.ok() ? Error{} : recipe.error();
}

/// Pointers to every value below the root.
std::vector<Json::json_pointer> all_pointers(const Json& json) {
  std::vector<Json::json_pointer> pointers;
  const std::function<void(const Json&, const Json::json_pointer&)> walk = [&](const Json& value,
                                                                               const Json::json_pointer& at) {
    if (!at.empty()) pointers.push_back(at);
    if (!value.is_object()) return;
    for (const auto& item : value.items()) walk(item.value(), at / item.key());
  };
  walk(json, Json::json_pointer());
  return pointers;
}

/// "/o/cut/weights" -> "o.cut.weights"
std::string dotted(const Json::json_pointer& pointer) {
  std::string path = pointer.to_string().substr(1);
  for (char& c : path) c = c == '/' ? '.' : c;
  return path;
}

TEST(RecipeJson, EveryShippedRecipeRoundTrips) {
  for (const Recipe& recipe : recipes()) {
    const Result<Recipe> back = recipe_from_json(to_json(recipe));
    ASSERT_TRUE(back.ok()) << recipe.name << ": " << back.error().message;
    EXPECT_EQ(*back, recipe) << to_json(*back);
  }
}

TEST(RecipeJson, SpellsEveryFieldInOrder) {
  const Json json = Json::parse(to_json(shipped("fp4")));
  std::vector<std::string> fields;
  for (const auto& item : json.items()) fields.push_back(item.key());
  const std::vector<std::string> expected{
      "name", "summary", "purpose", "hadamard", "exponential", "row_sum", "beta",  "tau", "dq_accumulation",
      "s",    "o",       "dp",      "dv",       "dq",          "dk",      "claims"};
  EXPECT_EQ(fields, expected);
  EXPECT_EQ(json["dq"]["weights"].dump(), R"({"encoding":"nvfp4","block":"dims:16","rule":"ceil",)"
                                          R"("rounding":"stochastic","second_level":"adaptive"})");
  EXPECT_TRUE(json["dq"]["cut"].is_null());
  EXPECT_EQ(json["o"]["cut"]["tokens"]["block"], "token");
}

TEST(RecipeJson, StaticIsAWordForPAlone) {
  Json json = Json::parse(to_json(shipped("mxfp8")));
  EXPECT_EQ(json["o"]["weights"]["block"], "static");
  json["o"]["weights"]["block"] = "tensor";
  const Result<Recipe> same = recipe_from_json(json.dump());
  ASSERT_TRUE(same.ok()) << same.error().message;
  EXPECT_EQ(*same, shipped("mxfp8"));
  json["o"]["tokens"]["block"] = "static";
  expect_words(json_error(json.dump()), {"o.tokens.block is \"static\"", "token, tokens:32", "tensor"});
}

TEST(RecipeJson, ClaimsAreDerivedWhenAbsent) {
  for (const char* name : {"mxfp8", "fp4", "mxfp8-floor"}) {
    Json json = Json::parse(to_json(shipped(name)));
    json.erase("claims");
    const Result<Recipe> recipe = recipe_from_json(json.dump());
    ASSERT_TRUE(recipe.ok()) << recipe.error().message;
    EXPECT_EQ(recipe->claims, derive_claims(shipped(name)));
  }
}

TEST(RecipeJson, EveryDeletionIsRefusedWithItsPath) {
  for (const Recipe& recipe : recipes()) {
    const Json json = Json::parse(to_json(recipe));
    for (const Json::json_pointer& pointer : all_pointers(json)) {
      if (dotted(pointer) == "claims") continue;
      Json without = json;
      without[pointer.parent_pointer()].erase(pointer.back());
      expect_words(json_error(without.dump()), {dotted(pointer) + " is missing"});
    }
  }
}

TEST(RecipeJson, EveryWrongTypeIsRefusedWithItsPath) {
  const std::vector<Json> values{Json(true),    Json(1.5),     Json(Json::array()), Json(7),
                                 Json("bogus"), Json(nullptr), Json(Json::object())};
  const Recipe recipe = shipped("fp4");
  const Json json = Json::parse(to_json(recipe));
  for (const Json::json_pointer& pointer : all_pointers(json)) {
    for (const Json& value : values) {
      const std::string path = dotted(pointer);
      const bool right_type = (value.is_string() && (path == "name" || path == "summary")) ||
                              (value.is_number_integer() && (path == "beta" || path == "tau")) ||
                              (value.is_null() && path.size() > 4 && path.substr(path.size() - 4) == ".cut");
      if (right_type) continue;
      Json mutated = json;
      mutated[pointer] = value;
      expect_words(json_error(mutated.dump()), {path, "allowed"});
    }
  }
}

TEST(RecipeJson, EveryOtherWordIsRefusedOrTaken) {
  const std::vector<std::string> levels{"exact", "block", "leaks"};
  const std::map<std::string, std::vector<std::string>> words{
      {"name", {"x", "X", ""}},
      {"purpose", {"training", "inference", "negative", ""}},
      {"hadamard", {"off", "at_128", "required", "on"}},
      {"exponential", {"exact", "mitchell", "schraudolph", "block"}},
      {"row_sum", {"quantized", "unquantized", "exact"}},
      {"dq_accumulation", {"f32", "f16_sequence", "f16_causal", "bf16"}},
      {"encoding", {"f32", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "nvfp4", "e8m0"}},
      {"block",
       {"token", "tokens:32", "dims:16", "dims:32", "channel:16", "channel:32", "square:32", "tensor", "static", "32"}},
      {"rule", {"floor", "ceil", "uos", "nearest"}},
      {"rounding", {"nearest", "stochastic", "ceil"}},
      {"second_level", {"fixed", "adaptive", "1"}},
      {"forward", levels},
      {"backward", levels}};
  int taken = 0;
  int refused = 0;
  for (const Recipe& recipe : recipes()) {
    const Json json = Json::parse(to_json(recipe));
    for (const Json::json_pointer& pointer : all_pointers(json)) {
      if (!json[pointer].is_string() || pointer.back() == "summary") continue;
      for (const std::string& word : words.at(pointer.back())) {
        Json mutated = json;
        mutated[pointer] = word;
        const Result<Recipe> result = recipe_from_json(mutated.dump());
        if (!result) {
          ++refused;
          expect_words(result.error(), {" is ", "allowed: "});
          continue;
        }
        ++taken;
        const Json back = Json::parse(to_json(*result));
        const bool alias = pointer.back() == "block" && word == "tensor" && back[pointer] == "static";
        if (alias) continue;
        EXPECT_EQ(back, mutated) << recipe.name << " " << pointer.to_string() << " " << word;
      }
    }
  }
  EXPECT_GT(taken, 100);
  EXPECT_GT(refused, 1000);
}

TEST(RecipeJson, UnknownFieldsAreNamed) {
  Json json = Json::parse(to_json(shipped("mxfp8")));
  json["o"]["weights"]["scale"] = 1;
  expect_words(json_error(json.dump()), {"\"scale\" in o.weights", "unknown", "block", "encoding"});
  json = Json::parse(to_json(shipped("mxfp8")));
  json["betta\n"] = 1;
  expect_words(json_error(json.dump()), {"\"betta\\n\" in the recipe", "unknown", "beta", "claims"});
}

TEST(RecipeJson, IntegersOutOfRangeAreRefused) {
  for (const char* number : {"2147483648", "-2147483649", "18446744073709551615", "-9223372036854775808", "256.0",
                             "99999999999999999999999", "\"256\""}) {
    std::string text = to_json(shipped("mxfp8"));
    text.replace(text.find("\"beta\": 256"), 11, std::string("\"beta\": ") + number);
    expect_words(json_error(text), {"beta is ", "an integer up to 2147483647"});
  }
}

TEST(RecipeJson, ValuesAreValidated) {
  Json json = Json::parse(to_json(shipped("mxfp8")));
  json["tau"] = 1;
  expect_words(json_error(json.dump()), {"beta 2^tau is 512", "448"});
  json["tau"] = 4;
  json["beta"] = 16;
  const Result<Recipe> recipe = recipe_from_json(json.dump());
  ASSERT_TRUE(recipe.ok()) << recipe.error().message;
  EXPECT_EQ(recipe->beta, 16);
  EXPECT_EQ(recipe->tau, 4);
}

TEST(RecipeJson, OtherThanAnObjectIsRefused) {
  expect_words(json_error("[]"), {"recipe is an array", "an object"});
  expect_words(json_error("null"), {"recipe is null", "an object"});
  expect_words(json_error("\"mxfp8\""), {"recipe is \"mxfp8\"", "an object"});
  expect_words(json_error(""), {"not JSON", "line 1"});
  expect_words(json_error("{\n  \"name\": \"x\",\n  oops\n}"), {"not JSON at line 3, column 3"});
  expect_words(json_error(to_json(shipped("mxfp8")) + "x"), {"not JSON"});
  expect_words(json_error("{\"name\": \"\xFF\"}"), {"not JSON"});
  expect_words(json_error("{\"beta\": 1e999}"), {"not JSON"});
  expect_words(json_error(std::string("{\"a\"\0:1}", 8)), {"not JSON"});
}

TEST(RecipeJson, FieldsGivenTwiceAreRefused) {
  std::string text = to_json(shipped("mxfp8"));
  text.replace(text.find("\"tau\": 0"), 8, "\"tau\": 0, \"beta\": 16");
  expect_words(json_error(text), {"\"beta\"", "given twice", "once"});
}

TEST(RecipeJson, DeepNestingIsRefusedWithoutOverflow) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  expect_words(json_error(deep), {"nested deeper than 16 levels"});
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"s\":";
  objects += "1" + std::string(100000, '}');
  expect_words(json_error(objects), {"nested deeper than 16 levels"});
  std::string inside = to_json(shipped("mxfp8"));
  inside.replace(inside.find("\"beta\": 256"), 11, "\"beta\": " + deep);
  expect_words(json_error(inside), {"nested deeper than 16 levels"});
  expect_words(json_error("[[[[[[[[1]]]]]]]]"), {"recipe is an array"});
}

TEST(RecipeJson, TruncationsAreRefused) {
  const std::string text = to_json(shipped("fp4"));
  for (std::size_t length = 0; length + 2 < text.size(); length += 5) {
    expect_words(json_error(text.substr(0, length)), {"not JSON at line"});
  }
}

TEST(RecipeJson, TextThatIsNotUtf8IsWrittenWithReplacements) {
  const std::string text = to_json(changed("mxfp8", [](Recipe& r) { r.summary = "caf\xE9"; }));
  const Result<Recipe> back = recipe_from_json(text);
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->summary, "caf\xEF\xBF\xBD");
}

// ---- docs/recipes.md ----

std::string documentation() {
  std::ifstream file(std::string(MXFLASH_EXAMPLES) + "/../docs/recipes.md");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// "e2m1 dims:32 uos", "bf16": what differs from ceil, nearest and a fixed second level is spelled out.
std::string short_form(const Operand& operand, bool of_p) {
  std::string text = to_string(operand.encoding);
  if (!operand.quantized()) return text;
  text += " " + (of_p && operand.block == Block::tensor() ? "static" : to_string(operand.block));
  if (operand.rule != ScaleRule::ceil) text += " " + to_string(operand.rule);
  if (operand.second_level == SecondLevel::adaptive) text += " adaptive";
  if (operand.rounding == Rounding::stochastic) text += " stochastic";
  return text;
}

std::string short_form(const Operand& left, const Operand& right, bool left_is_p) {
  const std::string first = short_form(left, left_is_p);
  const std::string second = short_form(right, false);
  return first == second ? "both " + first : first + "; " + second;
}

std::string short_form(const TokenProduct& product, bool of_p) {
  std::string text = short_form(product.weights, product.tokens, of_p);
  if (product.cut) text += "; cut: " + short_form(product.cut->weights, product.cut->tokens, of_p);
  return text;
}

/// The recipe's row of the table in docs/recipes.md.
std::string table_row(const Recipe& r) {
  const std::string hadamard = Json::parse(to_json(r))["hadamard"];
  std::string row = "| `" + r.name + "` | " + to_string(r.purpose) + " | " + hadamard + " | " + std::to_string(r.beta) +
                    " | " + short_form(r.s.left, r.s.right, false) + " | " + short_form(r.o, true) + " | ";
  if (validate_backward(r).ok()) {
    row += short_form(r.dp.left, r.dp.right, false) + " | " + short_form(r.dv, true) + " | " + short_form(r.dq, false) +
           " | " + short_form(r.dk, false);
  } else {
    row += "- | - | - | -";
  }
  return row + " | " + to_string(r.claims.forward) + " / " + to_string(r.claims.backward) + " |";
}

TEST(RecipeDocumentation, TableIsTheCatalogue) {
  const std::string text = documentation();
  ASSERT_FALSE(text.empty()) << "docs/recipes.md cannot be read";
  for (const Recipe& recipe : recipes()) {
    EXPECT_NE(text.find("\n" + table_row(recipe) + "\n"), std::string::npos) << "not a row:\n" << table_row(recipe);
  }
}

TEST(RecipeDocumentation, ExampleIsAValidRecipe) {
  const std::string text = documentation();
  const std::string fence = "```json\n";
  const std::size_t begin = text.find(fence);
  ASSERT_NE(begin, std::string::npos);
  const std::size_t end = text.find("```", begin + fence.size());
  ASSERT_NE(end, std::string::npos);
  const Result<Recipe> recipe = recipe_from_json(text.substr(begin + fence.size(), end - begin - fence.size()));
  ASSERT_TRUE(recipe.ok()) << recipe.error().message;
  EXPECT_EQ(recipe->beta, 16);
  EXPECT_EQ(recipe->tau, 4);
  EXPECT_EQ(recipe->claims, (Claims{Causality::exact, Causality::exact}));
  EXPECT_TRUE(validate_backward(*recipe).ok());
}

}  // namespace
}  // namespace mxflash
