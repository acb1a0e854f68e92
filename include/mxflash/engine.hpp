// The engines of this build, best first; the scalar reference, which is the contract in code, is last.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mxflash/attention.hpp"

namespace mxflash {

enum class Pass : std::uint8_t { forward, backward };

class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual std::string_view description() const = 0;
  /// Whether this machine can run it at all; the error says what is missing.
  [[nodiscard]] virtual Status available() const = 0;
  /// Whether it runs this pass of this recipe and what the options ask beside it; the error says why not.
  [[nodiscard]] virtual Status supports(const Recipe& recipe, Pass pass, const Options& options) const = 0;
  /// The arguments have been checked.
  [[nodiscard]] virtual Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe,
                                                      const Inputs& inputs, const Options& options) const = 0;
  [[nodiscard]] virtual Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe,
                                                        const Inputs& inputs, const Options& options) const = 0;
};

const std::vector<const Engine*>& engines();
/// options.engine by name, or for "auto" the first that is available and supports the recipe's pass.
Result<const Engine*> select_engine(const Options& options, const Recipe& recipe, Pass pass);
/// The list as a JSON array: of each engine name, description, available, reason (null where available) and recipes,
/// each with name, runs and reason (of its forward), and the same of its backward.
std::string engines_json();

}  // namespace mxflash
