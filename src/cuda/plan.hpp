// From a call to the launches that it takes: the plan of the workspace, and every kernel's arguments.
#pragma once

#include "cuda/kernels.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {

/// In the order in which they run.
struct Launches {
  ScheduleArguments schedule;
  QuantizeArguments quantize;
  ForwardArguments forward;
};

Result<Layout> plan(const Sizes& sizes);
/// Checks the call and the workspace.
Result<Launches> prepare(const ForwardCall& call, const Recipe& recipe, const Execution& execution);

}  // namespace mxflash::cuda
