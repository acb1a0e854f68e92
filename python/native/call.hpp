// One call of attention as Python describes it, on the host or on a device.
#pragma once

#include <string>
#include <utility>

#include "arrays.hpp"
#include "mxflash/recipe.hpp"

namespace mxflash::python {

/// The arrays of one call.
struct Arguments {
  Array q;
  Array k;
  Array v;
  std::optional<Array> dout;
  std::optional<Array> dlse;
  Offsets offsets;
  /// (left, right) in keys, None: no bound.
  std::pair<std::optional<std::int64_t>, std::optional<std::int64_t>> window;
  std::optional<float> scale;
};
Mask mask_of(const Arguments& arguments);

/// Engine, threads, seed and determinism; `causality` is of the backward, None: the recipe's own.
struct Settings {
  std::string recipe;
  std::string engine = "auto";
  std::optional<std::string> causality;
  int threads = 0;
  std::uint64_t seed = 0;
  bool deterministic = true;
  bool numpy = false;  ///< Results as arrays of numpy.
};
Recipe chosen_recipe(const Settings& settings);

/// Without Python's lock: other threads go on, but nobody may write into the arrays.
template <class Function>
auto unlocked(Function function) {
  const nb::gil_scoped_release release;
  return function();
}

}  // namespace mxflash::python
