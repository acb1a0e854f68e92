#include "report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <span>
#include <string_view>

#include "arguments.hpp"
#include "embedded/plotly_js.hpp"
#include "embedded/report_css.hpp"
#include "embedded/report_html.hpp"
#include "embedded/report_js.hpp"
#include "mxflash/formats.hpp"
#include "mxflash/safetensors.hpp"
#include "mxflash/status.hpp"

namespace mxflash::tool {
namespace {

using nlohmann::json;

// ---- Results: only the fields below are read and passed on, so that the page holds nothing unexpected. ----

// Leaves name the type; a key that ends in "?" may be missing or null; an array holds any number of its one element.
const json& problem_schema() {
  static const json schema = {{"tokens", "number"},   {"documents", "number"}, {"heads", "number"},
                              {"kv_heads", "number"}, {"head_dim", "number"},  {"causal", "boolean"}};
  return schema;
}

const json& run_schema() {
  static const json accuracy = {{"cosine", "number"}, {"relative_l2", "number"}, {"max_abs", "number"}};
  static const json schema = {
      {"recipe", "string"},
      {"input", "string"},
      {"engine", {{"name", "string"}}},
      {"problem", problem_schema()},
      {"time_ms?", {{"quantize?", "number"}, {"forward?", "number"}, {"backward?", "number"}}},
      {"accuracy?", {{"o?", accuracy}, {"dq?", accuracy}, {"dk?", accuracy}, {"dv?", accuracy}}},
      {"row_sum?", {{"effective_mean", "number"}, {"effective_min", "number"}}},
      {"flushed?", {{"p?", "number"}, {"ds?", "number"}}},
      {"octaves?", {{"p?", json::array({"octave"})}, {"ds?", json::array({"octave"})}}}};
  return schema;
}

const json& audit_schema() {
  static const json summary = {
      {"leaks", "number"}, {"probes", "number"}, {"max_relative_change", "number"}, {"reach_tokens", "number"}};
  static const json example = {{"kind", "string"},     {"document", "number"},     {"head", "number"},
                               {"position", "number"}, {"perturbed", "number"},    {"tensor", "string"},
                               {"output", "string"},   {"perturbation", "string"}, {"change", "number"}};
  static const json recipe = {{"name", "string"},
                              {"claims", {{"forward", "string"}, {"backward", "string"}}},
                              {"forward", summary},
                              {"backward?", summary},
                              {"documents", summary},
                              {"row_sum_error?", "number"},
                              {"holds", "boolean"},
                              {"verdict?", "string"},
                              {"examples?", json::array({example})}};
  static const json schema = {{"input", "string"},
                              {"engine", {{"name", "string"}}},
                              {"problem", problem_schema()},
                              {"recipes", json::array({recipe})},
                              {"skipped?", json::array({{{"name", "string"}, {"reason", "string"}}})}};
  return schema;
}

const json& bench_schema() {
  static const json samples = {
      {"median_ms", "number"}, {"min_ms", "number"}, {"max_ms", "number"}, {"gflops_per_second", "number"}};
  static const json benchmark = {{"workload", "string"},
                                 {"recipe", "string"},
                                 {"engine", {{"name", "string"}}},
                                 {"problem", problem_schema()},
                                 {"check", {{"right", "boolean"}}},
                                 {"forward?", samples},
                                 {"backward?", samples}};
  static const json schema = {
      {"machine", {{"cpu", "string"}, {"clock_mhz", "string"}, {"cores", "number"}, {"compiler", "string"}}},
      {"method", {{"warmup", "number"}, {"repeats", "number"}, {"threads", "number"}}},
      {"benchmarks", json::array({benchmark})}};
  return schema;
}

Error wrong_type(const std::string& where, const json& given, std::string_view allowed) {
  return invalid(fmt::format("{}: {} given, {} allowed", where, given.type_name(), allowed));
}

Result<json> pick_leaf(const std::string& type, const json& value, const std::string& where) {
  // A NaN or an infinity is written as null.
  const auto is_number = [](const json& item) { return item.is_number() || item.is_null(); };
  if (type == "number") return is_number(value) ? Result<json>(value) : wrong_type(where, value, "a number");
  if (type == "string") return value.is_string() ? Result<json>(value) : wrong_type(where, value, "a string");
  if (type == "boolean") return value.is_boolean() ? Result<json>(value) : wrong_type(where, value, "true or false");
  const bool octave = value.is_array() && value.size() == 3 && std::ranges::all_of(value, is_number);
  return octave ? Result<json>(value) : wrong_type(where, value, "[octave, count, flushed]");
}

// NOLINTBEGIN(misc-no-recursion): as deep as the schema, whatever the file holds.
Result<json> pick(const json& schema, const json& value, const std::string& where);

Result<json> pick_array(const json& schema, const json& value, const std::string& where) {
  if (!value.is_array()) return wrong_type(where, value, "an array");
  json picked = json::array();
  for (std::size_t i = 0; i < value.size(); ++i) {
    Result<json> item = pick(schema[0], value[i], fmt::format("{}[{}]", where, i));
    if (!item) return item.error();
    picked.push_back(*std::move(item));
  }
  return picked;
}

Result<json> pick_object(const json& schema, const json& value, const std::string& where) {
  if (!value.is_object()) return wrong_type(where, value, "an object");
  json picked = json::object();
  for (const auto& [name, part] : schema.items()) {
    const bool optional = name.ends_with('?');
    const std::string key = optional ? name.substr(0, name.size() - 1) : name;
    const std::string place = where.empty() ? key : fmt::format("{}.{}", where, key);
    const auto found = value.find(key);
    if (optional && (found == value.end() || found->is_null())) continue;
    if (found == value.end()) return invalid(place + ": none given, one required");
    Result<json> item = pick(part, *found, place);
    if (!item) return item.error();
    picked[key] = *std::move(item);
  }
  return picked;
}

/// The part of `value` that `schema` names.
Result<json> pick(const json& schema, const json& value, const std::string& where) {
  if (schema.is_string()) return pick_leaf(schema.get<std::string>(), value, where);
  return schema.is_array() ? pick_array(schema, value, where) : pick_object(schema, value, where);
}
// NOLINTEND(misc-no-recursion)

Result<std::string> read_text(const std::string& path) {
  std::error_code code;
  if (!std::filesystem::exists(path, code)) return io_error(path + ": no such file given, an existing one allowed");
  if (std::filesystem::is_directory(path, code)) return io_error(path + ": a directory given, a JSON file allowed");
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad() || !file.is_open()) return io_error(path + ": an unreadable file given, a readable one allowed");
  return text;
}

/// What the page calls a kind of result, and how it is recognized.
struct Kind {
  const char* name;
  const char* mark;  // a key that only this verb writes
  const json& (*schema)();
};
constexpr std::array<Kind, 3> kKinds = {
    {{"runs", "recipe", run_schema}, {"audits", "recipes", audit_schema}, {"benches", "benchmarks", bench_schema}}};

struct Source {
  const char* kind;
  json result;
};

Result<Source> read_result(const std::string& path) {
  constexpr const char* kAllowed = "the JSON of `mxflash run --check`, `mxflash audit` or `mxflash bench` allowed";
  const Result<std::string> text = read_text(path);
  if (!text) return text.error();
  const json document = json::parse(*text, nullptr, false);
  if (document.is_discarded()) return invalid(fmt::format("{}: no valid JSON given, {}", path, kAllowed));
  const auto* const kind = std::ranges::find_if(kKinds, [&document](const Kind& candidate) {
    return document.is_object() && document.contains(candidate.mark) && document.contains("version");
  });
  if (kind == kKinds.end()) return invalid(fmt::format("{}: other JSON given, {}", path, kAllowed));
  Result<json> picked = pick(kind->schema(), document, "");
  if (!picked) return invalid(fmt::format("{}: {}", path, picked.error().message));
  json result = *std::move(picked);
  result["file"] = path;
  return Source{kind->name, std::move(result)};
}

// ---- Scale rules of E2M1 over one octave of block maxima. ----

constexpr int kBlockSize = 32;
using Block = std::array<float, kBlockSize>;

/// Blocks of normal values, each divided by its largest magnitude.
std::vector<Block> normal_blocks(std::size_t count) {
  std::vector<Block> blocks(count);
  for (std::size_t b = 0; b < count; ++b) {
    float largest = 0;
    for (std::size_t i = 0; i < kBlockSize; ++i) {
      const double uniform = 0x1p-32 * (random_bits(0, 0, b * kBlockSize + i) + 0.5);
      const double angle = 0x1p-32 * random_bits(0, 1, b * kBlockSize + i);
      const double normal = std::sqrt(-2 * std::log(uniform)) * std::cos(2 * std::numbers::pi * angle);
      blocks[b][i] = static_cast<float>(normal);
      largest = std::max(largest, std::abs(blocks[b][i]));
    }
    for (float& value : blocks[b]) value /= largest;
  }
  return blocks;
}

/// Squared error of `values` times `maximum` in E2M1 with the scale 2^exponent, against the sum of squares.
double relative_error(std::span<const float> values, float maximum, int exponent) {
  double error = 0;
  double energy = 0;
  for (const float value : values) {
    const float x = value * maximum;
    const float back = std::ldexp(decode(Format::e2m1, encode(Format::e2m1, std::ldexp(x, -exponent))), exponent);
    error += (double{x} - back) * (double{x} - back);
    energy += double{x} * x;
  }
  return error / energy;
}

struct ErrorKinds {
  double largest = 0;  // of the largest element alone
  double uniform = 0;  // of elements spread evenly from 0 to the maximum
  double normal = 0;   // mean over blocks of normal values
};

ErrorKinds errors_at(float maximum, int exponent, std::span<const float> even, std::span<const Block> blocks) {
  const std::array<float, 1> one = {1.0F};
  ErrorKinds errors{relative_error(one, maximum, exponent), relative_error(even, maximum, exponent), 0};
  for (const Block& block : blocks) errors.normal += relative_error(block, maximum, exponent);
  errors.normal /= static_cast<double>(blocks.size());
  return errors;
}

/// For each rule the errors at block maxima from 4 to 8, in units of the scale that fits 4 (2^0).
json compare_scale_rules() {
  constexpr int kSteps = 256;
  const std::vector<Block> blocks = normal_blocks(128);
  std::vector<float> even(1024);
  for (std::size_t i = 0; i < even.size(); ++i) {
    even[i] = (static_cast<float>(i) + 0.5F) / static_cast<float>(even.size());
  }
  json result = {{"threshold", uos_threshold(Format::e2m1)}, {"maxima", json::array()}};
  const std::array<std::pair<const char*, ScaleRule>, 3> rules = {
      {{"floor", ScaleRule::floor}, {"ceil", ScaleRule::ceil}, {"uos", ScaleRule::uos}}};
  for (int step = 0; step < kSteps; ++step) {
    const float maximum = 4.0F + 4.0F * static_cast<float>(step) / kSteps;
    // Every rule chooses one of these two scales.
    const std::array<ErrorKinds, 2> errors = {errors_at(maximum, 0, even, blocks), errors_at(maximum, 1, even, blocks)};
    result["maxima"].push_back(maximum);
    for (const auto& [name, rule] : rules) {
      const ErrorKinds& error = errors[scale_exponent(Format::e2m1, rule, maximum) == 0 ? 0 : 1];
      result["rules"][name]["largest"].push_back(error.largest);
      result["rules"][name]["uniform"].push_back(error.uniform);
      result["rules"][name]["normal"].push_back(error.normal);
    }
  }
  return result;
}

// ---- The page. ----

/// JSON that may stand inside a <script> element, whatever its strings hold.
std::string script_safe(const json& data) {
  const std::string text = data.dump(-1, ' ', true, json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for (const char character : text) {
    if (character == '<') {
      safe += "\\u003c";
    } else {
      safe += character;
    }
  }
  return safe;
}

/// Fills {{style}}, {{plotly}}, {{data}} and {{script}}, once each and in one pass: what is filled in is not searched.
std::string fill_template(std::string_view page, const std::string& data) {
  const std::array<std::pair<std::string_view, std::string_view>, 4> parts = {{{"{{style}}", embedded::report_css()},
                                                                               {"{{plotly}}", embedded::plotly_js()},
                                                                               {"{{data}}", data},
                                                                               {"{{script}}", embedded::report_js()}}};
  std::string filled;
  for (const auto& [marker, part] : parts) {
    const std::size_t at = page.find(marker);
    filled.append(page.substr(0, at)).append(part);
    page.remove_prefix(at + marker.size());
  }
  return filled.append(page);
}

Status write_report(const ReportArguments& arguments) {
  if (arguments.results.empty()) return invalid("RESULTS: none given, one JSON file or more allowed");
  if (Status status = check_output("--out", arguments.out, arguments.results); !status) return status;
  json data = {{"version", MXFLASH_VERSION},
               {"created", fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(std::time(nullptr)))},
               {"runs", json::array()},
               {"audits", json::array()},
               {"benches", json::array()}};
  int order = 0;
  for (const std::string& path : arguments.results) {
    Result<Source> source = read_result(path);
    if (!source) return source.error();
    source->result["order"] = order++;
    data[source->kind].push_back(std::move(source->result));
  }
  data["scale_rules"] = compare_scale_rules();
  const std::string page = fill_template(embedded::report_html(), script_safe(data));
  return write_file(arguments.out, std::as_bytes(std::span(page)));
}

}  // namespace

int run_report(const ReportArguments& arguments) {
  const Status status = write_report(arguments);
  if (status) return 0;
  std::string line = status.error().message;
  // One line, whatever the names of the files hold.
  std::ranges::replace_if(line, [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  fmt::print(stderr, "mxflash: {}\n", line);
  return 2;
}

}  // namespace mxflash::tool
