// What every engine may take for granted, checked in one place.
#pragma once

#include "mxflash/attention.hpp"

namespace mxflash {

inline constexpr std::int64_t kSmallestDim = 8;
inline constexpr std::int64_t kLargestDim = 256;
inline constexpr int kLargestThreads = 4096;

Status check_arguments(const Problem& problem, const Inputs& inputs, const Options& options);
/// And dout, which the backward needs.
Status check_backward_arguments(const Problem& problem, const Inputs& inputs, const Options& options);
/// What the recipe asks of the shapes: a Hadamard transform needs power-of-two dims.
Status check_recipe(const Recipe& recipe, const Inputs& inputs);

}  // namespace mxflash
