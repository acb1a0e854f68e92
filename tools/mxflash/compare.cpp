// `mxflash compare`: whether two files hold the same tensors, bit for bit or within a tolerance.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <vector>

#include "accuracy.hpp"
#include "arguments.hpp"
#include "mxflash/safetensors.hpp"
#include "output.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

using Json = nlohmann::ordered_json;

struct CompareArguments {
  std::string a;
  std::string b;
  std::string tolerance;
  std::string json;
};

struct Comparison {
  std::string name;
  bool equal = false;      ///< Bit for bit.
  bool within = false;     ///< Equal, or within the tolerance.
  std::string difference;  ///< What keeps the tensors from being compared.
  std::optional<Accuracy> accuracy;
};

std::string type_and_shape(const Tensor& tensor) {
  return fmt::format("{} [{}]", name_of(tensor.dtype), fmt::join(tensor.shape, ", "));
}

Comparison compare(const std::string& name, const Tensor& a, const Tensor& b, double tolerance) {
  Comparison comparison{name, false, false, "", {}};
  if (a.dtype != b.dtype || a.shape != b.shape) {
    comparison.difference = fmt::format("{} in A, {} in B", type_and_shape(a), type_and_shape(b));
    return comparison;
  }
  comparison.equal = a.data == b.data;
  comparison.accuracy = measure(a, b);
  // Without a tolerance -0 is not 0: the bits decide.
  comparison.within = comparison.equal || comparison.accuracy->max_abs <= tolerance;
  return comparison;
}

std::vector<Comparison> compare_files(const TensorFile& a, const TensorFile& b, double tolerance) {
  std::set<std::string> names;
  for (const auto& entry : a.tensors) names.insert(entry.first);
  for (const auto& entry : b.tensors) names.insert(entry.first);
  std::vector<Comparison> comparisons;
  for (const std::string& name : names) {
    const auto in_a = a.tensors.find(name);
    const auto in_b = b.tensors.find(name);
    if (in_a != a.tensors.end() && in_b != b.tensors.end()) {
      comparisons.push_back(compare(name, in_a->second, in_b->second, tolerance));
    } else {
      comparisons.push_back({name, false, false, in_a != a.tensors.end() ? "only in A" : "only in B", {}});
    }
  }
  return comparisons;
}

bool all_within(const std::vector<Comparison>& comparisons) {
  return std::ranges::all_of(comparisons, [](const Comparison& comparison) { return comparison.within; });
}

Json compare_json(const CompareArguments& arguments, const std::vector<Comparison>& comparisons) {
  Json json = {{"version", MXFLASH_VERSION},
               {"a", arguments.a},
               {"b", arguments.b},
               {"equal", true},
               {"within_tolerance", all_within(comparisons)},
               {"tensors", Json::array()}};
  for (const Comparison& comparison : comparisons) {
    if (!comparison.equal) json["equal"] = false;
    Json entry = {{"name", comparison.name}, {"equal", comparison.equal}, {"difference", nullptr}};
    if (!comparison.difference.empty()) entry["difference"] = comparison.difference;
    if (comparison.accuracy) entry.update(accuracy_json(*comparison.accuracy));
    json["tensors"].push_back(entry);
  }
  return json;
}

std::string worst_text(const Accuracy& accuracy) {
  if (accuracy.worst.empty()) return "";
  return fmt::format("[{}] {:.9g} against {:.9g}", fmt::join(accuracy.worst, ","), accuracy.got, accuracy.want);
}

void print_comparisons(const std::vector<Comparison>& comparisons) {
  Table table{
      {"tensor", "bits", "cosine", "relative L2", "max abs", "worst"}, {}, {true, true, false, false, false, true}};
  for (const Comparison& comparison : comparisons) {
    std::vector<std::string> row = {comparison.name, comparison.equal ? "equal" : "differ"};
    if (comparison.accuracy) {
      const Accuracy& accuracy = *comparison.accuracy;
      row.insert(row.end(), {accuracy.cosine ? show(*accuracy.cosine, 6) : "-", show_small(accuracy.relative_l2),
                             show_small(accuracy.max_abs), worst_text(accuracy)});
    } else {
      row.insert(row.end(), {"-", "-", "-", comparison.difference});
    }
    table.rows.push_back(row);
  }
  print(table);
}

Result<Outcome> compare_verb(const CompareArguments& arguments) {
  Result<double> tolerance = arguments.tolerance.empty() ? -1.0 : parse_number("--tolerance", arguments.tolerance);
  if (!tolerance) return tolerance.error();
  if (!arguments.tolerance.empty() && *tolerance < 0) {
    return invalid(fmt::format("--tolerance: {} given, a number from 0 allowed", arguments.tolerance));
  }
  const std::array inputs = {arguments.a, arguments.b};
  if (const Status status = check_json_output(arguments.json, inputs); !status) return status.error();
  const Result<TensorFile> a = read_safetensors(arguments.a);
  if (!a) return a.error();
  const Result<TensorFile> b = read_safetensors(arguments.b);
  if (!b) return b.error();
  const std::vector<Comparison> comparisons = compare_files(*a, *b, *tolerance);
  if (const Status status = write_json(arguments.json, compare_json(arguments, comparisons)); !status) {
    return status.error();
  }
  if (wants_table(arguments.json)) print_comparisons(comparisons);
  return all_within(comparisons) ? Outcome::done : Outcome::check_failed;
}

}  // namespace

void add_compare(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<CompareArguments>();
  CLI::App* verb = app.add_subcommand(
      "compare", "Compare two files tensor by tensor; exit 1 unless names, types, shapes and all bits are equal");
  verb->add_option("A", arguments->a, "safetensors file")->required()->type_name("");
  verb->add_option("B", arguments->b, "safetensors file that A is measured against")->required()->type_name("");
  verb->add_option("--tolerance", arguments->tolerance, "Let values differ by at most X (NaN and Inf have to agree)")
      ->type_name("X");
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return compare_verb(*arguments); }; });
}

}  // namespace mxflash::tool
