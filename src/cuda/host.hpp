// The CUDA engine on tensors in host memory.
#pragma once

#include "mxflash/attention.hpp"

namespace mxflash::cuda {

/// Copies to the current device, computes, copies back. The arguments have been checked.
Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs);
/// After the forward, which is not in its time. Of the options `deterministic` and `seed` count.
Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                const Options& options);

}  // namespace mxflash::cuda
