#include "cuda/tensor_map.hpp"

#include <cuda_runtime.h>

namespace mxflash::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// From the driver that runs, so that the library starts where there is none.
Encode driver_encode() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kVersion = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return function;
}

}  // namespace

int encode(CUtensorMap& map, const Box& box) {
  const Encode function = driver_encode();
  if (function == nullptr) return cudaErrorInsufficientDriver;
  constexpr std::array<std::uint32_t, 5> kSteps{1, 1, 1, 1, 1};
  const CUresult result = function(&map, box.type, box.rank, box.base, box.size.data(), box.stride.data(),
                                   box.box.data(), kSteps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, box.swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace mxflash::cuda
