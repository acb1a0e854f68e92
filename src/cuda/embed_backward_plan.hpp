// From a recipe to what the kernels of the embedded backward read of it.
#pragma once

#include "cuda/embed_backward.hpp"
#include "mxflash/status.hpp"

namespace mxflash::cuda {

/// Whether all operands of the recipe's backward are exact in BF16, and those of its forward; the error names the one
/// that is not. Precondition: the recipe has a backward.
Status embeds_backward(const Recipe& recipe);

/// Byte offsets from the start of the backward's workspace.
struct GradientLayout {
  std::size_t control = 0;  ///< Control
  /// TokenTable, values and about.
  std::size_t dout_rows[2] = {0, 0};
  std::size_t value_rows[2] = {0, 0};
  std::size_t dout[2] = {0, 0};
  std::size_t keys[kTileKinds][2] = {};
  std::size_t queries[2] = {0, 0};
  std::size_t dout_largest = 0;
  std::size_t rows = 0;
  std::size_t dout_norms = 0;
  std::size_t key_bounds = 0;
  std::size_t document_bounds = 0;
  std::size_t dq = 0;
  std::size_t dk = 0;
  std::size_t dv = 0;
  std::size_t bytes = 0;
};
GradientLayout plan_gradients(const Sizes& sizes, const Recipe& recipe);

/// What the tables are made from.
struct GradientSources {
  Source q;
  Source k;
  Source v;
  Source dout;
};

/// `call` has everything but tables and rules.
EmbedBackwardLaunches embed_backward_launches(const EmbedBackwardArguments& call, const GradientSources& sources,
                                              const Recipe& recipe, void* workspace);

}  // namespace mxflash::cuda
