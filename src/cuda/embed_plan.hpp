// From a recipe to what the embedded kernels read of it.
#pragma once

#include "cuda/embed.hpp"
#include "mxflash/status.hpp"

namespace mxflash::cuda {

/// Whether all operands of the recipe's forward are exact in BF16; the error names the one that is not.
Status embeds(const Recipe& recipe);

/// Kinds of tiles that have operands of their own.
constexpr int tile_kinds(const Recipe& recipe) { return recipe.o.cut ? 2 : 1; }

/// P on one kind of tile; precondition: `embeds` has agreed.
WeightRule weight_rule(const Operand& weights, int beta);

RoundTo round_to(Format format);

/// Without its shape.
EmbeddedOperand embedded_operand(const Operand& operand, Table table, const Source& source);
/// Heads and dims; `of_values`: of v or dO.
void set_shape(EmbeddedOperand& operand, const Sizes& sizes, bool of_values);

/// By address.
EmbeddedTables embedded_tables(void* workspace, const Layout& layout, const Recipe& recipe);

/// The operands of q, k and v, whose sources are those of `codes`.
EmbedQuantizeArguments embed_quantize_arguments(const QuantizeArguments& codes, const Recipe& recipe,
                                                const EmbeddedTables& tables);

}  // namespace mxflash::cuda
