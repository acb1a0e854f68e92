// dQ, and dK of many dims, out of their sums: rotated back and rounded. A lane has eight dims of a row.
#include <algorithm>
#include <cstdint>

#include "cuda/backward.hpp"
#include "cuda/outputs.cuh"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwn = 8;

/// A head of dq, or after those one of dk.
struct Head {
  const void* sums;  ///< Rows of `dims`: of dq scattered as place_of says, of dk FP32.
  void* out;
  std::int32_t tokens;
  std::int32_t heads;
  std::int32_t index;
  const RowRecord* rows;         ///< Of dq.
  const std::int32_t* prescale;  ///< Of dq in FP16.

  [[nodiscard]] __device__ bool scattered() const { return rows != nullptr; }
  /// Nobody has written those of a query that sees no key.
  [[nodiscard]] __device__ bool has_sums(std::int64_t token) const {
    return rows == nullptr || rows[token].inverse != 0.0F;
  }
};

/// Of the dq and dk that are made here.
__host__ __device__ std::int32_t heads_of(const BackwardSizes& sizes) {
  return sizes.forward.heads + (sizes.parts > 1 ? sizes.forward.kv_heads : 0);
}

/// `Sum`: of dq.
template <class Sum>
__device__ Head head_of(const FinishArguments& a, std::int32_t index) {
  const Sizes& sizes = a.sizes.forward;
  if (index < sizes.heads) {
    return {static_cast<const Sum*>(a.workspace.dq_sums) + index * sizes.rows_q() * a.sizes.dims,
            a.dq,
            sizes.tokens_q,
            sizes.heads,
            index,
            a.saved.rows + index * sizes.rows_q(),
            a.workspace.prescale + index * sizes.rows_q()};
  }
  index -= sizes.heads;
  return {a.workspace.dk_sums + index * sizes.rows_k() * a.sizes.dims,
          a.dk,
          sizes.tokens_k,
          sizes.kv_heads,
          index,
          nullptr,
          nullptr};
}

__device__ void load(const float* from, float (&x)[kOwn]) {
  const auto* of = reinterpret_cast<const float4*>(from);
  const float4 both[] = {__ldcs(of), __ldcs(of + 1)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[4 * i] = both[i].x;
    x[4 * i + 1] = both[i].y;
    x[4 * i + 2] = both[i].z;
    x[4 * i + 3] = both[i].w;
  }
}
__device__ void load(const __half* from, float (&x)[kOwn]) {
  const uint4 all = __ldcs(reinterpret_cast<const uint4*>(from));
  const auto* two = reinterpret_cast<const __half2*>(&all);
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) {
    x[2 * i] = __low2float(two[i]);
    x[2 * i + 1] = __high2float(two[i]);
  }
}

/// What the sums of dq were multiplied by: in two steps, since the power of two may lie outside FP32.
__device__ void take_back(std::int32_t prescale, float (&x)[kOwn]) {
  const int half = prescale >> 1;
  const float by[] = {__int_as_float((127 - half) << 23), __int_as_float((127 - prescale + half) << 23)};
#pragma unroll
  for (float& value : x) value = value * by[0] * by[1];
}

/// Of a token, from `dim` on.
template <class Sum>
__device__ void read(const Head& head, std::int64_t token, std::int32_t dims, std::int32_t dim, float (&x)[kOwn]) {
  const std::int64_t at = token * dims + (head.scattered() ? place_of(token, dim) : dim);
  if constexpr (sizeof(Sum) == sizeof(float)) return load(static_cast<const float*>(head.sums) + at, x);
  if (!head.scattered()) return load(static_cast<const float*>(head.sums) + at, x);
  load(static_cast<const Sum*>(head.sums) + at, x);
  take_back(head.prescale[token], x);
}

/// The contract's order: the power of two, then distances 1, 2, 4 and up. Lanes next to each other have the next dims.
__device__ void rotate_back(const FinishArguments& a, float (&x)[kOwn]) {
  const float factor = __int_as_float((127 - a.rotation_shift) << 23);
#pragma unroll
  for (float& value : x) value *= factor;
#pragma unroll
  for (int half = 1; half < kOwn; half *= 2) {
#pragma unroll
    for (int d = 0; d < kOwn; ++d) {
      if ((d & half) != 0) continue;
      const float low = x[d];
      const float high = x[d + half];
      x[d] = low + high;
      x[d + half] = low - high;
    }
  }
  for (int half = kOwn; half < a.sizes.forward.head_dim; half *= 2) {
    const int distance = half / kOwn;
    // The sum, or in the upper lane the difference: a product with 1 or -1 is exact.
    const float sign = (threadIdx.x & static_cast<unsigned>(distance)) == 0 ? 1.0F : -1.0F;
#pragma unroll
    for (float& value : x) value = fmaf(value, sign, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
}

__device__ void store(const float (&x)[kOwn], __nv_bfloat16* to) {
  __nv_bfloat162 out[kOwn / 2];
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) out[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(out);
}
__device__ void store(const float (&x)[kOwn], __half* to) {
  __half2 out[kOwn / 2];
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) out[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(out);
}
__device__ void store(const float (&x)[kOwn], float* to) {
  *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
  *reinterpret_cast<float4*>(to + 4) = {x[4], x[5], x[6], x[7]};
}

template <class Element, class Sum>
__global__ void __launch_bounds__(kThreads) finish_kernel(const FinishArguments a) {
  if (a.saved.control->status != 0) {
    write_nan_gradients(a, a.sizes.forward);
    return;
  }
  const auto lanes = static_cast<unsigned>(a.sizes.dims / kOwn);  // Of a row.
  const std::int32_t heads = heads_of(a.sizes);
  const Head head = head_of<Sum>(a, static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(heads)));
  const std::int64_t token =
      std::int64_t{blockIdx.x / static_cast<unsigned>(heads)} * (kThreads / lanes) + threadIdx.x / lanes;
  const int dim = static_cast<int>(threadIdx.x % lanes) * kOwn;
  const bool inside = token < head.tokens && dim < a.sizes.forward.head_dim;
  float x[kOwn] = {};
  if (inside && head.has_sums(token)) read<Sum>(head, token, a.sizes.dims, dim, x);
  if (a.rotation_shift >= 0) rotate_back(a, x);
  if (!inside) return;
  store(x, static_cast<Element*>(head.out) + (token * head.heads + head.index) * a.sizes.forward.head_dim + dim);
}

template <class Element>
cudaError_t launch(const FinishArguments& a, cudaStream_t stream) {
  const Sizes& sizes = a.sizes.forward;
  const int rows = kThreads / (a.sizes.dims / kOwn);  // Of a block.
  const auto blocks = static_cast<unsigned>((std::max(sizes.tokens_q, sizes.tokens_k) + rows - 1) / rows);
  const auto heads = static_cast<unsigned>(heads_of(a.sizes));
  if (blocks == 0 || heads == 0) return cudaSuccess;
  const std::int64_t grid = std::int64_t{blocks} * heads;
  if (grid > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto* kernel = a.sizes.has_prescale() ? finish_kernel<Element, __half> : finish_kernel<Element, float>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

int launch_finish(const FinishArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (arguments.dtype) {
    case DType::bf16: return launch<__nv_bfloat16>(arguments, on);
    case DType::f16: return launch<__half>(arguments, on);
    default: return launch<float>(arguments, on);
  }
}

}  // namespace mxflash::cuda
