// `mxflash recipes`: the catalogue; its JSON is where a recipe of one's own starts.
#include <fmt/format.h>

#include <memory>

#include "arguments.hpp"
#include "mxflash/recipe.hpp"
#include "output.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

struct RecipesArguments {
  std::string json;
};

nlohmann::ordered_json recipes_json() {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const Recipe& recipe : recipes()) json.push_back(nlohmann::ordered_json::parse(to_json(recipe)));
  return json;
}

void print_recipes() {
  Table table{{"recipe", "purpose", "forward", "backward", "summary"}, {}, {true, true, true, true, true}};
  for (const Recipe& recipe : recipes()) {
    const bool backward = validate_backward(recipe).ok();
    table.rows.push_back({recipe.name, to_string(recipe.purpose), to_string(recipe.claims.forward),
                          backward ? to_string(recipe.claims.backward) : "-", recipe.summary});
  }
  print(table);
}

Result<Outcome> recipes_verb(const RecipesArguments& arguments) {
  if (const Status status = check_json_output(arguments.json, {}); !status) return status.error();
  if (!arguments.json.empty()) {
    if (const Status status = write_json(arguments.json, recipes_json()); !status) return status.error();
  }
  if (wants_table(arguments.json)) print_recipes();
  return Outcome::done;
}

}  // namespace

void add_recipes(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<RecipesArguments>();
  CLI::App* verb = app.add_subcommand("recipes", "List the recipes: purpose, causality forward and backward, summary");
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return recipes_verb(*arguments); }; });
}

}  // namespace mxflash::tool
