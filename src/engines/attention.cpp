#include "mxflash/attention.hpp"

#include "arguments/arguments.hpp"
#include "mxflash/engine.hpp"
#include "reference/exact.hpp"

namespace mxflash {

Result<ForwardResult> attention_forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                        const Options& options) {
  if (Status status = check_arguments(problem, inputs, options); !status.ok()) return status.error();
  if (Status status = check_recipe(recipe, inputs); !status.ok()) return status.error();
  const Result<const Engine*> engine = select_engine(options, recipe, Pass::forward);
  if (!engine.ok()) return engine.error();
  return engine.value()->forward(problem, recipe, inputs, options);
}

Result<BackwardResult> attention_backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                          const Options& options) {
  if (Status status = check_backward_arguments(problem, inputs, options); !status.ok()) return status.error();
  if (Status status = check_recipe(recipe, inputs); !status.ok()) return status.error();
  if (Status status = validate_backward(recipe); !status.ok()) return status.error();
  const Result<const Engine*> engine = select_engine(options, recipe, Pass::backward);
  if (!engine.ok()) return engine.error();
  return engine.value()->backward(problem, recipe, inputs, options);
}

Result<ForwardResult> exact_forward(const Problem& problem, const Inputs& inputs, const Options& options) {
  if (Status status = check_arguments(problem, inputs, options); !status.ok()) return status.error();
  return reference::exact_forward(problem, inputs, options);
}

Result<BackwardResult> exact_backward(const Problem& problem, const Inputs& inputs, const Options& options) {
  if (Status status = check_backward_arguments(problem, inputs, options); !status.ok()) return status.error();
  return reference::exact_backward(problem, inputs, options);
}

}  // namespace mxflash
