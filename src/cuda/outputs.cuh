// What both forwards do with outputs alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {

/// All of o and lse, of the arguments of a forward: its offsets are malformed, and nothing is read through them.
template <class Arguments>
__device__ void write_nan(const Arguments& a) {
  const std::int64_t rows = std::int64_t{a.sizes.tokens_q} * a.sizes.heads;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const float nan = detail::float_of(detail::kNanBits);
  for (std::int64_t i = first; i < rows; i += step) a.lse[i] = nan;
  for (std::int64_t i = first; i < rows * a.sizes.value_dim; i += step) {
    switch (a.dtype) {
      case DType::bf16: static_cast<__nv_bfloat16*>(a.o)[i] = __float2bfloat16_rn(nan); break;
      case DType::f16: static_cast<__half*>(a.o)[i] = __float2half_rn(nan); break;
      default: static_cast<float*>(a.o)[i] = nan;
    }
  }
}

}  // namespace mxflash::cuda
