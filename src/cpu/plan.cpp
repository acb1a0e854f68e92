#include "cpu/plan.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include "reference/forward.hpp"
#include "reference/weights.hpp"

namespace mxflash::cpu {
namespace {

using reference::Stream;

bool is_static(const Operand& weights) { return weights.quantized() && weights.block == Block::tensor(); }

bool is_e2m1(const Operand& operand) {
  return (operand.encoding == Encoding::e2m1 || operand.encoding == Encoding::nvfp4) && operand.block.rows != 0;
}

bool is_int8_dims(const Operand& operand) { return is_e2m1(operand) && operand.block.columns != 1; }

bool is_int8_tokens(const Operand& operand) { return is_e2m1(operand) && operand.block.columns <= 1; }

bool is_int8_weights(const Operand& operand) {
  return operand.encoding == Encoding::e2m1 && operand.block == Block::dims32();
}

TokenOperand token_operand(const TensorView& tensor, const Operand& operand, bool rotate, Stream stream) {
  TokenOperand out;
  out.tensor = &tensor;
  out.operand = operand;
  out.rotate = rotate;
  out.folds = operand.folds();
  out.stream = operand.rounding == Rounding::nearest ? 0 : static_cast<std::uint64_t>(stream);
  return out;
}

/// FP32 scale of a tensor-wide block, by the reference's quantizer: only negatives have one.
void measure(TokenOperand& operand, const Packing& packing, Side side, int threads) {
  if (!operand.operand.quantized() || operand.operand.block != Block::tensor()) return;
  const Result<Quantized> quantized =
      quantize(*operand.tensor, packing, {operand.operand, side, operand.rotate, 0, 0}, threads);
  if (quantized.ok()) operand.tensor_scale = quantized->tensor_scale;
}

}  // namespace

Plan make_plan(const Problem& problem, const Recipe& recipe, const Inputs& inputs, const Options& options) {
  Plan plan;
  plan.mask = problem.mask;
  plan.recipe = &recipe;
  plan.heads = inputs.q.heads();
  plan.kv_heads = inputs.k.heads();
  plan.head_dim = inputs.q.dims();
  plan.value_dim = inputs.v.dims();
  plan.seed = options.seed;
  plan.statistics = options.statistics;
  const Rotation rotation = rotation_of(recipe, plan.head_dim);
  plan.rotation_shift = rotation.on ? rotation.shift : -1;

  plan.q_s = token_operand(inputs.q, recipe.s.left, rotation.on, Stream::none);
  plan.k_s = token_operand(inputs.k, recipe.s.right, rotation.on, Stream::none);
  plan.v_o = token_operand(inputs.v, recipe.o.tokens, false, Stream::none);
  plan.v_o_cut = token_operand(inputs.v, recipe.o.cut ? recipe.o.cut->tokens : recipe.o.tokens, false, Stream::none);
  std::vector<std::pair<TokenOperand*, Side>> operands{
      {&plan.q_s, Side::query}, {&plan.k_s, Side::key}, {&plan.v_o, Side::key}, {&plan.v_o_cut, Side::key}};
  if (inputs.dout) {
    const Operand k_cut = recipe.dq.cut ? recipe.dq.cut->tokens : recipe.dq.tokens;
    plan.dout_dp = token_operand(*inputs.dout, recipe.dp.left, false, Stream::dout_dp);
    plan.v_dp = token_operand(inputs.v, recipe.dp.right, false, Stream::v_dp);
    plan.dout_dv = token_operand(*inputs.dout, recipe.dv.tokens, false, Stream::dout_dv);
    plan.k_dq = token_operand(inputs.k, recipe.dq.tokens, rotation.on, Stream::k_dq);
    plan.k_dq_cut = token_operand(inputs.k, k_cut, rotation.on, Stream::k_dq);
    if (inputs.dlse) plan.dlse = &*inputs.dlse;
    plan.q_dk = token_operand(inputs.q, recipe.dk.tokens, rotation.on, Stream::q_dk);
    operands.insert(operands.end(), {{&plan.dout_dp, Side::query},
                                     {&plan.v_dp, Side::key},
                                     {&plan.dout_dv, Side::query},
                                     {&plan.k_dq, Side::key},
                                     {&plan.k_dq_cut, Side::key},
                                     {&plan.q_dk, Side::query}});
  }
  for (const auto& [operand, side] : operands) measure(*operand, problem.packing, side, options.threads);

  const auto same = [](const TokenOperand& a, const TokenOperand& b) {
    return a.operand == b.operand && a.stream == b.stream;
  };
  plan.k_shared = same(plan.k_s, plan.k_dq);
  plan.v_shared = same(plan.v_o, plan.v_dp);
  plan.q_shared = same(plan.q_s, plan.q_dk);
  plan.dout_shared = same(plan.dout_dp, plan.dout_dv);
  plan.ds_shared = shares_codes(recipe);
  plan.strip_ds = recipe.dk.weights.second_level == SecondLevel::adaptive;
  plan.int8_scores = is_int8_dims(recipe.s.left) && is_int8_dims(recipe.s.right) &&
                     recipe.s.left.block.columns == recipe.s.right.block.columns;
  plan.int8_output =
      is_int8_weights(recipe.o.weights) && is_int8_tokens(recipe.o.tokens) &&
      (!recipe.o.cut || (is_int8_weights(recipe.o.cut->weights) && is_int8_tokens(recipe.o.cut->tokens)));
  plan.has_o_cut = recipe.o.cut.has_value();
  plan.has_dq_cut = recipe.dq.cut.has_value();

  const double softmax = softmax_scale(problem.scale, rotation, plan.head_dim);
  plan.softmax = softmax;
  plan.softmax_factor = static_cast<float>(softmax);
  // Scales over all of a tensor may lie beyond FP32 together.
  constexpr double kMost = kHeld;
  const double logit = softmax * std::numbers::log2e * static_cast<double>(plan.q_s.tensor_scale) *
                       static_cast<double>(plan.k_s.tensor_scale);
  plan.logit_factor = static_cast<float>(std::clamp(logit, -kMost, kMost));
  plan.dp_factor = plan.dout_dp.tensor_scale * plan.v_dp.tensor_scale;
  plan.o_factor = plan.v_o.tensor_scale;
  plan.dv_factor = plan.dout_dv.tensor_scale;
  plan.dq_factor = plan.k_dq.tensor_scale;
  plan.dk_factor = plan.q_dk.tensor_scale;
  const bool any_static = is_static(recipe.o.weights) || (recipe.o.cut && is_static(recipe.o.cut->weights));
  plan.unit = any_static ? static_cast<float>(recipe.beta) : 1.0F;
  return plan;
}

}  // namespace mxflash::cpu
