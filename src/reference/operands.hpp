// Which quantized tensors the six products read, each made once.
#pragma once

#include <memory>
#include <vector>

#include "arguments/rotation.hpp"
#include "mxflash/attention.hpp"
#include "mxflash/quantize.hpp"
#include "quantize/scales.hpp"
#include "reference/strip.hpp"

namespace mxflash::reference {

/// Takes a gradient with respect to a rotated row back to the row: 2^-shift H x, in place.
void unrotate(const Rotation& rotation, std::int64_t dims, double* row);

using QuantizedPtr = std::shared_ptr<const Quantized>;

struct Operands {
  QuantizedPtr q_s, k_s;
  QuantizedPtr v_o, v_o_cut;
  QuantizedPtr dout_dp, v_dp;
  QuantizedPtr dout_dv;
  QuantizedPtr k_dq, k_dq_cut;
  QuantizedPtr q_dk;
};

using mxflash::Stream;

Result<Operands> quantize_operands(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                   const Options& options, bool with_backward);

/// The forward's operands of one document and query head.
struct ForwardRows {
  Rows q;
  std::int64_t keys = 0;
  std::vector<double> k_transposed;
  Rows v;
  Rows v_cut;
};
ForwardRows forward_rows(const Operands& operands, const Recipe& recipe, const Document& document, std::int64_t head,
                         std::int64_t kv_head);

}  // namespace mxflash::reference
