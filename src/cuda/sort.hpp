// Work in the order of its cost. No CUDA headers here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxflash::cuda {

struct Sort {
  const std::uint64_t* costs = nullptr;
  std::uint64_t* costs_out = nullptr;
  const std::int32_t* slots = nullptr;
  std::int32_t* order = nullptr;
  std::int64_t count = 0;
  void* scratch = nullptr;
  std::size_t scratch_bytes = 0;  ///< sort_scratch_bytes(count) of kernels.hpp.
};

/// Slots by falling cost, equal ones as they were. No cost is above `most_cost`. Returns CUDA's own code.
int sort_falling(const Sort& sort, std::uint64_t most_cost, void* stream);

}  // namespace mxflash::cuda
