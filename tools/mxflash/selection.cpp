#include "selection.hpp"

#include <fmt/format.h>

#include "mxflash/engine.hpp"

namespace mxflash::tool {

Result<Selection> select_engines(const Options& options, const Recipe& recipe, bool backward) {
  const Result<const Engine*> first = select_engine(options, recipe, Pass::forward);
  if (!first) return first.error();
  Selection selection{std::string((*first)->name()), {}};
  if (!backward) return selection;
  const Result<const Engine*> second = select_engine(options, recipe, Pass::backward);
  if (!second) return second.error();
  selection.backward = (*second)->name();
  return selection;
}

nlohmann::ordered_json selection_json(const Selection& selection) {
  nlohmann::ordered_json json = {{"name", selection.forward}, {"backward", nullptr}};
  if (!selection.backward.empty()) json["backward"] = selection.backward;
  return json;
}

std::string describe(const Selection& selection) {
  if (selection.backward.empty() || selection.backward == selection.forward) return selection.forward;
  return fmt::format("{}, backward {}", selection.forward, selection.backward);
}

}  // namespace mxflash::tool
