// The rotation of q and k that a recipe asks for, and what it does to the softmax scale: numerics.md, section 2.
#pragma once

#include <bit>
#include <cmath>
#include <optional>

#include "mxflash/recipe.hpp"

namespace mxflash {

/// The rotation of q and k, and what it leaves to be undone.
struct Rotation {
  bool on = false;
  int shift = 0;        ///< Rotated rows are H x 2^-shift.
  double factor = 1.0;  ///< q . k = factor (rotated q . rotated k).
};

inline Rotation rotation_of(const Recipe& recipe, std::int64_t head_dim) {
  if (recipe.hadamard == Hadamard::off || (recipe.hadamard == Hadamard::at_128 && head_dim != 128)) return {};
  const int log2_dims = std::countr_zero(static_cast<std::uint64_t>(head_dim));
  const int shift = (log2_dims + 1) / 2;
  return {true, shift, std::ldexp(1.0, 2 * shift - log2_dims)};
}

/// Multiplies the dot products of (rotated) q and k.
inline double softmax_scale(std::optional<float> given, const Rotation& rotation, std::int64_t head_dim) {
  const double scale = given ? static_cast<double>(*given) : 1.0 / std::sqrt(static_cast<double>(head_dim));
  return scale * rotation.factor;
}

}  // namespace mxflash
