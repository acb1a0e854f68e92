// `mxflash engines`: what this build can run here, and why not.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "arguments.hpp"
#include "mxflash/engine.hpp"
#include "output.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

using Json = nlohmann::ordered_json;

struct EnginesArguments {
  std::string json;
};

Json reason_of(const Status& status) { return status ? Json() : Json(status.error().message); }

Json engines_json() {
  Json json = Json::array();
  for (const Engine* engine : engines()) {
    const Status available = engine->available();
    Json runs = Json::array();
    for (const Recipe& recipe : recipes()) {
      const Status supported = available ? engine->supports(recipe) : available;
      runs.push_back({{"name", recipe.name}, {"runs", supported.ok()}, {"reason", reason_of(supported)}});
    }
    json.push_back({{"name", engine->name()},
                    {"description", engine->description()},
                    {"available", available.ok()},
                    {"reason", reason_of(available)},
                    {"recipes", runs}});
  }
  return json;
}

void print_engines() {
  for (const Engine* engine : engines()) {
    const Status available = engine->available();
    print_line(fmt::format("{}: {}", engine->name(), engine->description()));
    print_line(available ? "  available: yes" : fmt::format("  available: no, {}", available.error().message));
    std::vector<std::string> runs;
    for (const Recipe& recipe : recipes()) {
      const Status supported = engine->supports(recipe);
      if (supported) {
        runs.push_back(recipe.name);
      } else {
        print_line(fmt::format("  not {}: {}", recipe.name, supported.error().message));
      }
    }
    print_line(fmt::format("  runs: {}", runs.empty() ? "none" : fmt::format("{}", fmt::join(runs, ", "))));
  }
}

Result<Outcome> engines_verb(const EnginesArguments& arguments) {
  if (const Status status = check_json_output(arguments.json, {}); !status) return status.error();
  if (!arguments.json.empty()) {
    if (const Status status = write_json(arguments.json, engines_json()); !status) return status.error();
  }
  if (wants_table(arguments.json)) print_engines();
  return Outcome::done;
}

}  // namespace

void add_engines(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<EnginesArguments>();
  CLI::App* verb =
      app.add_subcommand("engines", "List the engines, best first: available or why not, recipes each runs");
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return engines_verb(*arguments); }; });
}

}  // namespace mxflash::tool
