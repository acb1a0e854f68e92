// The forward of one strip, which the backward runs again to rebuild the same weights.
#pragma once

#include "reference/operands.hpp"
#include "reference/weights.hpp"

namespace mxflash::reference {

struct StripForward {
  Probabilities p;
  std::vector<double> o;    ///< queries x value_dim
  std::vector<double> lse;  ///< By query.
};

/// `logit_scale` takes the dot products to base-2 logits.
StripForward forward_strip(const Strip& strip, const Recipe& recipe, const ForwardRows& rows, double logit_scale,
                           OctaveCounter& counter);

/// Multiplies the dot products of (rotated) q and k.
double softmax_scale(const Problem& problem, const Rotation& rotation, std::int64_t head_dim);

}  // namespace mxflash::reference
