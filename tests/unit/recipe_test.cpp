// The catalogue, the names of its fields, and docs/recipes.md, whose table is the catalogue.
#include <bit>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "unit/recipe_support.hpp"

namespace mxflash {
namespace {

using test::changed;
using test::expect_words;
using test::shipped;

using Json = nlohmann::ordered_json;

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
  expect_words(recipe.error(), {R"(recipe is "mxfp9\n")", "allowed: bf16, mxfp8,", "mxfp4-leaky, naive-fp4"});
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
  EXPECT_EQ(element_format(std::bit_cast<Encoding>(std::uint8_t{99})), std::nullopt);
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
  expect_words(error_of(parse_encoding(hostile)), {R"(\x1b[2J\n)", "...", "f32"});
  EXPECT_LT(error_of(parse_encoding(hostile)).message.size(), 300U);
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
