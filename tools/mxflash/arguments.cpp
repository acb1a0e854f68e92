#include "arguments.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "mxflash/packing.hpp"

namespace mxflash::tool {

namespace {

constexpr std::int64_t kMostThreads = 4096;
constexpr std::uintmax_t kMostRecipeBytes = 1U << 20U;

Result<std::int64_t> parse_bound(std::string_view text) {
  if (text == "inf") return Mask::unbounded;
  const Result<std::int64_t> bound = parse_integer("--window", text, {INT32_MIN, INT64_MAX});
  if (!bound)
    return invalid(fmt::format("--window: bound '{}' given, an integer from {} or inf allowed", text, INT32_MIN));
  return std::min(*bound, Mask::unbounded);
}

bool ends_with_json(std::string_view text) { return text.ends_with(".json"); }

Result<std::string> read_recipe_text(const std::string& path) {
  std::error_code code;
  if (!std::filesystem::is_regular_file(path, code)) {
    return io_error(fmt::format("--recipe: {} given, no such file; a recipe's name or its JSON file allowed", path));
  }
  const std::uintmax_t bytes = std::filesystem::file_size(path, code);
  if (code || bytes > kMostRecipeBytes) {
    return io_error(fmt::format("--recipe: {} of {} bytes given, at most {} allowed", path, bytes, kMostRecipeBytes));
  }
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) return io_error(fmt::format("--recipe: {} given, which cannot be read", path));
  return text.str();
}

}  // namespace

Result<std::int64_t> parse_integer(std::string_view argument, std::string_view text, Range range) {
  std::int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || value < range.least || value > range.most) {
    return invalid(
        fmt::format("{}: '{}' given, an integer from {} to {} allowed", argument, text, range.least, range.most));
  }
  return value;
}

Result<double> parse_number(std::string_view argument, std::string_view text) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return invalid(fmt::format("{}: '{}' given, a finite number allowed", argument, text));
  }
  return value;
}

Result<std::uint64_t> parse_seed(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size()) {
    return invalid(fmt::format("--seed: '{}' given, an integer from 0 to {} allowed", text, UINT64_MAX));
  }
  return value;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  if (text.empty()) return parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

void add_engine_options(CLI::App& verb, EngineArguments& arguments) {
  verb.add_option("--engine", arguments.engine, "Engine by name (`mxflash engines` lists them), or auto: the best here")
      ->type_name("NAME")
      ->capture_default_str();
  verb.add_option("--threads", arguments.threads, "Threads, 0 for one a core")->type_name("N")->capture_default_str();
  verb.add_option("--seed", arguments.seed, "Seed of everything random: same seed, same bits")
      ->type_name("N")
      ->capture_default_str();
}

void refuse_empty(CLI::Option& option) {
  option.check(CLI::Validator(
      [](const std::string& text) { return text.empty() ? std::string("'' given, a value allowed") : std::string(); },
      ""));
}

void add_json_option(CLI::App& verb, std::string& json) {
  CLI::Option* option =
      verb.add_option("--json", json,
                      "Write the results as JSON to FILE, or to standard output (-) instead of the table")
          ->type_name("FILE|-");
  refuse_empty(*option);
}

Result<Options> make_options(const EngineArguments& arguments) {
  const Result<std::int64_t> threads = parse_integer("--threads", arguments.threads, {0, kMostThreads});
  if (!threads) return threads.error();
  const Result<std::uint64_t> seed = parse_seed(arguments.seed);
  if (!seed) return seed.error();
  Options options;
  options.engine = arguments.engine;
  options.threads = static_cast<int>(*threads);
  options.seed = *seed;
  return options;
}

Result<Recipe> load_recipe(const std::string& name_or_path) {
  Result<Recipe> known = find_recipe(name_or_path);
  std::error_code code;
  if (known || (!ends_with_json(name_or_path) && !std::filesystem::exists(name_or_path, code))) return known;
  const Result<std::string> text = read_recipe_text(name_or_path);
  if (!text) return text.error();
  Result<Recipe> recipe = recipe_from_json(*text);
  if (!recipe) return Error{recipe.error().kind, fmt::format("--recipe {}: {}", name_or_path, recipe.error().message)};
  return recipe;
}

Result<Mask> make_mask(bool causal, const std::string& window) {
  Mask mask = causal ? Mask::causal() : Mask::full();
  if (window.empty()) return mask;
  const std::vector<std::string> bounds = split(window, ',');
  if (bounds.size() != 2) {
    return invalid(fmt::format("--window: '{}' given, L,R allowed (integers, or inf for no bound)", window));
  }
  const Result<std::int64_t> left = parse_bound(bounds[0]);
  if (!left) return left.error();
  const Result<std::int64_t> right = parse_bound(bounds[1]);
  if (!right) return right.error();
  return Mask::window(*left, std::min(*right, mask.right));
}

Status check_output(std::string_view argument, const std::string& path, std::span<const std::string> inputs) {
  namespace fs = std::filesystem;
  std::error_code code;
  if (path.empty() || path == "-")
    return invalid(fmt::format("{}: '{}' given, the path of a file allowed", argument, path));
  if (fs::is_directory(path, code)) {
    return io_error(fmt::format("{}: {} given, which is a directory; the path of a file allowed", argument, path));
  }
  const fs::path parent = fs::path(path).parent_path().empty() ? fs::path(".") : fs::path(path).parent_path();
  if (!fs::is_directory(parent, code)) {
    return io_error(
        fmt::format("{}: {} given, an existing directory allowed ({} is none)", argument, path, parent.string()));
  }
  if (access(parent.c_str(), W_OK | X_OK) != 0) {
    return io_error(
        fmt::format("{}: {} given, a writable directory allowed ({} is not)", argument, path, parent.string()));
  }
  for (const std::string& input : inputs) {
    if (fs::equivalent(path, input, code) && !code) {
      return invalid(fmt::format("{}: {} given, which is also an input; another file allowed", argument, path));
    }
  }
  return {};
}

Status check_json_output(const std::string& path, std::span<const std::string> inputs) {
  if (path.empty() || path == "-") return {};
  return check_output("--json", path, inputs);
}

}  // namespace mxflash::tool
