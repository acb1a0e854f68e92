#include <fmt/format.h>

#include "mxflash/recipe.hpp"
#include "recipe/names.hpp"

namespace mxflash {
namespace {

constexpr Claims kExact{Causality::exact, Causality::exact};
constexpr Claims kExactForward{Causality::exact, Causality::block};
constexpr Claims kBlock{Causality::block, Causality::block};
constexpr Claims kLeaks{Causality::leaks, Causality::leaks};

Operand e4m3(Block block, ScaleRule rule = ScaleRule::ceil) {
  return {.encoding = Encoding::e4m3, .block = block, .rule = rule};
}
Operand e2m1(Block block, ScaleRule rule = ScaleRule::ceil) {
  return {.encoding = Encoding::e2m1, .block = block, .rule = rule};
}
Operand nvfp4(Block block) { return {.encoding = Encoding::nvfp4, .block = block}; }
Operand stochastic(Operand operand) {
  operand.rounding = Rounding::stochastic;
  return operand;
}
/// For dO and dS, which may be far below the range of a fixed second level.
Operand nvfp4_gradient(Block block) {
  Operand operand = stochastic(nvfp4(block));
  operand.second_level = SecondLevel::adaptive;
  return operand;
}
constexpr Operand kBf16{.encoding = Encoding::bf16};

Recipe described(Recipe recipe, std::string name, std::string summary, Claims claims) {
  recipe.name = std::move(name);
  recipe.summary = std::move(summary);
  recipe.claims = claims;
  return recipe;
}

Recipe bf16() {
  Recipe recipe;
  recipe.s = recipe.dp = {kBf16, kBf16};
  recipe.o = recipe.dv = recipe.dq = recipe.dk = {kBf16, kBf16, std::nullopt};
  return described(recipe, "bf16", "baseline: every operand in BF16, FP32 accumulation", kExact);
}

/// The MXFP8 operands with one scale of the tokens per `tokens`, a static P and 32 x 32 squares of dS.
Recipe mxfp8_of(Block tokens) {
  const Operand token = e4m3(tokens);
  const Operand p = e4m3(Block::tensor());
  const Operand ds = e4m3(Block::square32());
  Recipe recipe;
  recipe.beta = 256;
  recipe.s = recipe.dp = {token, token};
  recipe.o = recipe.dv = {p, token, std::nullopt};
  recipe.dq = recipe.dk = {ds, token, std::nullopt};
  return recipe;
}

Recipe mxfp8() {
  Recipe recipe = mxfp8_of(Block::token());
  recipe.hadamard = Hadamard::at_128;
  return described(
      recipe, "mxfp8",
      "default: E4M3 with a power-of-two exponent per token, 32 x 32 scales of dS, Hadamard at head_dim 128",
      kExactForward);
}

Recipe mxfp8_tokenblock() {
  Recipe recipe = mxfp8_of(Block::tokens32());
  return described(recipe, "mxfp8-tokenblock", "E4M3 with a power-of-two exponent per 32 tokens, as published", kBlock);
}

Recipe nvfp4_logits() {
  Recipe recipe = mxfp8_of(Block::token());
  recipe.s = {nvfp4(Block::dims16()), nvfp4(Block::dims16())};
  return described(recipe, "nvfp4",
                   "Q and K in NVFP4 for the logits; everything else, Q and K of the backward too, as mxfp8",
                   kExactForward);
}

Recipe fp4() {
  Recipe recipe;
  recipe.hadamard = Hadamard::at_128;
  const Operand p = e2m1(Block::dims32(), ScaleRule::uos);
  const Operand per_token = e2m1(Block::token(), ScaleRule::uos);
  recipe.s = {nvfp4(Block::dims16()), nvfp4(Block::dims16())};
  recipe.o = {p, nvfp4(Block::channel16()), WeightPair{p, per_token}};
  recipe.dp = {nvfp4_gradient(Block::dims16()), nvfp4(Block::dims16())};
  recipe.dv = {e2m1(Block::channel32(), ScaleRule::uos), nvfp4_gradient(Block::channel16()), std::nullopt};
  recipe.dq = {nvfp4_gradient(Block::dims16()), per_token, std::nullopt};
  recipe.dk = {nvfp4_gradient(Block::channel16()), nvfp4(Block::channel16()), std::nullopt};
  return described(recipe, "fp4", "all products in 4 bits: NVFP4 tokens and dS, E2M1 P, stochastic gradients", kExact);
}

Recipe mxattention() {
  Recipe recipe;
  recipe.purpose = Purpose::inference;
  recipe.hadamard = Hadamard::required;
  const Operand along_row = e2m1(Block::dims32(), ScaleRule::uos);
  recipe.s = {along_row, along_row};
  recipe.o = {along_row, e2m1(Block::channel32(), ScaleRule::uos),
              WeightPair{along_row, e2m1(Block::token(), ScaleRule::uos)}};
  return described(recipe, "mxattention", "inference in MXFP4 with scales of least error, Hadamard on Q and K", kExact);
}

/// 1 x 32 scales along every contraction; dO and dS rounded as `gradient` says.
Recipe along_contraction(Encoding encoding, ScaleRule rule, Rounding gradient) {
  const Operand row{.encoding = encoding, .block = Block::dims32(), .rule = rule};
  const Operand column{.encoding = encoding, .block = Block::channel32(), .rule = rule};
  Operand gradient_row = row;
  Operand gradient_column = column;
  gradient_row.rounding = gradient_column.rounding = gradient;
  Recipe recipe;
  recipe.s = {row, row};
  recipe.o = {row, column, std::nullopt};
  recipe.dp = {gradient_row, row};
  recipe.dv = {column, gradient_column, std::nullopt};
  recipe.dq = {gradient_row, column, std::nullopt};
  recipe.dk = {gradient_column, column, std::nullopt};
  return recipe;
}

/// Without the diagonal: V leaks into O, K into dQ.
Recipe mxfp4_leaky() {
  Recipe recipe = along_contraction(Encoding::e2m1, ScaleRule::uos, Rounding::stochastic);
  recipe.hadamard = Hadamard::at_128;
  return recipe;
}

Recipe mxfp4_diagonal() {
  Recipe recipe = mxfp4_leaky();
  recipe.o.cut = recipe.dq.cut = WeightPair{kBf16, kBf16};
  return described(recipe, "mxfp4-diagonal",
                   "MXFP4 along every contraction, BF16 on the 32 x 32 tiles that the mask cuts, stochastic gradients",
                   kExact);
}

Recipe negative(std::string name, std::string summary, Recipe recipe) {
  recipe.purpose = Purpose::negative;
  return described(std::move(recipe), std::move(name), std::move(summary), kLeaks);
}

Recipe naive_fp4() {
  Recipe recipe;
  const Operand along_row = e2m1(Block::dims32(), ScaleRule::floor);
  recipe.s = {along_row, along_row};
  recipe.o = {along_row, e2m1(Block::channel32(), ScaleRule::floor), std::nullopt};
  recipe.row_sum = RowSum::unquantized;
  return recipe;
}

std::vector<Recipe> make_catalogue() {
  constexpr auto kNearest = Rounding::nearest;
  return {
      bf16(),
      mxfp8(),
      mxfp8_tokenblock(),
      nvfp4_logits(),
      fp4(),
      mxattention(),
      mxfp4_diagonal(),
      negative("fp8-tensor", "tensor-wide FP32 scales: every token moves every other", mxfp8_of(Block::tensor())),
      negative("mxfp8-floor", "1 x 32 scales along the contraction, floor rule: leaks and saturates",
               along_contraction(Encoding::e4m3, ScaleRule::floor, kNearest)),
      negative("mxfp8-1x32", "1 x 32 scales along the contraction: V leaks into O, K into dQ",
               along_contraction(Encoding::e4m3, ScaleRule::ceil, kNearest)),
      negative("mxfp8-32x32", "32 x 32 scales of the tokens", mxfp8_of(Block::square32())),
      negative("mxfp4-leaky", "mxfp4-diagonal without its unquantized diagonal: V leaks into O, K into dQ",
               mxfp4_leaky()),
      negative("naive-fp4", "MXFP4 normalized by the sum of the unquantized P, no backward", naive_fp4()),
  };
}

}  // namespace

const std::vector<Recipe>& recipes() {
  static const std::vector<Recipe> catalogue = make_catalogue();
  return catalogue;
}

Result<Recipe> find_recipe(std::string_view name) {
  std::string known;
  for (const Recipe& recipe : recipes()) {
    if (recipe.name == name) return recipe;
    known.append(known.empty() ? "" : ", ").append(recipe.name);
  }
  return invalid(fmt::format("recipe is {}; allowed: {}", names::quoted(name), known));
}

}  // namespace mxflash
