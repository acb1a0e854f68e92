// Random tensors: the same numbers for the same seed and stream, in whatever order they are made.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "mxflash/tensor.hpp"

namespace mxflash::tool {

struct Random {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::vector<double> factors;  ///< Of (head, dim); empty: all 1.
};

/// Uniform in (0, 1).
double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

/// Standard normal numbers times their factors. Precondition: an even number of dims.
Tensor normal_tensor(DType dtype, std::array<std::int64_t, 3> shape, const Random& random);

}  // namespace mxflash::tool
