// What the host can check of a call, with or without a device.
#pragma once

#include "cuda/layout.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {

/// Whether the kernels on E4M3 codes run the recipe; the others are embedded in BF16, where they can be.
bool multiplies_codes(const Recipe& recipe);
/// The same of the backward. A recipe of which they run the forward alone is embedded in both where a backward follows.
bool multiplies_codes_backward(const Recipe& recipe);
/// Of a call.
bool runs_on_codes(const ForwardCall& call, const Recipe& recipe);

/// The sizes of a call, or what is wrong with it.
Result<Sizes> check_call(const ForwardCall& call, const Recipe& recipe);
/// The sizes of its forward.
Result<Sizes> check_backward_call(const BackwardCall& call, const Recipe& recipe);

}  // namespace mxflash::cuda
