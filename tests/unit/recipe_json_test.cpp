// Recipes as JSON: every field there and back, everything else refused by its path.
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "unit/recipe_support.hpp"

namespace mxflash {
namespace {

using test::changed;
using test::expect_words;
using test::shipped;

using Json = nlohmann::ordered_json;

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
  expect_words(json_error(json.dump()), {R"("betta\n" in the recipe)", "unknown", "beta", "claims"});
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
  text.replace(text.find(R"("tau": 0)"), 8, R"("tau": 0, "beta": 16)");
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

}  // namespace
}  // namespace mxflash
