// What the CPU engine's kernels need to know: which operand of which product is quantized how, and the factors that are
// left over. Plain data; kernels are compiled for several instruction sets and must not instantiate shared inline code.
#pragma once

#include <cstdint>

#include "mxflash/attention.hpp"
#include "mxflash/quantize.hpp"
#include "reference/operands.hpp"
#include "reference/strip.hpp"

namespace mxflash::cpu {

/// Blocks of queries whose gradients of keys are gathered before they are added up, and over which nvfp4 shares its
/// second level.
inline constexpr std::int64_t kStripBlocks = kStrip / kBlock;

/// Logits, dP and dLSE beyond this are held at it: FP32 has no room for more, and Inf would be NaN under a masked
/// weight.
inline constexpr float kHeld = 1e38F;

struct TokenOperand {
  const TensorView* tensor = nullptr;
  Operand operand;
  bool rotate = false;
  bool folds = false;         ///< One exponent a token, kept apart in products over tokens.
  std::uint64_t stream = 0;   ///< Of stochastic rounding.
  float tensor_scale = 1.0F;  ///< Of tensor-wide blocks; codes stay unscaled, the scale is in Plan's factors.
};

struct Plan {
  Mask mask;
  const Recipe* recipe = nullptr;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  int rotation_shift = -1;  ///< Of Hadamard; -1: none.
  std::uint64_t seed = 0;
  bool statistics = false;

  TokenOperand q_s, k_s, v_o, v_o_cut;
  TokenOperand dout_dp, v_dp, dout_dv, k_dq, k_dq_cut, q_dk;
  const TensorView* dlse = nullptr;  ///< [tokens, heads, 1]; none: zero.

  // Operands of one tensor that have the same codes.
  bool k_shared = false;     ///< k_s and k_dq.
  bool v_shared = false;     ///< v_o and v_dp.
  bool q_shared = false;     ///< q_s and q_dk.
  bool dout_shared = false;  ///< dout_dp and dout_dv.
  bool ds_shared = false;    ///< One set of codes of dS for dQ and dK.
  bool strip_ds = false;     ///< dS of dK has a second level over the queries of a strip.
  bool int8_scores = false;  ///< Q and K of S are E2M1 codes under scales along dims.
  bool int8_output = false;  ///< P is E2M1 in groups, V E2M1 codes under scales along tokens or of whole tokens.
  bool has_o_cut = false;
  bool has_dq_cut = false;

  float logit_factor = 1;    ///< Dot product of codes to base-2 logit.
  float softmax_factor = 1;  ///< w (dP - D + dLSE) to dS.
  double softmax = 1;        ///< The same unrounded.
  float dp_factor = 1;       ///< Tensor-wide scales that remain in dP, O, dV, dQ and dK.
  float o_factor = 1;
  float dv_factor = 1;
  float dq_factor = 1;
  float dk_factor = 1;
  float unit = 1;  ///< P is held times this: beta where P is static.
};

/// The arguments have been checked. `inputs` must outlive the plan.
Plan make_plan(const Problem& problem, const Recipe& recipe, const Inputs& inputs, const Options& options);

}  // namespace mxflash::cpu
