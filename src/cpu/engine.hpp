// The CPU engine: the same codes as the reference, summed in FP32 by vector kernels.
#pragma once

#include "cpu/kernels.hpp"
#include "mxflash/attention.hpp"

namespace mxflash::cpu {

/// Why an instruction set cannot run a recipe; ok where it can.
Status supports(const InstructionSet& set, const Recipe& recipe);

/// The arguments have been checked.
Result<ForwardResult> forward(const InstructionSet& set, const Problem& problem, const Recipe& recipe,
                              const Inputs& inputs, const Options& options);
Result<BackwardResult> backward(const InstructionSet& set, const Problem& problem, const Recipe& recipe,
                                const Inputs& inputs, const Options& options);

}  // namespace mxflash::cpu
