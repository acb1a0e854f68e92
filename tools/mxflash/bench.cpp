// `mxflash bench`: checks the answer, then times it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "accuracy.hpp"
#include "arguments.hpp"
#include "output.hpp"
#include "random_tensor.hpp"
#include "selection.hpp"
#include "threading/parallel.hpp"
#include "verbs.hpp"
#include "workloads.hpp"

namespace mxflash::tool {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = 1 << 20;
constexpr const char* kForwardFlops = "2 heads pairs (head_dim + value_dim)";
constexpr const char* kBackwardFlops = "2 heads pairs (3 head_dim + 2 value_dim)";

struct BenchArguments {
  std::string workload = "all";
  std::string recipes = "bf16,mxfp8";
  std::string tokens = "1024";
  std::string heads = "4";
  std::string kv_heads = "2";
  std::string head_dim = "128";
  std::string repeats = "3";
  std::string warmup = "1";
  bool forward_only = false;
  bool no_check = false;
  std::string check_pairs = "16777216";
  EngineArguments engine;
  std::string json;
};

struct Plan {
  std::vector<Workload> workloads;
  std::vector<Recipe> recipes;
  Options options;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  int repeats = 0;
  int warmup = 0;
  bool forward_only = false;
  bool check = true;
  std::int64_t check_pairs = 0;  ///< Pairs times query heads that the check covers at most.
};

/// Owns what `inputs` views.
struct Data {
  Problem problem;
  Tensor q, k, v, dout;
  Inputs inputs;
  std::int64_t pairs = 0;
};

struct Samples {
  std::vector<double> total_ms;     ///< Of whole calls, quantization included.
  std::vector<double> quantize_ms;  ///< What the engine reports of it.
  double flops = 0;
  bool on_device = false;  ///< By the device's clock.
};

/// What the truth is computed for: one document and one key/value head with its query heads. Nothing outside of it
/// enters its results, so a check of some items is exact for those.
struct Item {
  Document document;
  std::int64_t kv_head = 0;
  std::int64_t pairs = 0;  ///< Over its query heads.
};

/// What the check covers.
struct Coverage {
  std::int64_t items = 0, of_items = 0;
  std::int64_t pairs = 0, of_pairs = 0;
};

struct Measurement {
  std::string workload;
  std::string recipe;
  Selection engines;
  std::vector<std::int64_t> offsets;
  std::int64_t pairs = 0;
  std::optional<Accuracy> o, dq, dk, dv;
  double limit = 0;           ///< Of every relative L2 error.
  std::optional<bool> right;  ///< None: not checked.
  Coverage coverage;
  std::string no_backward;
  Samples forward;
  std::optional<Samples> backward;
};

Result<int> small(std::string_view argument, const std::string& text, Range range) {
  const Result<std::int64_t> value = parse_integer(argument, text, range);
  if (!value) return value.error();
  return static_cast<int>(*value);
}

Status parse_problem(const BenchArguments& arguments, Plan& plan) {
  const Result<std::int64_t> heads = parse_integer("--heads", arguments.heads, {1, 4096});
  if (!heads) return heads.error();
  const Result<std::int64_t> kv_heads = parse_integer("--kv-heads", arguments.kv_heads, {1, 4096});
  if (!kv_heads) return kv_heads.error();
  const Result<std::int64_t> head_dim = parse_integer("--head-dim", arguments.head_dim, {8, 256});
  if (!head_dim) return head_dim.error();
  const Result<std::int64_t> tokens = parse_integer("--tokens", arguments.tokens, {1, kMostTokens});
  if (!tokens) return tokens.error();
  Result<std::vector<Workload>> workloads = find_workloads(arguments.workload, *tokens);
  if (!workloads) return workloads.error();
  plan.heads = *heads;
  plan.kv_heads = *kv_heads;
  plan.head_dim = *head_dim;
  plan.workloads = *std::move(workloads);
  return {};
}

Result<Plan> make_plan(const BenchArguments& arguments) {
  Plan plan;
  if (const Status status = parse_problem(arguments, plan); !status) return status.error();
  const Result<int> repeats = small("--repeats", arguments.repeats, {1, 1000});
  if (!repeats) return repeats.error();
  const Result<int> warmup = small("--warmup", arguments.warmup, {0, 1000});
  if (!warmup) return warmup.error();
  const Result<std::int64_t> check_pairs =
      parse_integer("--check-pairs", arguments.check_pairs, {1, std::numeric_limits<std::int64_t>::max()});
  if (!check_pairs) return check_pairs.error();
  Result<Options> options = make_options(arguments.engine);
  if (!options) return options.error();
  for (const std::string& name : split(arguments.recipes, ',')) {
    Result<Recipe> recipe = load_recipe(name);
    if (!recipe) return recipe.error();
    plan.recipes.push_back(*std::move(recipe));
  }
  if (plan.recipes.empty()) return invalid("--recipe: '' given, names or JSON files separated by commas allowed");
  plan.options = *std::move(options);
  plan.repeats = *repeats;
  plan.warmup = *warmup;
  plan.forward_only = arguments.forward_only;
  plan.check = !arguments.no_check;
  plan.check_pairs = *check_pairs;
  return plan;
}

Result<std::unique_ptr<Data>> make_data(const Plan& plan, const Workload& workload) {
  std::vector<std::int32_t> offsets = {0};
  for (const std::int64_t length : workload.lengths)
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
  const std::int64_t tokens = offsets.back();
  const Result<Packing> packing = Packing::make(offsets, offsets, tokens, tokens);
  if (!packing) return packing.error();
  auto data = std::make_unique<Data>();
  data->problem.packing = *packing;
  for (const Document& document : packing->documents()) data->pairs += visible_pairs(document, data->problem.mask);
  const std::uint64_t seed = plan.options.seed;
  data->q = normal_tensor(DType::bf16, {tokens, plan.heads, plan.head_dim}, {seed, 0, {}});
  data->k = normal_tensor(DType::bf16, {tokens, plan.kv_heads, plan.head_dim}, {seed, 1, {}});
  data->v = normal_tensor(DType::bf16, {tokens, plan.kv_heads, plan.head_dim}, {seed, 2, {}});
  data->dout = normal_tensor(DType::bf16, {tokens, plan.heads, plan.head_dim}, {seed, 3, {}});
  const auto q = data->q.view("q");
  const auto k = data->k.view("k");
  const auto v = data->v.view("v");
  const auto dout = data->dout.view("do");
  data->inputs = {*q, *k, *v, *dout};
  return data;
}

/// Twice the unit roundoff of the coarsest operand: what an engine that computes the right thing stays below on normal
/// data, and a wrong mask, scale or transposition does not.
double error_limit(const Recipe& recipe) {
  int mantissa = 7;  // BF16, the type of the inputs
  for (const Operand& operand : {recipe.s.left, recipe.s.right, recipe.o.weights, recipe.o.tokens, recipe.dp.left,
                                 recipe.dp.right, recipe.dv.weights, recipe.dv.tokens, recipe.dq.weights,
                                 recipe.dq.tokens, recipe.dk.weights, recipe.dk.tokens}) {
    const std::optional<Format> format = element_format(operand.encoding);
    if (format) mantissa = std::min(mantissa, spec_of(*format).mantissa_bits);
  }
  return std::exp2(-mantissa);
}

bool within(const std::optional<Accuracy>& accuracy, double limit) {
  return !accuracy || (accuracy->cosine && accuracy->relative_l2 <= limit);
}

/// Every item where they fit into plan.check_pairs, else a part: all documents in turn, each time with another head,
/// from both ends of the heads inwards, as long as they fit; the first one always.
std::vector<Item> choose_items(const Plan& plan, const Data& data, Coverage& coverage) {
  const std::vector<Document>& documents = data.problem.packing.documents();
  std::vector<Item> items;
  for (std::int64_t round = 0; round < plan.kv_heads; ++round) {
    const std::int64_t from_end = round % 2 == 0 ? round / 2 : plan.kv_heads - 1 - round / 2;
    for (std::size_t i = 0; i < documents.size(); ++i) {
      const std::int64_t kv_head = (from_end + static_cast<std::int64_t>(i)) % plan.kv_heads;
      const std::int64_t pairs = visible_pairs(documents[i], data.problem.mask) * (plan.heads / plan.kv_heads);
      coverage.of_items += 1;
      coverage.of_pairs += pairs;
      if (!items.empty() && coverage.pairs + pairs > plan.check_pairs) continue;
      coverage.items += 1;
      coverage.pairs += pairs;
      items.push_back({documents[i], kv_head, pairs});
    }
  }
  return items;
}

/// Rows [begin, begin + tokens) of heads [head, head + heads).
struct Slice {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;
  std::int64_t head = 0;
  std::int64_t heads = 0;
};

Slice query_slice(const Plan& plan, const Item& item) {
  const std::int64_t group = plan.heads / plan.kv_heads;
  return {item.document.q_begin, item.document.q_length, item.kv_head * group, group};
}

Slice key_slice(const Item& item) { return {item.document.k_begin, item.document.k_length, item.kv_head, 1}; }

TensorView part(const TensorView& whole, const Slice& slice) {
  TensorView view = whole;
  view.data +=
      (slice.begin * whole.stride[0] + slice.head * whole.stride[1]) * static_cast<std::int64_t>(size_of(whole.dtype));
  view.shape = {slice.tokens, slice.heads, whole.shape[2]};
  return view;
}

struct Truth {
  Tensor o, dq, dk, dv;
};

Result<Truth> truth_of(const Plan& plan, const Data& data, const Item& item, bool backward) {
  const Slice queries = query_slice(plan, item);
  const Slice keys = key_slice(item);
  const Inputs inputs = {part(data.inputs.q, queries), part(data.inputs.k, keys), part(data.inputs.v, keys),
                         part(*data.inputs.dout, queries)};
  Problem problem = data.problem;
  problem.packing = Packing::single(queries.tokens, keys.tokens);
  Options options = plan.options;
  options.threads = 1;  // Items run side by side.
  Result<ForwardResult> forward = exact_forward(problem, inputs, options);
  if (!forward) return forward.error();
  Truth truth;
  truth.o = std::move(forward->o);
  if (!backward) return truth;
  Result<BackwardResult> gradients = exact_backward(problem, inputs, options);
  if (!gradients) return gradients.error();
  truth.dq = std::move(gradients->dq);
  truth.dk = std::move(gradients->dk);
  truth.dv = std::move(gradients->dv);
  return truth;
}

/// One output in all items as a whole, its worst place in the whole tensor's coordinates.
Accuracy measure_slices(const Tensor& got, const std::vector<Slice>& slices, const std::vector<const Tensor*>& truths) {
  const std::int64_t heads = got.shape[1];
  const std::int64_t dims = got.shape[2];
  std::vector<std::int64_t> places;  // Of each row in got.
  for (const Slice& slice : slices) {
    for (std::int64_t row = 0; row < slice.tokens * slice.heads; ++row) {
      places.push_back((slice.begin + row / slice.heads) * heads + slice.head + row % slice.heads);
    }
  }
  const auto rows = static_cast<std::int64_t>(places.size());
  Tensor got_rows = Tensor::zeros(DType::f32, {rows, dims});
  Tensor want_rows = Tensor::zeros(DType::f32, {rows, dims});
  for (std::int64_t i = 0; i < rows * dims; ++i) {
    got_rows.set(i, got.at(places[static_cast<std::size_t>(i / dims)] * dims + i % dims));
  }
  std::int64_t at = 0;
  for (const Tensor* truth : truths) {
    for (std::int64_t i = 0; i < truth->elements(); ++i) want_rows.set(at++, truth->at(i));
  }
  Accuracy accuracy = measure(got_rows, want_rows);
  if (!accuracy.worst.empty()) {
    const std::int64_t place = places[static_cast<std::size_t>(accuracy.worst[0])];
    accuracy.worst = {place / heads, place % heads, accuracy.worst[1]};
  }
  return accuracy;
}

Result<std::vector<Truth>> truths_of(const Plan& plan, const Data& data, const std::vector<Item>& items,
                                     bool backward) {
  std::vector<std::optional<Result<Truth>>> results(items.size());
  parallel_for(static_cast<std::int64_t>(items.size()), plan.options.threads, [&](std::int64_t i) {
    const auto place = static_cast<std::size_t>(i);
    results[place] = truth_of(plan, data, items[place], backward);
  });
  std::vector<Truth> truths;
  for (std::optional<Result<Truth>>& result : results) {
    if (!*result) return result->error();
    truths.push_back(**std::move(result));
  }
  return truths;
}

Status check_answer(const Plan& plan, const Recipe& recipe, const Data& data, Measurement& result) {
  const bool backward = result.no_backward.empty();
  const Result<ForwardResult> got = attention_forward(data.problem, recipe, data.inputs, plan.options);
  if (!got) return got.error();
  const std::vector<Item> items = choose_items(plan, data, result.coverage);
  const Result<std::vector<Truth>> truths = truths_of(plan, data, items, backward);
  if (!truths) return truths.error();
  std::vector<Slice> queries;
  std::vector<Slice> keys;
  for (const Item& item : items) {
    queries.push_back(query_slice(plan, item));
    keys.push_back(key_slice(item));
  }
  const auto accuracy = [&](const Tensor& tensor, const std::vector<Slice>& slices, Tensor Truth::* output) {
    std::vector<const Tensor*> wants;
    for (const Truth& truth : *truths) wants.push_back(&(truth.*output));
    return measure_slices(tensor, slices, wants);
  };
  result.o = accuracy(got->o, queries, &Truth::o);
  if (backward) {
    const Result<BackwardResult> gradients = attention_backward(data.problem, recipe, data.inputs, plan.options);
    if (!gradients) return gradients.error();
    result.dq = accuracy(gradients->dq, queries, &Truth::dq);
    result.dk = accuracy(gradients->dk, keys, &Truth::dk);
    result.dv = accuracy(gradients->dv, keys, &Truth::dv);
  }
  result.limit = error_limit(recipe);
  result.right = within(result.o, result.limit) && within(result.dq, result.limit) && within(result.dk, result.limit) &&
                 within(result.dv, result.limit);
  return {};
}

/// Times plan.repeats calls after plan.warmup more. `call` returns a Result with a timing.
template <class Call>
Result<Samples> time_calls(const Plan& plan, const Call& call) {
  Samples samples;
  for (int i = -plan.warmup; i < plan.repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto result = call();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    if (!result) return result.error();
    if (i < 0) continue;
    samples.on_device = result->timing.device_ms.has_value();
    samples.total_ms.push_back(result->timing.device_ms.value_or(elapsed.count()));
    samples.quantize_ms.push_back(result->timing.quantize_ms);
  }
  return samples;
}

Status time_answer(const Plan& plan, const Recipe& recipe, const Data& data, Measurement& result) {
  Result<Samples> forward =
      time_calls(plan, [&] { return attention_forward(data.problem, recipe, data.inputs, plan.options); });
  if (!forward) return forward.error();
  const auto work = 2.0 * static_cast<double>(plan.heads * data.pairs * plan.head_dim);
  forward->flops = 2 * work;
  result.forward = *std::move(forward);
  if (!result.no_backward.empty()) return {};
  Result<Samples> backward =
      time_calls(plan, [&] { return attention_backward(data.problem, recipe, data.inputs, plan.options); });
  if (!backward) return backward.error();
  backward->flops = 5 * work;
  result.backward = *std::move(backward);
  return {};
}

Result<Measurement> measure_one(const Plan& plan, const Workload& workload, const Recipe& recipe) {
  Measurement result;
  if (plan.forward_only) result.no_backward = "--forward-only was given";
  if (const Status backward = validate_backward(recipe); !backward) result.no_backward = backward.error().message;
  const Result<Selection> engines = select_engines(plan.options, recipe, result.no_backward.empty());
  if (!engines) return engines.error();
  result.engines = *engines;
  const Result<std::unique_ptr<Data>> data = make_data(plan, workload);
  if (!data) return data.error();
  result.workload = workload.name;
  result.recipe = recipe.name;
  result.pairs = (*data)->pairs;
  result.offsets = {0};
  for (const std::int64_t length : workload.lengths) result.offsets.push_back(result.offsets.back() + length);
  if (plan.check) {
    if (const Status status = check_answer(plan, recipe, **data, result); !status) return status.error();
    // A wrong answer has no speed.
    if (!*result.right) return result;
  }
  if (const Status status = time_answer(plan, recipe, **data, result); !status) return status.error();
  return result;
}

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Json samples_json(const Samples& samples) {
  if (samples.total_ms.empty()) return nullptr;
  const double middle = median(samples.total_ms);
  return {{"median_ms", middle},
          {"min_ms", *std::ranges::min_element(samples.total_ms)},
          {"max_ms", *std::ranges::max_element(samples.total_ms)},
          {"quantize_median_ms", median(samples.quantize_ms)},
          {"flops", samples.flops},
          {"gflops_per_second", samples.flops / middle / 1e6},
          {"clock", samples.on_device ? "device" : "host"},
          {"samples_ms", samples.total_ms}};
}

Json check_json(const Measurement& result) {
  if (!result.right) return {{"checked", false}, {"right", nullptr}};
  const Coverage& coverage = result.coverage;
  Json json = {{"checked", true},
               {"right", *result.right},
               {"relative_l2_limit", result.limit},
               {"against", "float64"},
               {"complete", coverage.items == coverage.of_items},
               {"document_heads", {{"checked", coverage.items}, {"of", coverage.of_items}}},
               {"pairs_times_heads", {{"checked", coverage.pairs}, {"of", coverage.of_pairs}}}};
  if (result.o) json["accuracy"]["o"] = accuracy_json(*result.o);
  if (result.dq) json["accuracy"]["dq"] = accuracy_json(*result.dq);
  if (result.dk) json["accuracy"]["dk"] = accuracy_json(*result.dk);
  if (result.dv) json["accuracy"]["dv"] = accuracy_json(*result.dv);
  return json;
}

Json measurement_json(const Plan& plan, const Measurement& result) {
  return {{"workload", result.workload},
          {"recipe", result.recipe},
          {"engine", selection_json(result.engines)},
          {"problem",
           {{"tokens", result.offsets.back()},
            {"documents", result.offsets.size() - 1},
            {"heads", plan.heads},
            {"kv_heads", plan.kv_heads},
            {"head_dim", plan.head_dim},
            {"value_dim", plan.head_dim},
            {"dtype", "BF16"},
            {"causal", true}}},
          {"cu_seqlens", result.offsets},
          {"pairs", result.pairs},
          {"check", check_json(result)},
          {"no_backward", result.no_backward.empty() ? Json() : Json(result.no_backward)},
          {"forward", samples_json(result.forward)},
          {"backward", result.backward ? samples_json(*result.backward) : Json()}};
}

/// The value of the first line `key : value` of a file under /proc; empty where there is none.
std::string proc_value(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

Json machine_json() {
  return {{"cpu", proc_value("/proc/cpuinfo", "model name")},
          {"clock_mhz", proc_value("/proc/cpuinfo", "cpu MHz")},
          {"cores", std::thread::hardware_concurrency()},
          {"compiler", __VERSION__}};
}

Json bench_json(const Plan& plan, const std::vector<Measurement>& results) {
  Json json = {{"version", MXFLASH_VERSION},
               {"machine", machine_json()},
               {"method",
                {{"clock",
                  "steady_clock around whole calls; of an engine on a device its events, without copies, and of its "
                  "backward without the forward before it, whose codes it takes"},
                 {"quantization_included", true},
                 {"warmup", plan.warmup},
                 {"repeats", plan.repeats},
                 {"threads", thread_count(plan.options.threads)},
                 {"seed", plan.options.seed},
                 {"flops_forward", kForwardFlops},
                 {"flops_backward", kBackwardFlops}}},
               {"benchmarks", Json::array()}};
  for (const Measurement& result : results) json["benchmarks"].push_back(measurement_json(plan, result));
  return json;
}

std::string lengths_text(const Measurement& result) {
  std::vector<double> lengths;
  for (std::size_t i = 1; i < result.offsets.size(); ++i) {
    lengths.push_back(static_cast<double>(result.offsets[i] - result.offsets[i - 1]));
  }
  return fmt::format("{} of {:.0f}..{:.0f}, median {:.0f}", lengths.size(), *std::ranges::min_element(lengths),
                     *std::ranges::max_element(lengths), median(lengths));
}

std::string time_text(const Samples& samples) {
  if (samples.total_ms.empty()) return "-";
  return fmt::format("{:.1f} ({:.1f}..{:.1f})", median(samples.total_ms), *std::ranges::min_element(samples.total_ms),
                     *std::ranges::max_element(samples.total_ms));
}

std::string answer_text(const Measurement& result) {
  if (!result.right) return "unchecked";
  const Coverage& coverage = result.coverage;
  std::string verdict = *result.right ? "right" : "WRONG";
  if (coverage.items == coverage.of_items) return verdict;
  return fmt::format("{} ({} of {} document-heads)", verdict, coverage.items, coverage.of_items);
}

std::string rate_text(const Samples& samples) { return show(samples.flops / median(samples.total_ms) / 1e6, 2); }

void print_bench(const Plan& plan, const std::vector<Measurement>& results) {
  const Json machine = machine_json();
  print_line(fmt::format("mxflash {} on {} ({} cores, {} MHz), {} threads, compiler {}", MXFLASH_VERSION,
                         machine["cpu"].get<std::string>(), machine["cores"].get<unsigned>(),
                         machine["clock_mhz"].get<std::string>(), thread_count(plan.options.threads), __VERSION__));
  print_line(fmt::format("q [{0}, {1}, {2}], k and v [{0}, {3}, {2}] BF16, causal; warm-up {4}, repeats {5}",
                         results.front().offsets.back(), plan.heads, plan.head_dim, plan.kv_heads, plan.warmup,
                         plan.repeats));
  print_line(fmt::format("milliseconds of whole calls, quantization included: median (least..most); answers {}",
                         plan.check ? "checked against float64" : "not checked"));
  print_line(fmt::format("FLOPs: forward {}, backward {}", kForwardFlops, kBackwardFlops));
  print_line("");
  Table table{
      {"workload", "documents", "recipe", "engine", "answer", "forward ms", "GFLOP/s", "backward ms", "GFLOP/s"},
      {},
      {true, true, true, true, true, false, false, false, false}};
  for (const Measurement& result : results) {
    const Samples backward = result.backward.value_or(Samples{});
    table.rows.push_back({result.workload, lengths_text(result), result.recipe, describe(result.engines),
                          answer_text(result), time_text(result.forward), rate_text(result.forward),
                          time_text(backward), rate_text(backward)});
  }
  print(table);
}

Result<Outcome> bench_verb(const BenchArguments& arguments) {
  const Result<Plan> plan = make_plan(arguments);
  if (!plan) return plan.error();
  if (const Status status = check_json_output(arguments.json, {}); !status) return status.error();
  const Progress bar = progress_bar("bench");
  const auto count = static_cast<double>(plan->workloads.size() * plan->recipes.size());
  std::vector<Measurement> results;
  for (const Workload& workload : plan->workloads) {
    for (const Recipe& recipe : plan->recipes) {
      if (bar) bar(static_cast<double>(results.size()) / count);
      Result<Measurement> result = measure_one(*plan, workload, recipe);
      if (!result) return result.error();
      results.push_back(*std::move(result));
    }
  }
  end_progress();
  if (const Status status = write_json(arguments.json, bench_json(*plan, results)); !status) return status.error();
  if (wants_table(arguments.json)) print_bench(*plan, results);
  const bool right =
      std::ranges::all_of(results, [](const Measurement& result) { return result.right.value_or(true); });
  return right ? Outcome::done : Outcome::check_failed;
}

std::string workload_help() {
  std::string text = "all, or names separated by commas:";
  for (const Workload& workload : workloads(1024)) text += fmt::format(" {} ({});", workload.name, workload.summary);
  return text + " or lengths such as 8192+32x256 (one document of 8192 tokens and 32 of 256)";
}

void add_size_options(CLI::App& verb, BenchArguments& arguments) {
  verb.add_option("--tokens", arguments.tokens, "Tokens of a named workload")->type_name("N")->capture_default_str();
  verb.add_option("--heads", arguments.heads, "Query heads")->type_name("N")->capture_default_str();
  verb.add_option("--kv-heads", arguments.kv_heads, "Key/value heads")->type_name("N")->capture_default_str();
  verb.add_option("--head-dim", arguments.head_dim, "Dims of q, k, v")->type_name("N")->capture_default_str();
  verb.add_option("--repeats", arguments.repeats, "Timed calls")->type_name("N")->capture_default_str();
  verb.add_option("--warmup", arguments.warmup, "Calls before them")->type_name("N")->capture_default_str();
}

void add_check_options(CLI::App& verb, BenchArguments& arguments) {
  CLI::Option* no_check = verb.add_flag("--no-check", arguments.no_check,
                                        "Time without a check, for a shape that an earlier call has checked; the JSON "
                                        "says so, and `mxflash report` refuses it");
  verb.add_option("--check-pairs", arguments.check_pairs,
                  "Query-key pairs times heads that the check covers at most; where the workload has more, it covers "
                  "some heads of each document, the others not at all, and says how many")
      ->type_name("N")
      ->capture_default_str()
      ->excludes(no_check);
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* verb = app.add_subcommand(
      "bench", "Check the answer against float64, then time it; exit 1 and no time where an answer is wrong");
  verb->add_option("--workload", arguments->workload, workload_help())->type_name("NAME|all")->capture_default_str();
  verb->add_option("--recipe", arguments->recipes, "Names or JSON files separated by commas")
      ->type_name("A,B")
      ->capture_default_str();
  add_size_options(*verb, *arguments);
  verb->add_flag("--forward-only", arguments->forward_only, "Leave the backward out");
  add_check_options(*verb, *arguments);
  add_engine_options(*verb, arguments->engine);
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return bench_verb(*arguments); }; });
}

}  // namespace mxflash::tool
