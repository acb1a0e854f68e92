// Every operand of a recipe with the path that JSON and messages name it by, and what its place in a product asks of
// it.
#pragma once

#include <string_view>
#include <vector>

#include "mxflash/recipe.hpp"

namespace mxflash {

enum class Role : std::uint8_t {
  dims,             ///< A token operand of a product over dims: s, dp.
  tokens,           ///< A token operand of a product over tokens: o, dv, dq, dk.
  p_over_keys,      ///< o.weights
  p_over_queries,   ///< dv.weights
  ds_over_keys,     ///< dq.weights
  ds_over_queries,  ///< dk.weights
};

inline bool is_p(Role role) { return role == Role::p_over_keys || role == Role::p_over_queries; }

struct Place {
  std::string_view path;
  const Operand* operand = nullptr;
  Role role = Role::dims;
  bool backward = false;
  bool cut = false;
};

/// The forward first; operands of a cut pair after the pair they replace.
std::vector<Place> places_of(const Recipe& recipe);

/// Whether an operand of the backward is other than f32, or cut.
bool has_backward(const Recipe& recipe);

}  // namespace mxflash
