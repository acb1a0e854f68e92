#include <fmt/format.h>

#include <list>

#include "cpu/engine.hpp"
#include "cuda/host.hpp"
#include "mxflash/cuda.hpp"
#include "mxflash/engine.hpp"
#include "reference/reference.hpp"

namespace mxflash {
namespace {

constexpr std::string_view kCpu = "cpu";

class CudaEngine final : public Engine {
 public:
  [[nodiscard]] std::string_view name() const override { return "cuda"; }
  [[nodiscard]] std::string_view description() const override {
    return "tensor cores of an NVIDIA Hopper GPU; tensors in host memory are copied there and back";
  }
  [[nodiscard]] Status available() const override { return cuda::available(); }
  [[nodiscard]] Status supports(const Recipe& recipe, Pass pass, const Options& options) const override {
    if (options.statistics) {
      return unsupported("statistics: asked for, which cuda does not count; only engines cpu and reference do");
    }
    return pass == Pass::backward ? cuda::supports_backward(recipe) : cuda::supports(recipe);
  }
  [[nodiscard]] Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                              const Options&) const override {
    return cuda::forward(problem, recipe, inputs);
  }
  [[nodiscard]] Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                                const Options& options) const override {
    return cuda::backward(problem, recipe, inputs, options);
  }
};

class ReferenceEngine final : public Engine {
 public:
  [[nodiscard]] std::string_view name() const override { return "reference"; }
  [[nodiscard]] std::string_view description() const override {
    return "scalar loops in double over quantized codes: the numerics contract, everywhere";
  }
  [[nodiscard]] Status available() const override { return {}; }
  [[nodiscard]] Status supports(const Recipe& recipe, Pass, const Options&) const override { return validate(recipe); }
  [[nodiscard]] Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                              const Options& options) const override {
    return reference::forward(problem, recipe, inputs, options);
  }
  [[nodiscard]] Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                                const Options& options) const override {
    return reference::backward(problem, recipe, inputs, options);
  }
};

class CpuEngine final : public Engine {
 public:
  explicit CpuEngine(const cpu::InstructionSet& set)
      : set_(set),
        name_(fmt::format("{}:{}", kCpu, set.name)),
        description_(fmt::format("vector kernels for any server: {}", set.description)) {}

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] std::string_view description() const override { return description_; }
  [[nodiscard]] Status available() const override {
    if (set_.available()) return {};
    return unsupported(fmt::format("{} needs {}", name_, set_.needs));
  }
  [[nodiscard]] Status supports(const Recipe& recipe, Pass, const Options&) const override {
    return cpu::supports(set_, recipe);
  }
  [[nodiscard]] Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                              const Options& options) const override {
    return cpu::forward(set_, problem, recipe, inputs, options);
  }
  [[nodiscard]] Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                                const Options& options) const override {
    return cpu::backward(set_, problem, recipe, inputs, options);
  }

 private:
  const cpu::InstructionSet& set_;
  std::string name_;
  std::string description_;
};

/// "cpu" is any of "cpu:avx2", "cpu:scalar", ...
bool matches(std::string_view name, std::string_view engine) {
  return name == "auto" || name == engine || (name == kCpu && engine.starts_with(kCpu));
}

/// "cuda: no device", whether or not the message names its engine.
std::string named(std::string_view engine, const std::string& message) {
  return message.starts_with(engine) ? message : fmt::format("{}: {}", engine, message);
}

}  // namespace

const std::vector<const Engine*>& engines() {
  static const CudaEngine cuda;
  static const ReferenceEngine reference;
  static const std::list<CpuEngine> cpu(cpu::instruction_sets().begin(), cpu::instruction_sets().end());
  static const std::vector<const Engine*> all = [] {
    std::vector<const Engine*> out = {&cuda};
    for (const CpuEngine& engine : cpu) out.push_back(&engine);
    out.push_back(&reference);
    return out;
  }();
  return all;
}

Result<const Engine*> select_engine(const Options& options, const Recipe& recipe, Pass pass) {
  std::string names = fmt::format("auto, {}", kCpu);
  std::string reasons;
  for (const Engine* engine : engines()) {
    names += fmt::format(", {}", engine->name());
    if (!matches(options.engine, engine->name())) continue;
    Status status = engine->available();
    if (status.ok()) status = engine->supports(recipe, pass, options);
    if (status.ok()) return engine;
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", named(engine->name(), status.error().message));
  }
  if (reasons.empty()) return invalid(fmt::format("engine: {} given, {} allowed", options.engine, names));
  return unsupported(fmt::format("engine: {} cannot run {}recipe {} here ({})", options.engine,
                                 pass == Pass::backward ? "the backward of " : "", recipe.name, reasons));
}

}  // namespace mxflash
