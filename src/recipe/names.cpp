#include "recipe/names.hpp"

#include "mxflash/recipe.hpp"

namespace mxflash {

std::string to_string(Encoding encoding) { return std::string(names::word_of(names::kEncodings, encoding)); }

std::string to_string(const Block& block) {
  const std::string_view word = names::word_of(names::kBlocks, block);
  return word.empty() ? fmt::format("{}x{}", block.rows, block.columns) : std::string(word);
}

std::string to_string(ScaleRule rule) { return std::string(names::word_of(names::kScaleRules, rule)); }
std::string to_string(Rounding rounding) { return std::string(names::word_of(names::kRoundings, rounding)); }
std::string to_string(Causality level) { return std::string(names::word_of(names::kCausalities, level)); }
std::string to_string(Purpose purpose) { return std::string(names::word_of(names::kPurposes, purpose)); }

Result<Encoding> parse_encoding(std::string_view text) { return names::parse(names::kEncodings, "encoding", text); }
Result<Block> parse_block(std::string_view text) { return names::parse(names::kBlocks, "block", text); }
Result<ScaleRule> parse_scale_rule(std::string_view text) {
  return names::parse(names::kScaleRules, "scale rule", text);
}
Result<Rounding> parse_rounding(std::string_view text) { return names::parse(names::kRoundings, "rounding", text); }
Result<Causality> parse_causality(std::string_view text) {
  return names::parse(names::kCausalities, "causality", text);
}

}  // namespace mxflash
