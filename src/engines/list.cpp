#include <nlohmann/json.hpp>

#include "mxflash/engine.hpp"

namespace mxflash {
namespace {

using Json = nlohmann::ordered_json;

Json reason_of(const Status& status) { return status ? Json() : Json(status.error().message); }

Json runs_json(const Status& status) { return {{"runs", status.ok()}, {"reason", reason_of(status)}}; }

Json recipe_json(const Engine& engine, const Status& available, const Recipe& recipe) {
  const auto runs = [&](Pass pass) { return available ? engine.supports(recipe, pass, {}) : available; };
  const Status exists = validate_backward(recipe);
  Json json = {{"name", recipe.name}};
  json.update(runs_json(runs(Pass::forward)));
  json["backward"] = runs_json(exists ? runs(Pass::backward) : exists);
  return json;
}

}  // namespace

std::string engines_json() {
  Json json = Json::array();
  for (const Engine* engine : engines()) {
    const Status available = engine->available();
    Json all = Json::array();
    for (const Recipe& recipe : recipes()) all.push_back(recipe_json(*engine, available, recipe));
    json.push_back({{"name", engine->name()},
                    {"description", engine->description()},
                    {"available", available.ok()},
                    {"reason", reason_of(available)},
                    {"recipes", all}});
  }
  return json.dump();
}

}  // namespace mxflash
