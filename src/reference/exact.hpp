// Attention in float64 on the inputs as they are: the truth for accuracy, and nothing else.
#pragma once

#include "mxflash/attention.hpp"

namespace mxflash::reference {

/// The arguments have been checked. Outputs are FP32.
ForwardResult exact_forward(const Problem& problem, const Inputs& inputs, const Options& options);
BackwardResult exact_backward(const Problem& problem, const Inputs& inputs, const Options& options);

}  // namespace mxflash::reference
