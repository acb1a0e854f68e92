#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/kernels.hpp"
#include "cuda/sort.hpp"

namespace mxflash::cuda {

std::int64_t sort_scratch_bytes(std::int64_t slots) {
  std::size_t bytes = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortPairsDescending(
      nullptr, bytes, static_cast<const std::uint64_t*>(nullptr), static_cast<std::uint64_t*>(nullptr),
      static_cast<const std::int32_t*>(nullptr), static_cast<std::int32_t*>(nullptr), slots);
  return error == cudaSuccess ? static_cast<std::int64_t>(bytes) : -static_cast<std::int64_t>(error);
}

int sort_falling(const Sort& sort, std::uint64_t most_cost, void* stream) {
  std::size_t bytes = sort.scratch_bytes;
  // One pass fewer for each eight bits that no cost has.
  return cub::DeviceRadixSort::SortPairsDescending(
      sort.scratch, bytes, sort.costs, sort.costs_out, sort.slots, sort.order, sort.count, 0,
      static_cast<int>(std::bit_width(most_cost)), static_cast<cudaStream_t>(stream));
}

}  // namespace mxflash::cuda
