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
#include "mxflash/engine.hpp"
#include "output.hpp"
#include "random_tensor.hpp"
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
};

struct Measurement {
  std::string workload;
  std::string recipe;
  std::string engine;
  std::vector<std::int64_t> offsets;
  std::int64_t pairs = 0;
  std::optional<Accuracy> o, dq, dk, dv;
  double limit = 0;  ///< Of every relative L2 error.
  bool right = false;
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

Status check_answer(const Plan& plan, const Recipe& recipe, const Data& data, Measurement& result) {
  const Result<ForwardResult> got = attention_forward(data.problem, recipe, data.inputs, plan.options);
  if (!got) return got.error();
  const Result<ForwardResult> want = exact_forward(data.problem, data.inputs, plan.options);
  if (!want) return want.error();
  result.o = measure(got->o, want->o);
  if (result.no_backward.empty()) {
    const Result<BackwardResult> gradients = attention_backward(data.problem, recipe, data.inputs, plan.options);
    if (!gradients) return gradients.error();
    const Result<BackwardResult> truth = exact_backward(data.problem, data.inputs, plan.options);
    if (!truth) return truth.error();
    result.dq = measure(gradients->dq, truth->dq);
    result.dk = measure(gradients->dk, truth->dk);
    result.dv = measure(gradients->dv, truth->dv);
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
    samples.total_ms.push_back(elapsed.count());
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
  const Result<const Engine*> engine = select_engine(plan.options.engine, recipe);
  if (!engine) return engine.error();
  const Result<std::unique_ptr<Data>> data = make_data(plan, workload);
  if (!data) return data.error();
  Measurement result;
  result.workload = workload.name;
  result.recipe = recipe.name;
  result.engine = (*engine)->name();
  result.pairs = (*data)->pairs;
  result.offsets = {0};
  for (const std::int64_t length : workload.lengths) result.offsets.push_back(result.offsets.back() + length);
  if (plan.forward_only) result.no_backward = "--forward-only was given";
  if (const Status backward = validate_backward(recipe); !backward) result.no_backward = backward.error().message;
  if (const Status status = check_answer(plan, recipe, **data, result); !status) return status.error();
  // A wrong answer has no speed.
  if (!result.right) return result;
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
          {"samples_ms", samples.total_ms}};
}

Json check_json(const Measurement& result) {
  Json json = {{"right", result.right}, {"relative_l2_limit", result.limit}, {"against", "float64"}};
  if (result.o) json["accuracy"]["o"] = accuracy_json(*result.o);
  if (result.dq) json["accuracy"]["dq"] = accuracy_json(*result.dq);
  if (result.dk) json["accuracy"]["dk"] = accuracy_json(*result.dk);
  if (result.dv) json["accuracy"]["dv"] = accuracy_json(*result.dv);
  return json;
}

Json measurement_json(const Plan& plan, const Measurement& result) {
  return {{"workload", result.workload},
          {"recipe", result.recipe},
          {"engine", {{"name", result.engine}}},
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
                {{"clock", "steady_clock around whole calls"},
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

std::string rate_text(const Samples& samples) { return show(samples.flops / median(samples.total_ms) / 1e6, 2); }

void print_bench(const Plan& plan, const std::vector<Measurement>& results) {
  const Json machine = machine_json();
  print_line(fmt::format("mxflash {} on {} ({} cores, {} MHz), {} threads, compiler {}", MXFLASH_VERSION,
                         machine["cpu"].get<std::string>(), machine["cores"].get<unsigned>(),
                         machine["clock_mhz"].get<std::string>(), thread_count(plan.options.threads), __VERSION__));
  print_line(fmt::format("q [{0}, {1}, {2}], k and v [{0}, {3}, {2}] BF16, causal; warm-up {4}, repeats {5}",
                         results.front().offsets.back(), plan.heads, plan.head_dim, plan.kv_heads, plan.warmup,
                         plan.repeats));
  print_line(
      "milliseconds of whole calls, quantization included: median (least..most); answers checked against float64");
  print_line(fmt::format("FLOPs: forward {}, backward {}", kForwardFlops, kBackwardFlops));
  print_line("");
  Table table{
      {"workload", "documents", "recipe", "engine", "answer", "forward ms", "GFLOP/s", "backward ms", "GFLOP/s"},
      {},
      {true, true, true, true, true, false, false, false, false}};
  for (const Measurement& result : results) {
    const Samples backward = result.backward.value_or(Samples{});
    table.rows.push_back({result.workload, lengths_text(result), result.recipe, result.engine,
                          result.right ? "right" : "WRONG", time_text(result.forward), rate_text(result.forward),
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
  const bool right = std::ranges::all_of(results, [](const Measurement& result) { return result.right; });
  return right ? Outcome::done : Outcome::check_failed;
}

std::string workload_help() {
  std::string text = "all, or names separated by commas:";
  for (const Workload& workload : workloads(1024)) text += fmt::format(" {} ({});", workload.name, workload.summary);
  text.pop_back();
  return text;
}

void add_size_options(CLI::App& verb, BenchArguments& arguments) {
  verb.add_option("--tokens", arguments.tokens, "Tokens of a workload")->type_name("N")->capture_default_str();
  verb.add_option("--heads", arguments.heads, "Query heads")->type_name("N")->capture_default_str();
  verb.add_option("--kv-heads", arguments.kv_heads, "Key/value heads")->type_name("N")->capture_default_str();
  verb.add_option("--head-dim", arguments.head_dim, "Dims of q, k, v")->type_name("N")->capture_default_str();
  verb.add_option("--repeats", arguments.repeats, "Timed calls")->type_name("N")->capture_default_str();
  verb.add_option("--warmup", arguments.warmup, "Calls before them")->type_name("N")->capture_default_str();
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
  add_engine_options(*verb, arguments->engine);
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return bench_verb(*arguments); }; });
}

}  // namespace mxflash::tool
