// What kernels do with outputs alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {

/// One element, rounded to the tensor's type.
__device__ inline void put(DType dtype, void* out, std::int64_t index, float value) {
  switch (dtype) {
    case DType::bf16: static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(value); break;
    case DType::f16: static_cast<__half*>(out)[index] = __float2half_rn(value); break;
    default: static_cast<float*>(out)[index] = value;
  }
}

/// Two neighbouring elements, rounded to the type that the tensor has.
__device__ inline void round_pair(float low, float high, float2& to) { to = {low, high}; }
// As one register: the halves of a pair the compiler takes apart, and puts together again before it stores them.
__device__ inline void round_pair(float low, float high, __nv_bfloat162& to) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<std::uint32_t&>(to)) : "f"(high), "f"(low));
}
__device__ inline void round_pair(float low, float high, __half2& to) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<std::uint32_t&>(to)) : "f"(high), "f"(low));
}

/// Of a tensor of `count` elements, by all threads.
__device__ inline void write_nan(void* out, std::int64_t count, DType dtype) {
  const std::int64_t step = std::int64_t{gridDim.x} * gridDim.y * blockDim.x;
  const std::int64_t block = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const float nan = detail::float_of(detail::kNanBits);
  for (std::int64_t i = block * blockDim.x + threadIdx.x; i < count; i += step) put(dtype, out, i, nan);
}

/// All of o and lse, of the arguments of a forward: its offsets are malformed, and nothing is read through them.
template <class Arguments>
__device__ void write_nan(const Arguments& a) {
  const std::int64_t rows = std::int64_t{a.sizes.tokens_q} * a.sizes.heads;
  write_nan(a.lse, rows, DType::f32);
  write_nan(a.o, rows * a.sizes.value_dim, a.dtype);
}

/// The same of dq, dk and dv, of the arguments of a backward.
template <class Arguments>
__device__ void write_nan_gradients(const Arguments& a, const Sizes& sizes) {
  write_nan(a.dq, std::int64_t{sizes.tokens_q} * sizes.heads * sizes.head_dim, a.dtype);
  write_nan(a.dk, std::int64_t{sizes.tokens_k} * sizes.kv_heads * sizes.head_dim, a.dtype);
  write_nan(a.dv, std::int64_t{sizes.tokens_k} * sizes.kv_heads * sizes.value_dim, a.dtype);
}

}  // namespace mxflash::cuda
