// Enumerators and the words that spell them, as tables; quoting of what a user gave.
#pragma once

#include <fmt/format.h>

#include <array>
#include <string>
#include <string_view>

#include "mxflash/recipe.hpp"

namespace mxflash::names {

template <class Value>
struct Word {
  Value value;
  std::string_view text;
};

inline constexpr auto kEncodings = std::to_array<Word<Encoding>>({{Encoding::f32, "f32"},
                                                                  {Encoding::bf16, "bf16"},
                                                                  {Encoding::e4m3, "e4m3"},
                                                                  {Encoding::e5m2, "e5m2"},
                                                                  {Encoding::e2m3, "e2m3"},
                                                                  {Encoding::e3m2, "e3m2"},
                                                                  {Encoding::e2m1, "e2m1"},
                                                                  {Encoding::nvfp4, "nvfp4"}});
/// The first word of a value is the one it is printed as.
inline constexpr auto kBlocks = std::to_array<Word<Block>>({{Block::token(), "token"},
                                                            {Block::tokens32(), "tokens:32"},
                                                            {Block::dims16(), "dims:16"},
                                                            {Block::dims32(), "dims:32"},
                                                            {Block::channel16(), "channel:16"},
                                                            {Block::channel32(), "channel:32"},
                                                            {Block::square32(), "square:32"},
                                                            {Block::tensor(), "tensor"},
                                                            {Block::tensor(), "static"}});
inline constexpr auto kScaleRules =
    std::to_array<Word<ScaleRule>>({{ScaleRule::floor, "floor"}, {ScaleRule::ceil, "ceil"}, {ScaleRule::uos, "uos"}});
inline constexpr auto kRoundings =
    std::to_array<Word<Rounding>>({{Rounding::nearest, "nearest"}, {Rounding::stochastic, "stochastic"}});
inline constexpr auto kSecondLevels =
    std::to_array<Word<SecondLevel>>({{SecondLevel::fixed, "fixed"}, {SecondLevel::adaptive, "adaptive"}});
inline constexpr auto kCausalities = std::to_array<Word<Causality>>(
    {{Causality::exact, "exact"}, {Causality::block, "block"}, {Causality::leaks, "leaks"}});
inline constexpr auto kPurposes = std::to_array<Word<Purpose>>(
    {{Purpose::training, "training"}, {Purpose::inference, "inference"}, {Purpose::negative, "negative"}});
inline constexpr auto kHadamards = std::to_array<Word<Hadamard>>(
    {{Hadamard::off, "off"}, {Hadamard::at_128, "at_128"}, {Hadamard::required, "required"}});
inline constexpr auto kExponentials = std::to_array<Word<Exponential>>(
    {{Exponential::exact, "exact"}, {Exponential::mitchell, "mitchell"}, {Exponential::schraudolph, "schraudolph"}});
inline constexpr auto kRowSums =
    std::to_array<Word<RowSum>>({{RowSum::quantized, "quantized"}, {RowSum::unquantized, "unquantized"}});
inline constexpr auto kDqAccumulations =
    std::to_array<Word<DqAccumulation>>({{DqAccumulation::f32, "f32"},
                                         {DqAccumulation::f16_sequence, "f16_sequence"},
                                         {DqAccumulation::f16_causal, "f16_causal"}});

/// In quotes on one line, control characters escaped, shortened when long.
inline std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  return text.size() <= kLongest ? fmt::format("{:?}", text) : fmt::format("{:?}...", text.substr(0, kLongest));
}

/// Empty for a value outside the enumeration.
template <class Table, class Value>
std::string_view word_of(const Table& table, const Value& value) {
  for (const auto& word : table) {
    if (word.value == value) return word.text;
  }
  return {};
}

template <class Table>
std::string all_words(const Table& table) {
  std::string words;
  for (const auto& word : table) words.append(words.empty() ? "" : ", ").append(word.text);
  return words;
}

/// `what` names the argument or the field.
template <class Value, std::size_t count>
Result<Value> parse(const std::array<Word<Value>, count>& table, std::string_view what, std::string_view text) {
  for (const auto& word : table) {
    if (word.text == text) return word.value;
  }
  return invalid(fmt::format("{} is {}; allowed: {}", what, quoted(text), all_words(table)));
}

}  // namespace mxflash::names
