// From a call to the launches that it takes: the plan of the workspace, and every kernel's arguments.
#pragma once

#include <cstddef>
#include <optional>

#include "cuda/embed.hpp"
#include "cuda/kernels.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {

struct EmbedLaunches {
  EmbedQuantizeArguments quantize;
  EmbedForwardArguments forward;
};

/// In the order in which they run.
struct Launches {
  ScheduleArguments schedule;
  QuantizeArguments quantize;
  ForwardArguments forward;
  /// Instead of the two before, where BF16 products run the recipe.
  std::optional<EmbedLaunches> embedded = std::nullopt;
};

/// Sets a pointer to an array of a workspace.
struct Placer {
  std::byte* workspace = nullptr;
  template <class T>
  void operator()(T*& pointer, std::size_t offset) const {
    pointer = reinterpret_cast<T*>(workspace + offset);
  }
};

Result<Layout> plan(const Sizes& sizes, const Recipe& recipe);
/// Checks the call and the workspace.
Result<Launches> prepare(const ForwardCall& call, const Recipe& recipe, const Execution& execution);

}  // namespace mxflash::cuda
