// The CUDA engine on tensors in host memory.
#pragma once

#include "mxflash/attention.hpp"

namespace mxflash::cuda {

/// Copies to the current device, computes, copies back. The arguments have been checked.
Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs);

}  // namespace mxflash::cuda
