#include "cuda/embed_plan.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <string_view>

#include "cuda/plan.hpp"

namespace mxflash::cuda {
namespace {

/// Scales over all of a tensor are FP32 numbers: no product with a code is exact in BF16.
bool exact_in_bf16(const Operand& tokens) {
  if (tokens.encoding == Encoding::bf16) return true;
  return tokens.quantized() && tokens.block != Block::tensor() && tokens.rounding == Rounding::nearest &&
         tokens.second_level == SecondLevel::fixed;
}

bool is_static(const Operand& weights) { return weights.quantized() && weights.block == Block::tensor(); }

bool exact_weights(const Operand& weights) {
  if (weights.encoding == Encoding::bf16 || is_static(weights)) return true;
  return weights.quantized() && weights.encoding != Encoding::nvfp4 && weights.block == Block::dims32();
}

std::string described(const Operand& operand) {
  return fmt::format("{} {}", to_string(operand.encoding), to_string(operand.block));
}

/// Of numbers with so many bits after the first, the smallest normal being 2^least.
RoundTo round_to(int mantissa_bits, int least, float most) {
  return {std::bit_cast<std::uint32_t>(detail::pow2(least)), static_cast<std::uint32_t>(23 - mantissa_bits) << 23,
          most};
}

/// The largest 2^fraction, below 2, that takes no higher exponent than 1 does.
float group_limit(Format format, ScaleRule rule) {
  auto low = std::bit_cast<std::uint32_t>(1.0F);
  auto high = std::bit_cast<std::uint32_t>(2.0F);
  const int of_one = scale_exponent(format, rule, 1.0F);
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (scale_exponent(format, rule, std::bit_cast<float>(middle)) == of_one ? low : high) = middle;
  }
  return std::bit_cast<float>(low);
}

}  // namespace

RoundTo round_to(Format format) {
  const FormatSpec spec = spec_of(format);
  return round_to(spec.mantissa_bits, 1 - spec.bias, spec.max);
}

Status embeds(const Recipe& recipe) {
  const auto refused = [&recipe](std::string_view path, const Operand& operand, std::string_view allowed) {
    return unsupported(fmt::format("cuda has no kernel for recipe {}: {} is {}, {} allowed", recipe.name, path,
                                   described(operand), allowed));
  };
  constexpr std::string_view kTokens = "bf16, or a format with scales of blocks, rounded to nearest,";
  constexpr std::string_view kWeights = "bf16, or a format that is static or has scales of 32 keys,";
  if (!exact_in_bf16(recipe.s.left)) return refused("s.left", recipe.s.left, kTokens);
  if (!exact_in_bf16(recipe.s.right)) return refused("s.right", recipe.s.right, kTokens);
  if (!exact_in_bf16(recipe.o.tokens)) return refused("o.tokens", recipe.o.tokens, kTokens);
  if (!exact_weights(recipe.o.weights)) return refused("o.weights", recipe.o.weights, kWeights);
  if (!recipe.o.cut) return {};
  if (!exact_in_bf16(recipe.o.cut->tokens)) return refused("o.cut.tokens", recipe.o.cut->tokens, kTokens);
  if (!exact_weights(recipe.o.cut->weights)) return refused("o.cut.weights", recipe.o.cut->weights, kWeights);
  return {};
}

WeightRule weight_rule(const Operand& weights, int beta) {
  WeightRule rule;
  if (weights.encoding == Encoding::bf16) {
    constexpr int kBf16Mantissa = 7;
    constexpr int kBf16Least = -126;
    rule.to = round_to(kBf16Mantissa, kBf16Least, 2.0F);  // No weight is above 1.
    return rule;
  }
  const Format format = *element_format(weights.encoding);
  const FormatSpec spec = spec_of(format);
  rule.to = round_to(format);
  rule.smallest_normal = detail::pow2(1 - spec.bias);
  if (is_static(weights)) {
    rule.log2_beta = static_cast<float>(std::countr_zero(static_cast<unsigned>(beta)));
    return rule;
  }
  rule.in_groups = 1;
  rule.group_limit = group_limit(format, weights.rule);
  rule.group_offset = static_cast<float>(scale_exponent(format, weights.rule, 1.0F));
  return rule;
}

EmbeddedTables embedded_tables(void* workspace, const Layout& layout, const Recipe& recipe) {
  const Placer place{static_cast<std::byte*>(workspace)};
  EmbeddedTables tables;
  place(tables.queries, layout.embedded_queries);
  place(tables.query_factor, layout.embedded_query_factor);
  place(tables.keys, layout.embedded_keys);
  tables.kinds = tile_kinds(recipe);
  for (int kind = 0; kind < tables.kinds; ++kind) {
    const WeightPair pair = kind == kCutTiles ? *recipe.o.cut : WeightPair{recipe.o.weights, recipe.o.tokens};
    TileKind& out = tables.kind[kind];
    place(out.values, layout.embedded_values[kind]);
    place(out.keys, layout.embedded_about[kind]);
    place(out.heights, layout.embedded_heights[kind]);
    out.rule = weight_rule(pair.weights, recipe.beta);
    out.folds = pair.tokens.folds() ? 1 : 0;
  }
  return tables;
}

EmbeddedOperand embedded_operand(const Operand& operand, Table table, const Source& source) {
  EmbeddedOperand out;
  out.source = source;
  out.operand = operand;
  out.table = table;
  out.quantized = operand.quantized() ? 1 : 0;
  if (operand.quantized()) out.to = round_to(*element_format(operand.encoding));
  out.folds = operand.folds() ? 1 : 0;
  out.of_queries = table == Table::queries ? 1 : 0;
  out.over_dims = table == Table::queries || table == Table::keys ? 1 : 0;
  return out;
}

void set_shape(EmbeddedOperand& operand, const Sizes& sizes, bool of_values) {
  operand.heads = operand.of_queries != 0 ? sizes.heads : sizes.kv_heads;
  operand.dims = of_values ? sizes.value_dim : sizes.head_dim;
  operand.padded = of_values ? sizes.value_parts * sizes.value_dims : sizes.key_dims;
}

EmbedQuantizeArguments embed_quantize_arguments(const QuantizeArguments& codes, const Recipe& recipe,
                                                const EmbeddedTables& tables) {
  EmbedQuantizeArguments out{codes.sizes, codes.workspace, tables, nullptr, 0, 0, {}};
  const auto add = [&](EmbeddedOperand operand) {
    set_shape(operand, codes.sizes, operand.over_dims == 0);
    operand.rotation_shift = operand.over_dims != 0 ? codes.rotation_shift : -1;
    out.operand[out.operands++] = operand;
  };
  add(embedded_operand(recipe.s.left, Table::queries, codes.q));
  add(embedded_operand(recipe.s.right, Table::keys, codes.k));
  add(embedded_operand(recipe.o.tokens, Table::values, codes.v));
  if (recipe.o.cut) add(embedded_operand(recipe.o.cut->tokens, Table::cut_values, codes.v));
  return out;
}

}  // namespace mxflash::cuda
