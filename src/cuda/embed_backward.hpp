// The backward of embedded recipes: what its kernels hand to each other and what the host tells them. Plain data.
//
// quantize: dO for its two products, V for dP, K for dQ, Q for dK, to BF16 numbers.  rows: every row's reference, sum
// and D.  queries: dQ of 128 queries.  keys: dK and dV of 128 keys. Each of the three makes logits again.
#pragma once

#include "cuda/embed.hpp"

namespace mxflash::cuda {

/// How the weights of a product are quantized on one kind of tile.
struct GradientRule {
  Operand operand;
  RoundTo to;  ///< Of a format.
  std::int32_t quantized = 0;
};

/// Weights of a product over tokens, by kind of tile.
struct GradientWeights {
  GradientRule rule[kTileKinds];
  std::int32_t kinds = 1;
  std::uint64_t stream = 0;
};

/// What the weights of a row are made from.
struct alignas(8) GradientRow {
  float t = 0;         ///< RowReference.
  float s = 0;         ///< The same.
  float light = 0;     ///< The same.
  float sum = 0;       ///< Of the weights relative to s.
  float delta = 0;     ///< D. NaN: something that dS of the row depends on is.
  float dlse = 0;      ///< Apart: dP - D may be zero, and D - dLSE is rounded. NaN as `delta`.
  float prescale = 0;  ///< Of FP16 sums of dQ: an exponent.
};

/// Of a key or, as running maxima, of those up to it: |V|_2 of dP and |K|_inf of dQ.
struct alignas(8) KeyBound {
  float value = 0;
  float key = 0;
};

/// Bits of a document's largest |dO|_2 and |dLSE|.
struct QueryBounds {
  std::uint32_t dout = 0;
  std::uint32_t dlse = 0;
};

/// Token operands of the backward.
struct GradientTables {
  TokenTable dout_rows;         ///< Of dP.
  TokenTable value_rows;        ///< Of dP.
  TokenTable dout;              ///< Of dV.
  TokenTable keys[kTileKinds];  ///< Of dQ.
  TokenTable queries;           ///< Of dK.
  /// EmbeddedOperand::largest of dO in dV.
  std::uint32_t* dout_largest = nullptr;
  GradientRow* rows = nullptr;  ///< [heads, tokens_q]
  /// Of FP16 sums of dQ alone:
  float* dout_norms = nullptr;             ///< [heads, tokens_q]: |dO|_2 of dP
  KeyBound* key_bounds = nullptr;          ///< [kv_heads, tokens_k]: running maxima
  QueryBounds* document_bounds = nullptr;  ///< [heads, documents], zero before.
  float* dq = nullptr;                     ///< Sums [heads, tokens_q, key_dims]
  float* dk = nullptr;                     ///< [kv_heads, tokens_k, key_dims]
  float* dv = nullptr;                     ///< [kv_heads, tokens_k, value_parts * value_dims]
};

struct EmbedBackwardArguments {
  Sizes sizes;
  Control* control = nullptr;  ///< The backward's own; its status is that of `saved`.
  Offsets offsets;
  Band band;
  Workspace saved;         ///< Of the forward: the schedule and `forward`.
  EmbeddedTables forward;  ///< Its tables.
  GradientTables tables;
  GradientWeights dv_weights;
  GradientWeights dq_weights;
  GradientWeights dk_weights;
  std::int32_t shared_codes = 0;  ///< 1: dK takes the codes that dQ has.
  DqAccumulation dq_accumulation = DqAccumulation::f32;
  RowSum row_sum = RowSum::quantized;
  std::uint64_t seed = 0;
  float logit_scale = 0;             ///< As EmbedForwardArguments::logit_scale.
  float scale = 0;                   ///< The softmax scale with the rotation's factor.
  std::int32_t rotation_shift = -1;  ///< As QuantizeArguments::rotation_shift.
  const float* dlse = nullptr;
  std::int64_t dlse_token_stride = 0;
  std::int64_t dlse_head_stride = 0;
  DType dtype = DType::bf16;
  void* dq = nullptr;  ///< [tokens_q, heads, head_dim]
  void* dk = nullptr;  ///< [tokens_k, kv_heads, head_dim]
  void* dv = nullptr;  ///< [tokens_k, kv_heads, value_dim]
};

struct EmbedBackwardLaunches {
  EmbedQuantizeArguments quantize;
  EmbedBackwardArguments backward;
};

/// The tables, then all three kernels.
int launch_embed_backward(const EmbedBackwardLaunches& launches, void* stream);

}  // namespace mxflash::cuda
