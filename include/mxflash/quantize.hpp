// One token operand quantized: codes, scales and what they stand for.
#pragma once

#include <cstdint>
#include <vector>

#include "mxflash/packing.hpp"
#include "mxflash/recipe.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash {

/// Which side of the packing an operand's tokens follow.
enum class Side : std::uint8_t { query, key };

/// Everything that decides the codes besides the values.
struct QuantizeOptions {
  Operand operand;
  Side side = Side::query;
  /// Multiply each row by the Hadamard matrix (Sylvester order) and 2^-ceil(log2(dims)/2) first; power-of-two dims
  /// only.
  bool hadamard = false;
  /// Stochastic rounding: the bits of element (token in its document, head, dim) are random_bits(seed, stream, ...).
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

/// Blocks never cross a document or a head. A token with a NaN or Inf in any dim has codes 0 and is `poisoned`; it
/// takes no part in any shared scale.
struct Quantized {
  std::vector<std::int64_t> shape;  ///< [tokens, heads, dims]
  std::vector<std::uint8_t> codes;  ///< One a element, unpacked; empty for f32 and bf16.
  /// E8M0 or UE4M3 bytes [scale_rows, heads, scale_columns], documents one after the other; NaN code for blocks of a
  /// poisoned token alone. Empty for tensor-wide scales.
  std::vector<std::uint8_t> scales;
  std::vector<std::int64_t> scale_shape;
  float tensor_scale = 1.0F;  ///< FP32 scale of the "tensor" block.
  /// What a code stands for without the folding exponent: code for operands that fold, code x scale otherwise. [T,H,D]
  std::vector<float> values;
  /// Power of two of each token and head [T,H]: the folding exponent, or nvfp4's adaptive second level along a row;
  /// else 0.
  std::vector<std::int32_t> exponents;
  std::vector<std::uint8_t> poisoned;  ///< [T,H], 1 where the token has a NaN or Inf.
  [[nodiscard]] float dequantized(std::int64_t token, std::int64_t head, std::int64_t dim) const;
};

/// Refuses a block that does not fit the format, uos for other than E2M1, Hadamard on other than power-of-two dims.
Result<Quantized> quantize(const TensorView& tensor, const Packing& packing, const QuantizeOptions& options,
                           int threads);

}  // namespace mxflash
