// What the CUDA runtime returns, as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "mxflash/status.hpp"

namespace mxflash::cuda {

/// `what` was being done.
Status status_of(cudaError_t code, std::string_view what);

}  // namespace mxflash::cuda
