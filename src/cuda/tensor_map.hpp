// Descriptors for the copy engine, made on the host and passed as kernel parameters.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace mxflash::cuda {

/// A box of a strided array. Strides are in bytes, from the second dimension on.
struct Box {
  void* base = nullptr;  ///< Only read; the driver's own function takes no const.
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  std::uint32_t rank = 0;
  std::array<std::uint64_t, 5> size{};
  std::array<std::uint64_t, 4> stride{};
  std::array<std::uint32_t, 5> box{};
};

/// CUDA's code; 0: success.
int encode(CUtensorMap& map, const Box& box);

}  // namespace mxflash::cuda
