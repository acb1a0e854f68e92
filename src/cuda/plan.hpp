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

/// Arrays one after the other, each aligned.
class Planner {
 public:
  static constexpr std::size_t kAlignment = 256;

  std::size_t take(std::size_t bytes) {
    const std::size_t place = end_;
    end_ = (end_ + bytes + kAlignment - 1) / kAlignment * kAlignment;
    return place;
  }
  [[nodiscard]] std::size_t end() const { return end_; }

 private:
  std::size_t end_ = 0;
};

/// Sets a pointer to an array of a workspace.
struct Placer {
  std::byte* workspace = nullptr;
  template <class T>
  void operator()(T*& pointer, std::size_t offset) const {
    pointer = reinterpret_cast<T*>(workspace + offset);
  }
};

/// Scratch of the sort of so many slots.
Result<std::size_t> sort_bytes_of(std::int64_t slots);
Source source_of(const TensorView& view, const Operand& operand);
Band band_of(const Mask& mask);
Status check_workspace(const Execution& execution, std::size_t bytes);
Workspace workspace_at(void* base, const Layout& layout);

/// `sizes`: of the call.
Result<Layout> plan(const Sizes& sizes, const ForwardCall& call, const Recipe& recipe);
/// Checks the call and the workspace.
Result<Launches> prepare(const ForwardCall& call, const Recipe& recipe, const Execution& execution);

}  // namespace mxflash::cuda
