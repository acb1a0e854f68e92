#include <fmt/format.h>

#include "mxflash/engine.hpp"
#include "reference/reference.hpp"

namespace mxflash {
namespace {

class ReferenceEngine final : public Engine {
 public:
  [[nodiscard]] std::string_view name() const override { return "reference"; }
  [[nodiscard]] std::string_view description() const override {
    return "scalar loops in double over quantized codes: the numerics contract, everywhere";
  }
  [[nodiscard]] Status available() const override { return {}; }
  [[nodiscard]] Status supports(const Recipe& recipe) const override { return validate(recipe); }
  [[nodiscard]] Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                              const Options& options) const override {
    return reference::forward(problem, recipe, inputs, options);
  }
  [[nodiscard]] Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                                const Options& options) const override {
    return reference::backward(problem, recipe, inputs, options);
  }
};

}  // namespace

const std::vector<const Engine*>& engines() {
  static const ReferenceEngine reference;
  static const std::vector<const Engine*> list{&reference};
  return list;
}

Result<const Engine*> select_engine(std::string_view name, const Recipe& recipe) {
  std::string names = "auto";
  std::string reasons;
  for (const Engine* engine : engines()) {
    names += fmt::format(", {}", engine->name());
    if (name != "auto" && name != engine->name()) continue;
    Status status = engine->available();
    if (status.ok()) status = engine->supports(recipe);
    if (status.ok()) return engine;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", engine->name(), status.error().message);
  }
  if (reasons.empty()) return invalid(fmt::format("engine: {} given, {} allowed", name, names));
  return unsupported(fmt::format("engine: {} cannot run recipe {} here ({})", name, recipe.name, reasons));
}

}  // namespace mxflash
