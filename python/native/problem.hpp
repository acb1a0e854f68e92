// The arguments that attention, its backward and the audit share.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "mxflash/attention.hpp"

namespace mxflash::python {

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

/// Views into the caller's arrays, which Arguments keeps alive.
struct Call {
  Problem problem;
  Inputs inputs;
};
Call call_of(const Arguments& arguments);

}  // namespace mxflash::python
