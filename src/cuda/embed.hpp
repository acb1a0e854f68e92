// What the kernels of embedded recipes hand to each other and what the host tells them. A recipe is embedded when every
// operand of its forward is exact in BF16: its codes times their scales are then multiplied as BF16 numbers, and only
// the sums differ from the reference. Plain data, no CUDA: the tests read the tables back through it.
#pragma once

#include <cstdint>

#include "cuda/kernels.hpp"
#include "mxflash/recipe.hpp"

namespace mxflash::cuda {

/// Rounding of a magnitude to a format, as data: what decode(encode(x)) gives, without a code in between.
struct RoundTo {
  std::uint32_t least = 0;  ///< Bits of the smallest normal number: below it steps stay as they are.
  std::uint32_t step = 0;   ///< From the bits of an octave to those of the number that one step of it is the ulp of.
  float most = 0;           ///< At most 2^100.
};

/// At most `most`; a NaN stays one.
MXFLASH_HOST_DEVICE inline float saturated(float x, float most) {
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));  // The comparison would be two instructions.
  return x;
#else
  return x > most ? most : x;
#endif
}

/// Nearest, ties to even, saturating; a NaN stays one. Precondition: x >= 0.
MXFLASH_HOST_DEVICE inline float rounded_to(const RoundTo& to, float x) {
  x = saturated(x, to.most);
  std::uint32_t octave = detail::bits_of(x) & detail::kInfBits;
  octave = octave > to.least ? octave : to.least;
  const float unit = detail::float_of(octave + to.step);
  return (x + unit) - unit;
}

/// decode(encode_stochastic(x)): up where `random` is below the share of the step that x is past the number under it.
/// Preconditions: x >= 0, no NaN.
MXFLASH_HOST_DEVICE inline float rounded_by_chance(const RoundTo& to, float x, std::uint32_t random) {
  constexpr std::uint32_t kMantissa = 23U << 23;
  constexpr std::uint32_t kOne = 127U << 23;
  if (x >= to.most) return to.most;
  std::uint32_t octave = detail::bits_of(x) & detail::kInfBits;
  octave = octave > to.least ? octave : to.least;
  const std::uint32_t step = octave + to.step - kMantissa;
  const float steps = x * detail::float_of(2 * kOne - step);
  const auto kept = static_cast<float>(static_cast<std::int32_t>(steps));
  const auto share = static_cast<std::uint32_t>((steps - kept) * 0x1p32F);
  return (kept + (random < share ? 1.0F : 0.0F)) * detail::float_of(step);
}

/// How P is quantized on one kind of tile.
struct WeightRule {
  RoundTo to;
  std::int32_t in_groups = 0;  ///< 1: an exponent for each 32 keys of a row.
  float log2_beta = 0;         ///< Without groups: weights are rounded times 2^this.
  float smallest_normal = 0;   ///< 0: there are no light keys.
  /// Of groups: the exponent of a largest logit g is floor(g) + group_offset, one more where 2^(g - floor g) is above.
  float group_limit = 0;
  float group_offset = 0;
};

/// What a query or key has beside its row of BF16 numbers: they are to be multiplied by it. NaN: poisoned.
using TokenFactor = float;

/// A key as a tile of one kind meets it.
struct alignas(8) EmbeddedKey {
  TokenFactor factor = 0;  ///< Of K.
  float fold = 0;          ///< Exponent of V where V folds.
};

/// Whole tiles, and those that the mask cuts.
inline constexpr int kTileKinds = 2;
inline constexpr std::int32_t kWholeTiles = 0;
inline constexpr std::int32_t kCutTiles = 1;

/// Operands of one kind of tile.
struct TileKind {
  std::uint16_t* values = nullptr;  ///< BF16 [kv_heads, tokens_k, value_parts * value_dims]
  EmbeddedKey* keys = nullptr;      ///< [kv_heads, tokens_k]
  /// All of a key's V, of one that folds its codes, is below 2^height in magnitude. Inf: poisoned.
  float* heights = nullptr;  ///< [kv_heads, tokens_k]
  WeightRule rule;
  std::int32_t folds = 0;
};

/// Tables of BF16 numbers. Rows have no gaps: what a tile reads beyond its document counts as zeros.
struct EmbeddedTables {
  std::uint16_t* queries = nullptr;     ///< BF16 [heads, tokens_q, key_dims]
  TokenFactor* query_factor = nullptr;  ///< [heads, tokens_q]
  std::uint16_t* keys = nullptr;        ///< BF16 [kv_heads, tokens_k, key_dims]
  std::int32_t kinds = 1;               ///< 2: the recipe has `cut` operands.
  TileKind kind[kTileKinds];
};

/// BF16 numbers of a token operand of the backward, and what a token has beside them.
struct TokenTable {
  std::uint16_t* values = nullptr;  ///< BF16 [heads, tokens, padded]
  /// [heads, tokens]. Of products over dims a TokenFactor; of those over tokens the exponent that folds into their
  /// weights, 0 where none does. NaN: poisoned.
  float* about = nullptr;
};

/// Where a token operand goes: those of the forward have a place of their own, others take that in `apart`.
enum class Table : std::int32_t { queries, keys, values, cut_values, apart };

struct EmbeddedOperand {
  Source source;
  Operand operand;
  Table table = Table::queries;
  TokenTable apart;
  /// [heads, documents], zero before: the largest exponent that folds, plus 128, of tokens of queries; null where
  /// nobody asks.
  std::uint32_t* largest = nullptr;
  RoundTo to;                ///< Of a format.
  std::uint64_t stream = 0;  ///< Of random bits.
  std::int32_t of_queries = 0;
  std::int32_t over_dims = 0;  ///< In a product over dims: rows are stored relative to a power of two.
  std::int32_t quantized = 0;
  std::int32_t folds = 0;
  std::int32_t heads = 0;
  std::int32_t dims = 0;
  std::int32_t padded = 0;  ///< Row length of the table.
  std::int32_t rotation_shift = -1;
};

inline constexpr int kMostOperands = 6;

struct EmbedQuantizeArguments {
  Sizes sizes;
  Workspace workspace;
  EmbeddedTables tables;
  const std::int32_t* query_offsets = nullptr;
  std::uint64_t seed = 0;  ///< Of stochastic rounding.
  std::int32_t operands = 0;
  EmbeddedOperand operand[kMostOperands];
};

/// Values of token operands, and what a token has beside them.
int launch_embed_quantize(const EmbedQuantizeArguments& arguments, void* stream);

struct EmbedForwardArguments {
  Sizes sizes;
  Band band;
  Workspace workspace;
  EmbeddedTables tables;
  Exponential exponential = Exponential::exact;
  RowSum row_sum = RowSum::quantized;
  float logit_scale = 0;  ///< scale log2(e), with the rotation's factor.
  DType dtype = DType::bf16;
  void* o = nullptr;
  float* lse = nullptr;
};

int launch_embed_forward(const EmbedForwardArguments& arguments, void* stream);

}  // namespace mxflash::cuda
