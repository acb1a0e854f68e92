// What kernels do with outputs alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {

/// Of a tensor of `count` elements, by all threads.
__device__ inline void write_nan(void* out, std::int64_t count, DType dtype) {
  const std::int64_t step = std::int64_t{gridDim.x} * gridDim.y * blockDim.x;
  const std::int64_t block = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const float nan = detail::float_of(detail::kNanBits);
  for (std::int64_t i = block * blockDim.x + threadIdx.x; i < count; i += step) {
    switch (dtype) {
      case DType::bf16: static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(nan); break;
      case DType::f16: static_cast<__half*>(out)[i] = __float2half_rn(nan); break;
      default: static_cast<float*>(out)[i] = nan;
    }
  }
}

/// All of o and lse, of the arguments of a forward: its offsets are malformed, and nothing is read through them.
template <class Arguments>
__device__ void write_nan(const Arguments& a) {
  const std::int64_t rows = std::int64_t{a.sizes.tokens_q} * a.sizes.heads;
  write_nan(a.lse, rows, DType::f32);
  write_nan(a.o, rows * a.sizes.value_dim, a.dtype);
}

}  // namespace mxflash::cuda
