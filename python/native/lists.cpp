#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <nlohmann/json.hpp>

#include "bindings.hpp"
#include "mxflash/engine.hpp"

namespace mxflash::python {

namespace {

using Json = nlohmann::ordered_json;

std::string recipes_json() {
  Json json = Json::array();
  for (const Recipe& recipe : recipes()) json.push_back(Json::parse(to_json(recipe)));
  return json.dump();
}

}  // namespace

Recipe recipe_of(const std::string& name_or_json) {
  if (!name_or_json.starts_with('{')) return value_of(find_recipe(name_or_json));
  Result<Recipe> recipe = recipe_from_json(name_or_json);
  if (!recipe) raise({recipe.error().kind, fmt::format("recipe: {}", recipe.error().message)});
  return *std::move(recipe);
}

void bind_lists(nb::module_& module) {
  module.def("recipes", &recipes_json, "The catalogue as a JSON array");
  module.def("engines", &engines_json, "The engines, best first, as a JSON array");
  module.def(
      "recipe", [](const std::string& name_or_json) { return to_json(recipe_of(name_or_json)); },
      "A recipe by name or JSON text, checked, as JSON text", nb::arg("name_or_json"));
}

}  // namespace mxflash::python
