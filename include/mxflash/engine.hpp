// The engines of this build, best first; the scalar reference, which is the contract in code, is last.
#pragma once

#include <string_view>
#include <vector>

#include "mxflash/attention.hpp"

namespace mxflash {

class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual std::string_view description() const = 0;
  /// Whether this machine can run it at all; the error says what is missing.
  [[nodiscard]] virtual Status available() const = 0;
  /// Whether it runs this recipe; the error says why not.
  [[nodiscard]] virtual Status supports(const Recipe& recipe) const = 0;
  /// The arguments have been checked.
  [[nodiscard]] virtual Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe,
                                                      const Inputs& inputs, const Options& options) const = 0;
  [[nodiscard]] virtual Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe,
                                                        const Inputs& inputs, const Options& options) const = 0;
};

const std::vector<const Engine*>& engines();
/// By name, or for "auto" the first that is available and supports the recipe.
Result<const Engine*> select_engine(std::string_view name, const Recipe& recipe);

}  // namespace mxflash
