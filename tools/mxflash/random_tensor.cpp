#include "random_tensor.hpp"

#include <cmath>
#include <numbers>

#include "mxflash/formats.hpp"
#include "threading/parallel.hpp"

namespace mxflash::tool {

double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (random_bits(seed, stream, index) + 0.5) * 0x1p-32;
}

Tensor normal_tensor(DType dtype, std::array<std::int64_t, 3> shape, const Random& random) {
  Tensor tensor = Tensor::zeros(dtype, {shape[0], shape[1], shape[2]});
  const std::int64_t row = shape[1] * shape[2];
  parallel_for(shape[0], 0, [&](std::int64_t token) {
    // Box and Muller: two uniform numbers give two normal ones.
    for (std::int64_t i = 0; i < row; i += 2) {
      const auto index = static_cast<std::uint64_t>(token * row + i);
      const double radius = std::sqrt(-2 * std::log(uniform(random.seed, random.stream, index)));
      const double angle = 2 * std::numbers::pi * uniform(random.seed, random.stream, index + 1);
      const std::array values = {radius * std::cos(angle), radius * std::sin(angle)};
      for (std::size_t j = 0; j < 2; ++j) {
        const std::int64_t place = i + static_cast<std::int64_t>(j);
        const double factor = random.factors.empty() ? 1.0 : random.factors[static_cast<std::size_t>(place)];
        tensor.set(token * row + place, static_cast<float>(factor * values[j]));
      }
    }
  });
  return tensor;
}

}  // namespace mxflash::tool
