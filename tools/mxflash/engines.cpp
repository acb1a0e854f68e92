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

void print_engine(const Engine& engine) {
  print_line(fmt::format("{}: {}", engine.name(), engine.description()));
  if (const Status available = engine.available(); !available) {
    print_line(fmt::format("  available: no, {}", available.error().message));
    return;
  }
  print_line("  available: yes");
  std::vector<std::string> runs;
  for (const Recipe& recipe : recipes()) {
    if (const Status forward = engine.supports(recipe, Pass::forward, {}); !forward) {
      print_line(fmt::format("  not {}: {}", recipe.name, forward.error().message));
      continue;
    }
    runs.push_back(recipe.name);
    const Status backward = engine.supports(recipe, Pass::backward, {});
    if (validate_backward(recipe) && !backward) {
      print_line(fmt::format("  not the backward of {}: {}", recipe.name, backward.error().message));
    }
  }
  print_line(fmt::format("  runs: {}", runs.empty() ? "none" : fmt::format("{}", fmt::join(runs, ", "))));
}

Result<Outcome> engines_verb(const EnginesArguments& arguments) {
  if (const Status status = check_json_output(arguments.json, {}); !status) return status.error();
  if (!arguments.json.empty()) {
    if (const Status status = write_json(arguments.json, Json::parse(engines_json())); !status) return status.error();
  }
  if (!wants_table(arguments.json)) return Outcome::done;
  for (const Engine* engine : engines()) print_engine(*engine);
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
