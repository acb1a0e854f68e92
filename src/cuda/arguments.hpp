// What the host can check of a call, with or without a device.
#pragma once

#include "cuda/layout.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {

/// The sizes of a call, or what is wrong with it.
Result<Sizes> check_call(const ForwardCall& call, const Recipe& recipe);

}  // namespace mxflash::cuda
