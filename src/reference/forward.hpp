// P of one strip, which the backward makes again from the same codes.
#pragma once

#include "reference/operands.hpp"
#include "reference/weights.hpp"

namespace mxflash::reference {

/// `logit_scale` takes the dot products to base-2 logits.
Probabilities strip_probabilities(const Strip& strip, const Recipe& recipe, const ForwardRows& rows, double logit_scale,
                                  OctaveCounter& counter);

}  // namespace mxflash::reference
