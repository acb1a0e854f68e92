// What several verbs ask of their arguments. Every refusal names the argument, what was given and what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mxflash/attention.hpp"
#include "mxflash/recipe.hpp"

namespace mxflash::tool {

struct Range {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// The whole text is a decimal integer in the range.
Result<std::int64_t> parse_integer(std::string_view argument, std::string_view text, Range range);
/// The whole text is a finite decimal number.
Result<double> parse_number(std::string_view argument, std::string_view text);
Result<std::uint64_t> parse_seed(std::string_view text);
/// The parts between separators; an empty text has none.
std::vector<std::string> split(std::string_view text, char separator);

/// --engine, --threads and --seed. Numbers stay text until they are parsed here: the messages are ours.
struct EngineArguments {
  std::string engine = "auto";
  std::string threads = "0";
  std::string seed = "0";
};
void add_engine_options(CLI::App& verb, EngineArguments& arguments);
/// Refuses an empty value, such as an unset shell variable leaves.
void refuse_empty(CLI::Option& option);
void add_json_option(CLI::App& verb, std::string& json);
Result<Options> make_options(const EngineArguments& arguments);

/// A recipe of the catalogue by name, else one read from a JSON file.
Result<Recipe> load_recipe(const std::string& name_or_path);

/// `L,R`, each an integer or `inf`; an empty text is no window. With `causal` no query sees a later key in any case.
Result<Mask> make_mask(bool causal, const std::string& window);

/// Before long work starts: `path` is in an existing, writable directory, is no directory, and is none of the inputs.
Status check_output(std::string_view argument, const std::string& path, std::span<const std::string> inputs);
/// The same for --json, where empty means none and `-` standard output.
Status check_json_output(const std::string& path, std::span<const std::string> inputs);

}  // namespace mxflash::tool
