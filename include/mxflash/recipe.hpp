// A recipe says, as data, how every operand of the six products of attention is quantized. Engines read it; none of
// them knows a recipe by name.
//
//   S = Q K^T    contracts over dims      (q, k)
//   O = P V      contracts over keys      (p, v)
//   dP = dO V^T  contracts over dims      (dout, v)
//   dV = P^T dO  contracts over queries   (p, dout)
//   dQ = dS K    contracts over keys      (ds, k)
//   dK = dS^T Q  contracts over queries   (ds, q)
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mxflash/formats.hpp"
#include "mxflash/status.hpp"

namespace mxflash {

/// What an operand is stored as. nvfp4 is E2M1 with a UE4M3 scale; tensor-wide blocks take an FP32 scale; every other
/// block scale is an E8M0 power of two.
enum class Encoding : std::uint8_t { f32, bf16, e4m3, e5m2, e2m3, e3m2, e2m1, nvfp4 };

/// The element format of a quantized encoding; none for f32 and bf16.
constexpr std::optional<Format> element_format(Encoding encoding) {
  switch (encoding) {
    case Encoding::f32:
    case Encoding::bf16: return std::nullopt;
    case Encoding::e4m3: return Format::e4m3;
    case Encoding::e5m2: return Format::e5m2;
    case Encoding::e2m3: return Format::e2m3;
    case Encoding::e3m2: return Format::e3m2;
    case Encoding::e2m1:
    case Encoding::nvfp4: return Format::e2m1;
  }
  return std::nullopt;
}

/// The elements that share one scale: `rows` x `columns`, 0 standing for all of them. For q, k, v and dO a row is a
/// token and a column a dim; for P and dS a row is a query and a column a key.
struct Block {
  int rows = 1;
  int columns = 0;
  bool operator==(const Block&) const = default;

  static constexpr Block token() { return {1, 0}; }       ///< "token": one exponent a token (folds out of products).
  static constexpr Block tokens32() { return {32, 0}; }   ///< "tokens:32"
  static constexpr Block dims16() { return {1, 16}; }     ///< "dims:16" (of P, dS: 16 keys of one query)
  static constexpr Block dims32() { return {1, 32}; }     ///< "dims:32"
  static constexpr Block channel16() { return {16, 1}; }  ///< "channel:16": 16 tokens of one dim
  static constexpr Block channel32() { return {32, 1}; }  ///< "channel:32"
  static constexpr Block square32() { return {32, 32}; }  ///< "square:32"
  static constexpr Block tensor() { return {0, 0}; }      ///< "tensor"; of P: "static", no scale but beta
};

enum class Rounding : std::uint8_t { nearest, stochastic };

/// The second-level scale of nvfp4. `fixed` is 1; `adaptive` is a power of two that puts the largest block scale into
/// UE4M3's range, taken per row for blocks along a row and per 128 rows for blocks along a column.
enum class SecondLevel : std::uint8_t { fixed, adaptive };

struct Operand {
  Encoding encoding = Encoding::f32;
  Block block = Block::token();
  ScaleRule rule = ScaleRule::ceil;
  Rounding rounding = Rounding::nearest;
  SecondLevel second_level = SecondLevel::fixed;
  bool operator==(const Operand&) const = default;

  [[nodiscard]] bool quantized() const { return element_format(encoding).has_value(); }
  /// One power-of-two exponent over all dims: it factors out of products over dims and folds into P or dS in products
  /// over tokens.
  [[nodiscard]] bool folds() const { return quantized() && block.columns == 0 && block.rows != 0; }
};

/// A product over dims of two token operands.
struct DimProduct {
  Operand left;
  Operand right;
  bool operator==(const DimProduct&) const = default;
};

/// P or dS against a token operand.
struct WeightPair {
  Operand weights;
  Operand tokens;
  bool operator==(const WeightPair&) const = default;
};

/// A product over tokens; `cut` replaces both operands on the 32 x 32 tiles that the mask cuts, where a scale shared
/// along keys would leak.
struct TokenProduct {
  Operand weights;
  Operand tokens;
  std::optional<WeightPair> cut;
  bool operator==(const TokenProduct&) const = default;
};

enum class Purpose : std::uint8_t { training, inference, negative };
enum class Hadamard : std::uint8_t {
  off,
  at_128,    ///< On q and k when head_dim is 128.
  required,  ///< On q and k; other than power-of-two head_dim is refused.
};
enum class Exponential : std::uint8_t { exact, mitchell, schraudolph };
/// What normalizes a row: the sum of the weights that multiply V, or of those before quantization.
enum class RowSum : std::uint8_t { quantized, unquantized };
/// How dQ adds up over key tiles of 128: FP32, or FP16 after a power-of-two prescale from sequence-wide or from running
/// (causal) maxima.
enum class DqAccumulation : std::uint8_t { f32, f16_sequence, f16_causal };

/// How far a later token can reach: `exact`: earlier results stay bit-identical; `block`: a residue inside one block of
/// 32; `leaks`: further.
enum class Causality : std::uint8_t { exact, block, leaks };

struct Claims {
  Causality forward = Causality::exact;
  Causality backward = Causality::exact;
  bool operator==(const Claims&) const = default;
};

struct Recipe {
  std::string name;
  std::string summary;
  Purpose purpose = Purpose::training;
  Hadamard hadamard = Hadamard::off;
  Exponential exponential = Exponential::exact;
  RowSum row_sum = RowSum::quantized;
  /// P is stored as encode(beta 2^(t - m)); beta is a power of two. A statically scaled P needs beta 2^tau <= max,
  /// tau being how far an engine's row reference may lag behind the row's maximum.
  int beta = 1;
  int tau = 0;
  DqAccumulation dq_accumulation = DqAccumulation::f32;
  DimProduct s;
  TokenProduct o;
  DimProduct dp;
  TokenProduct dv;
  TokenProduct dq;
  TokenProduct dk;
  Claims claims;
  bool operator==(const Recipe&) const = default;
};

/// Every recipe this library ships, negatives last.
const std::vector<Recipe>& recipes();
/// By name; the error lists the names.
Result<Recipe> find_recipe(std::string_view name);

/// Names the broken rule: beta 2^tau above the maximum of P's format, a stochastic rounding in the forward, an
/// approximate exponential in training, a claim the scales cannot keep, ...
Status validate(const Recipe& recipe);
/// The strongest claims that the recipe's blocks allow.
Claims derive_claims(const Recipe& recipe);
/// Refuses inference recipes and negatives without a backward, by name.
Status validate_backward(const Recipe& recipe);
/// The recipe at another backward causality level: `exact` turns 32 x 32 scales of dS into one per query row and 32
/// keys; refused where an operand's own scale spans tokens.
Result<Recipe> with_causality(const Recipe& recipe, Causality level);

/// JSON with every field; from_json refuses unknown and missing fields by name, then validates.
std::string to_json(const Recipe& recipe);
Result<Recipe> recipe_from_json(std::string_view text);

/// Names as the command line and JSON spell them ("e4m3", "tokens:32", "ceil", ...); parse_* list what is allowed.
std::string to_string(Encoding encoding);
std::string to_string(const Block& block);
std::string to_string(ScaleRule rule);
std::string to_string(Rounding rounding);
std::string to_string(Causality level);
std::string to_string(Purpose purpose);
Result<Encoding> parse_encoding(std::string_view text);
Result<Block> parse_block(std::string_view text);
Result<ScaleRule> parse_scale_rule(std::string_view text);
Result<Rounding> parse_rounding(std::string_view text);
Result<Causality> parse_causality(std::string_view text);

}  // namespace mxflash
