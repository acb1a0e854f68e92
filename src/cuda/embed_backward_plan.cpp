#include "cuda/embed_backward_plan.hpp"

#include <fmt/format.h>

#include <string_view>
#include <vector>

#include "cuda/embed_plan.hpp"
#include "cuda/plan.hpp"
#include "quantize/scales.hpp"

namespace mxflash::cuda {
namespace {

/// As of the forward, but rounded in any way and with a second level.
bool exact_tokens(const Operand& tokens) {
  return tokens.encoding == Encoding::bf16 || (tokens.quantized() && tokens.block != Block::tensor());
}

bool exact_weights(const Operand& weights) { return weights.encoding == Encoding::bf16 || weights.quantized(); }

/// An operand of the backward by its path in a recipe.
struct Named {
  std::string_view path;
  const Operand* operand;
};

GradientRule rule_of(const Operand& operand) {
  if (!operand.quantized()) return {operand, {}, 0};
  return {operand, round_to(*element_format(operand.encoding)), 1};
}

GradientWeights weights_of(const TokenProduct& product, Stream stream, std::uint64_t later = 0) {
  GradientWeights out;
  out.rule[kWholeTiles] = rule_of(product.weights);
  if (product.cut) out.rule[kCutTiles] = rule_of(product.cut->weights);
  out.kinds = product.cut ? 2 : 1;
  out.stream = static_cast<std::uint64_t>(stream) + later;
  return out;
}

/// As shares_codes of the reference's weights.
bool shares_codes(const Recipe& recipe) {
  const Operand& ds = recipe.dq.weights;
  return ds == recipe.dk.weights && ds.quantized() && ds.encoding != Encoding::nvfp4 && !recipe.dq.cut &&
         !recipe.dk.cut && ds.block.columns == 32;
}

GradientTables tables_at(void* workspace, const GradientLayout& layout) {
  const Placer place{static_cast<std::byte*>(workspace)};
  const auto table = [&](TokenTable& out, const std::size_t(&offsets)[2]) {
    place(out.values, offsets[0]);
    place(out.about, offsets[1]);
  };
  GradientTables tables;
  table(tables.dout_rows, layout.dout_rows);
  table(tables.value_rows, layout.value_rows);
  table(tables.dout, layout.dout);
  for (int kind = 0; kind < kTileKinds; ++kind) table(tables.keys[kind], layout.keys[kind]);
  table(tables.queries, layout.queries);
  place(tables.dout_largest, layout.dout_largest);
  place(tables.rows, layout.rows);
  place(tables.dout_norms, layout.dout_norms);
  place(tables.key_bounds, layout.key_bounds);
  place(tables.document_bounds, layout.document_bounds);
  place(tables.dq, layout.dq);
  place(tables.dk, layout.dk);
  place(tables.dv, layout.dv);
  return tables;
}

EmbedQuantizeArguments quantize_arguments(const EmbedBackwardArguments& call, const GradientSources& sources,
                                          const Recipe& recipe) {
  EmbedQuantizeArguments out{call.sizes, call.saved, call.forward, call.offsets.q, call.seed, 0, {}};
  const auto add = [&](const Operand& operand, const TokenTable& to, const Source& source, Stream stream) {
    EmbeddedOperand& of = out.operand[out.operands++];
    const bool rotated = stream == Stream::k_dq || stream == Stream::q_dk;  // Of q and k.
    of = embedded_operand(operand, Table::apart, source);
    of.apart = to;
    of.stream = static_cast<std::uint64_t>(stream);
    of.of_queries = stream == Stream::v_dp || stream == Stream::k_dq ? 0 : 1;
    of.over_dims = stream == Stream::dout_dp || stream == Stream::v_dp ? 1 : 0;
    of.largest = stream == Stream::dout_dv ? call.tables.dout_largest : nullptr;
    of.rotation_shift = rotated ? call.rotation_shift : -1;
    set_shape(of, call.sizes, !rotated);
  };
  const GradientTables& tables = call.tables;
  add(recipe.dp.left, tables.dout_rows, sources.dout, Stream::dout_dp);
  add(recipe.dp.right, tables.value_rows, sources.v, Stream::v_dp);
  add(recipe.dv.tokens, tables.dout, sources.dout, Stream::dout_dv);
  add(recipe.dq.tokens, tables.keys[kWholeTiles], sources.k, Stream::k_dq);
  if (recipe.dq.cut) add(recipe.dq.cut->tokens, tables.keys[kCutTiles], sources.k, Stream::k_dq);
  add(recipe.dk.tokens, tables.queries, sources.q, Stream::q_dk);
  return out;
}

}  // namespace

Status embeds_backward(const Recipe& recipe) {
  if (Status status = embeds(recipe); !status.ok()) return status;
  const auto refused = [&recipe](std::string_view path, std::string_view given, std::string_view allowed) {
    return unsupported(fmt::format("cuda has no backward kernel for recipe {}: {} is {}, {} allowed", recipe.name, path,
                                   given, allowed));
  };
  if (recipe.exponential != Exponential::exact) return refused("exponential", "approximate", "exact");
  std::vector<Named> tokens{{"dp.left", &recipe.dp.left},
                            {"dp.right", &recipe.dp.right},
                            {"dv.tokens", &recipe.dv.tokens},
                            {"dq.tokens", &recipe.dq.tokens},
                            {"dk.tokens", &recipe.dk.tokens}};
  std::vector<Named> weights{
      {"dv.weights", &recipe.dv.weights}, {"dq.weights", &recipe.dq.weights}, {"dk.weights", &recipe.dk.weights}};
  if (recipe.dq.cut) {
    tokens.push_back({"dq.cut.tokens", &recipe.dq.cut->tokens});
    weights.push_back({"dq.cut.weights", &recipe.dq.cut->weights});
  }
  const auto described = [](const Operand& operand) {
    return fmt::format("{} {}", to_string(operand.encoding), to_string(operand.block));
  };
  for (const Named& named : tokens) {
    if (!exact_tokens(*named.operand)) {
      return refused(named.path, described(*named.operand), "bf16, or a format with scales of blocks,");
    }
  }
  for (const Named& named : weights) {
    if (!exact_weights(*named.operand)) return refused(named.path, described(*named.operand), "bf16 or a format");
  }
  return {};
}

GradientLayout plan_gradients(const Sizes& sizes, const Recipe& recipe) {
  Planner planner;
  const auto rows_q = static_cast<std::size_t>(sizes.tokens_q) * static_cast<std::size_t>(sizes.heads);
  const auto rows_k = static_cast<std::size_t>(sizes.tokens_k) * static_cast<std::size_t>(sizes.kv_heads);
  const auto key_dims = static_cast<std::size_t>(sizes.key_dims);
  const auto value_dims = static_cast<std::size_t>(sizes.value_parts) * static_cast<std::size_t>(sizes.value_dims);
  const auto take = [&](std::size_t(&table)[2], std::size_t rows, std::size_t dims) {
    table[0] = planner.take(rows * dims * sizeof(std::uint16_t));
    table[1] = planner.take(rows * sizeof(float));
  };
  GradientLayout layout;
  layout.control = planner.take(sizeof(Control));
  take(layout.dout_rows, rows_q, value_dims);
  take(layout.value_rows, rows_k, value_dims);
  take(layout.dout, rows_q, value_dims);
  take(layout.keys[kWholeTiles], rows_k, key_dims);
  if (recipe.dq.cut) take(layout.keys[kCutTiles], rows_k, key_dims);
  take(layout.queries, rows_q, key_dims);
  const std::size_t documents = static_cast<std::size_t>(sizes.heads) * static_cast<std::size_t>(sizes.documents);
  layout.dout_largest = planner.take(documents * sizeof(std::uint32_t));
  layout.rows = planner.take(rows_q * sizeof(GradientRow));
  if (recipe.dq_accumulation != DqAccumulation::f32) {
    layout.dout_norms = planner.take(rows_q * sizeof(float));
    layout.key_bounds = planner.take(rows_k * sizeof(KeyBound));
    layout.document_bounds = planner.take(documents * sizeof(QueryBounds));
  }
  layout.dq = planner.take(rows_q * key_dims * sizeof(float));
  layout.dk = planner.take(rows_k * key_dims * sizeof(float));
  layout.dv = planner.take(rows_k * value_dims * sizeof(float));
  layout.bytes = planner.end();
  return layout;
}

EmbedBackwardLaunches embed_backward_launches(const EmbedBackwardArguments& call, const GradientSources& sources,
                                              const Recipe& recipe, void* workspace) {
  const GradientLayout layout = plan_gradients(call.sizes, recipe);
  EmbedBackwardArguments backward = call;
  Placer{static_cast<std::byte*>(workspace)}(backward.control, layout.control);
  backward.tables = tables_at(workspace, layout);
  backward.dv_weights = weights_of(recipe.dv, Stream::none);
  backward.dq_weights = weights_of(recipe.dq, Stream::ds);
  // Roundings of the two products are independent, unless they have the same codes.
  backward.dk_weights = weights_of(recipe.dk, Stream::ds, shares_codes(recipe) ? 0 : 1);
  backward.shared_codes = shares_codes(recipe) ? 1 : 0;
  backward.dq_accumulation = recipe.dq_accumulation;
  backward.row_sum = recipe.row_sum;
  return {quantize_arguments(backward, sources, recipe), backward};
}

}  // namespace mxflash::cuda
