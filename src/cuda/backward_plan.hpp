// From a backward's call to its launches, as plan.hpp.
#pragma once

#include <cstddef>
#include <optional>

#include "cuda/backward.hpp"
#include "cuda/embed_backward.hpp"
#include "cuda/plan.hpp"

namespace mxflash::cuda {

/// Byte offsets of the arrays of BackwardWorkspace, in its order.
struct BackwardLayout {
  std::size_t control = 0;
  std::size_t items = 0;
  std::size_t costs = 0;
  std::size_t slots = 0;
  std::size_t costs_out = 0;
  std::size_t order = 0;
  std::size_t sort = 0;
  std::size_t sort_bytes = 0;
  std::size_t turns = 0;
  std::size_t dout_base = 0;
  std::size_t dout_records = 0;
  std::size_t query_tiles = 0;
  std::size_t dout_codes = 0;
  std::size_t dout_columns = 0;
  std::size_t query_columns = 0;
  std::size_t key_columns = 0;
  std::size_t value_rows = 0;
  std::size_t dq_sums = 0;
  std::size_t dk_sums = 0;
  std::size_t scratch = 0;
  std::size_t prescale = 0;
  std::size_t key_most = 0;
  std::size_t tile_most = 0;
  std::size_t bytes = 0;
};

/// In the order in which they run.
struct BackwardLaunches {
  KeyScheduleArguments schedule;
  PrepareArguments prepare;
  PrescaleArguments prescale;
  BackwardArguments backward;
  FinishArguments finish;
  /// Instead of all of these, where BF16 products run the recipe.
  std::optional<EmbedBackwardLaunches> embedded = std::nullopt;
};

BackwardSizes backward_sizes(const Sizes& forward, DqAccumulation dq_accumulation);
/// For as many blocks of the kernel as the device has processors.
Result<BackwardLayout> plan_backward(const BackwardSizes& sizes, std::int64_t processors);
/// Of the workspace, on the current device.
Result<std::size_t> backward_bytes(const Sizes& forward, const Recipe& recipe);
/// Checks the call and the workspace.
Result<BackwardLaunches> prepare_backward(const BackwardCall& call, const Recipe& recipe, const Execution& execution);

}  // namespace mxflash::cuda
