// `mxflash run`: attention of one recipe on one file, and how far it is from the truth.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "accuracy.hpp"
#include "arguments.hpp"
#include "capture.hpp"
#include "mxflash/engine.hpp"
#include "output.hpp"
#include "selection.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

using Json = nlohmann::ordered_json;

struct RunArguments {
  std::string input;
  std::string recipe = "mxfp8";
  std::string causality;
  EngineArguments engine;
  MaskArguments mask;
  bool forward_only = false;
  bool deterministic = false;
  bool check = false;
  std::string min_cosine;
  std::string out;
  std::string json;
};

/// `o=0.999`: the least cosine of an output.
struct Requirement {
  std::string output;
  double cosine = 0;
};

struct NamedAccuracy {
  std::string output;
  Accuracy accuracy;
};

/// Everything that one call computed.
struct Run {
  Recipe recipe;
  Options options;
  Selection engines;
  Capture capture;
  std::optional<ForwardResult> forward;
  std::optional<BackwardResult> backward;
  std::string no_backward;  ///< Why there is none.
  std::vector<NamedAccuracy> accuracy;
  std::string counted_by;  ///< The engine that counted the weights.
};

constexpr std::array kOutputs = {"o", "dq", "dk", "dv"};

Result<std::vector<Requirement>> parse_requirements(const std::string& text) {
  std::vector<Requirement> requirements;
  for (const std::string& part : split(text, ',')) {
    const std::size_t sign = part.find('=');
    const std::string name = part.substr(0, sign);
    if (sign == std::string::npos || std::ranges::find(kOutputs, name) == kOutputs.end()) {
      return invalid(fmt::format("--min-cosine: '{}' given, NAME=VALUE of o, dq, dk or dv allowed", part));
    }
    const Result<double> value = parse_number("--min-cosine", std::string_view(part).substr(sign + 1));
    if (!value) return value.error();
    requirements.push_back({name, *value});
  }
  return requirements;
}

Result<Recipe> choose_recipe(const RunArguments& arguments) {
  Result<Recipe> recipe = load_recipe(arguments.recipe);
  if (!recipe || arguments.causality.empty()) return recipe;
  const Result<Causality> level = parse_causality(arguments.causality);
  if (!level || *level == Causality::leaks) {
    return invalid(fmt::format("--causality: '{}' given, exact or block allowed", arguments.causality));
  }
  return with_causality(*recipe, *level);
}

Status check_outputs(const RunArguments& arguments) {
  const std::array inputs = {arguments.input, arguments.recipe};
  if (!arguments.out.empty()) {
    if (const Status status = check_output("--out", arguments.out, inputs); !status) return status;
  }
  if (!arguments.json.empty() && arguments.json == arguments.out) {
    return invalid(fmt::format("--json: {} given, which is also --out; another file allowed", arguments.json));
  }
  return check_json_output(arguments.json, inputs);
}

/// Why there will be no gradients; empty: there will be.
std::string reason_without_backward(const RunArguments& arguments, const Run& run) {
  if (arguments.forward_only) return "--forward-only was given";
  if (!run.capture.inputs.dout) return "the input has no tensor do";
  const Status backward = validate_backward(run.recipe);
  return backward ? "" : backward.error().message;
}

Result<Run> prepare(const RunArguments& arguments) {
  Result<Options> options = make_options(arguments.engine);
  if (!options) return options.error();
  options->deterministic = arguments.deterministic;
  Result<Recipe> recipe = choose_recipe(arguments);
  if (!recipe) return recipe.error();
  if (const Status status = check_outputs(arguments); !status) return status.error();
  if (const Result<Selection> engines = select_engines(*options, *recipe, false); !engines) return engines.error();
  Result<Capture> capture = load_capture(arguments.input, arguments.mask);
  if (!capture) return capture.error();
  Run run{*std::move(recipe), *std::move(options), {}, *std::move(capture), {}, {}, {}, {}, {}};
  run.no_backward = reason_without_backward(arguments, run);
  if (!run.no_backward.empty()) run.capture.inputs.dout.reset();
  const Result<Selection> engines = select_engines(run.options, run.recipe, run.no_backward.empty());
  if (!engines) return engines.error();
  run.engines = *engines;
  return run;
}

Options with_bar(const Run& run, const std::string& label) {
  Options options = run.options;
  options.progress = progress_bar(label);
  return options;
}

Status compute(Run& run) {
  const Capture& capture = run.capture;
  Result<ForwardResult> forward =
      attention_forward(capture.problem, run.recipe, capture.inputs, with_bar(run, "forward"));
  if (!forward) return forward.error();
  run.forward = *std::move(forward);
  if (!run.no_backward.empty()) return {};
  Result<BackwardResult> backward =
      attention_backward(capture.problem, run.recipe, capture.inputs, with_bar(run, "backward"));
  if (!backward) return backward.error();
  run.backward = *std::move(backward);
  return {};
}

/// What quantization did to the weights; counting takes time, so not in the run that was timed. Where its engine does
/// not count, the best that does: the weights are those of the contract whoever makes them.
Status count(Run& run) {
  const Capture& capture = run.capture;
  Options options = with_bar(run, "statistics");
  options.statistics = true;
  Result<const Engine*> counter = select_engine(options, run.recipe, Pass::forward);
  if (!counter) {
    options.engine = "auto";
    counter = select_engine(options, run.recipe, Pass::forward);
  }
  if (!counter) return counter.error();
  run.counted_by = options.engine = (*counter)->name();
  Result<ForwardResult> forward = attention_forward(capture.problem, run.recipe, capture.inputs, options);
  if (!forward) return forward.error();
  run.forward->statistics = std::move(forward->statistics);
  if (!run.backward) return {};
  Result<BackwardResult> backward = attention_backward(capture.problem, run.recipe, capture.inputs, options);
  if (!backward) return backward.error();
  run.backward->statistics = std::move(backward->statistics);
  return {};
}

Status check(Run& run) {
  if (Status status = count(run); !status) return status;
  const Capture& capture = run.capture;
  const Result<ForwardResult> forward =
      exact_forward(capture.problem, capture.inputs, with_bar(run, "float64 forward"));
  if (!forward) return forward.error();
  run.accuracy.push_back({"o", measure(run.forward->o, forward->o)});
  if (!run.backward) return {};
  const Result<BackwardResult> backward =
      exact_backward(capture.problem, capture.inputs, with_bar(run, "float64 backward"));
  if (!backward) return backward.error();
  run.accuracy.push_back({"dq", measure(run.backward->dq, backward->dq)});
  run.accuracy.push_back({"dk", measure(run.backward->dk, backward->dk)});
  run.accuracy.push_back({"dv", measure(run.backward->dv, backward->dv)});
  return {};
}

/// What fell short, as one line; empty when nothing did.
std::string shortfall(const Run& run, const std::vector<Requirement>& requirements) {
  std::string text;
  for (const Requirement& requirement : requirements) {
    const auto found = std::ranges::find_if(
        run.accuracy, [&](const NamedAccuracy& entry) { return entry.output == requirement.output; });
    const std::optional<double> cosine = found == run.accuracy.end() ? std::nullopt : found->accuracy.cosine;
    if (cosine && *cosine >= requirement.cosine) continue;
    text += fmt::format("{}{}: cosine {}, {} required", text.empty() ? "" : "; ", requirement.output,
                        cosine ? fmt::format("{:.6f}", *cosine) : "none", requirement.cosine);
  }
  return text;
}

Json octaves_json(const Octaves& octaves) {
  Json json = Json::array();
  for (const auto& [octave, bin] : octaves.bins) json.push_back({octave, bin.count, bin.flushed});
  return json;
}

Json time_json(const Run& run) {
  const double backward_quantize = run.backward ? run.backward->timing.quantize_ms : 0;
  return {{"quantize", run.forward->timing.quantize_ms + backward_quantize},
          {"forward", run.forward->timing.compute_ms},
          {"backward", run.backward ? Json(run.backward->timing.compute_ms) : Json()}};
}

Json run_json(const RunArguments& arguments, const Run& run) {
  Json json = {{"version", MXFLASH_VERSION},
               {"input", arguments.input},
               {"engine", selection_json(run.engines)},
               {"recipe", run.recipe.name},
               {"seed", run.options.seed},
               {"problem", problem_json(run.capture)},
               {"backward", {{"computed", run.backward.has_value()}, {"reason", nullptr}}},
               {"time_ms", time_json(run)}};
  if (!run.no_backward.empty()) json["backward"]["reason"] = run.no_backward;
  if (run.accuracy.empty()) return json;
  for (const NamedAccuracy& entry : run.accuracy) json["accuracy"][entry.output] = accuracy_json(entry.accuracy);
  const WeightStatistics& weights = run.forward->statistics;
  json["counted_by"] = run.counted_by;
  json["row_sum"] = {{"effective_mean", weights.row_sum_mean}, {"effective_min", weights.row_sum_min}};
  json["flushed"] = {{"p", weights.flushed_p}, {"ds", nullptr}};
  json["octaves"] = {{"p", octaves_json(weights.p)}, {"ds", Json::array()}};
  if (run.backward) {
    json["flushed"]["ds"] = run.backward->statistics.flushed_ds;
    json["octaves"]["ds"] = octaves_json(run.backward->statistics.ds);
  }
  return json;
}

std::string worst_text(const Accuracy& accuracy) {
  if (accuracy.worst.empty()) return "-";
  std::string place;
  for (const std::int64_t index : accuracy.worst) place += fmt::format("{}{}", place.empty() ? "" : ",", index);
  return fmt::format("[{}] {:.6g} for {:.6g}", place, accuracy.got, accuracy.want);
}

void print_run(const RunArguments& arguments, const Run& run) {
  print_line(fmt::format("{}: {}", arguments.input, describe(run.capture)));
  print_line(fmt::format("recipe {} on engine {}", run.recipe.name, describe(run.engines)));
  const Json time = time_json(run);
  const std::string backward = run.backward ? fmt::format("{:.1f} ms", run.backward->timing.compute_ms)
                                            : fmt::format("none ({})", run.no_backward);
  print_line(fmt::format("time: quantize {:.1f} ms, forward {:.1f} ms, backward {}", time["quantize"].get<double>(),
                         time["forward"].get<double>(), backward));
  if (run.accuracy.empty()) return;
  const WeightStatistics& weights = run.forward->statistics;
  if (run.counted_by != run.engines.forward) print_line(fmt::format("weights counted by {}", run.counted_by));
  print_line(fmt::format("row sum: mean {:.6f}, least {:.6f}", weights.row_sum_mean, weights.row_sum_min));
  print_line(fmt::format("flushed to zero: p {:.4f} %, ds {}", 100 * weights.flushed_p,
                         run.backward ? fmt::format("{:.4f} %", 100 * run.backward->statistics.flushed_ds) : "-"));
  print_line("");
  Table table{
      {"output", "cosine", "relative L2", "max abs", "worst [token,head,dim]"}, {}, {true, false, false, false, true}};
  for (const auto& [output, accuracy] : run.accuracy) {
    table.rows.push_back({output, accuracy.cosine ? show(*accuracy.cosine, 6) : "-", show_small(accuracy.relative_l2),
                          show_small(accuracy.max_abs), worst_text(accuracy)});
  }
  print(table);
}

Status write_tensors(const RunArguments& arguments, const Run& run) {
  if (arguments.out.empty()) return {};
  TensorFile file;
  file.tensors["o"] = run.forward->o;
  file.tensors["lse"] = run.forward->lse;
  if (run.backward) {
    file.tensors["dq"] = run.backward->dq;
    file.tensors["dk"] = run.backward->dk;
    file.tensors["dv"] = run.backward->dv;
  }
  file.metadata = {{"recipe", run.recipe.name},
                   {"engine", run.engines.forward},
                   {"seed", fmt::format("{}", run.options.seed)},
                   {"causal", run.capture.causal ? "true" : "false"},
                   {"mxflash", MXFLASH_VERSION}};
  return write_safetensors(arguments.out, file);
}

Result<Outcome> run_verb(const RunArguments& arguments) {
  const Result<std::vector<Requirement>> requirements = parse_requirements(arguments.min_cosine);
  if (!requirements) return requirements.error();
  Result<Run> prepared = prepare(arguments);
  if (!prepared) return prepared.error();
  Run& run = *prepared;
  Status status = compute(run);
  if (status && (arguments.check || !requirements->empty())) status = check(run);
  end_progress();
  if (!status) return status.error();
  if (status = write_tensors(arguments, run); !status) return status.error();
  if (status = write_json(arguments.json, run_json(arguments, run)); !status) return status.error();
  if (wants_table(arguments.json)) print_run(arguments, run);
  const std::string missed = shortfall(run, *requirements);
  if (missed.empty()) return Outcome::done;
  fmt::print(stderr, "mxflash: --min-cosine: {}\n", missed);
  return Outcome::check_failed;
}

void add_mask_options(CLI::App& verb, MaskArguments& mask) {
  verb.add_flag("--full", mask.full, "No causal mask, whatever the file's metadata says");
  CLI::Option* window = verb.add_option("--window", mask.window,
                                        "Query i sees keys i-L to i+R (bottom-right aligned): integers, negative ones "
                                        "too, or inf; a causal mask still hides "
                                        "later keys");
  refuse_empty(*window->type_name("L,R"));
}

void add_recipe_options(CLI::App& verb, RunArguments& arguments) {
  verb.add_option("--recipe", arguments.recipe,
                  "How operands are quantized: a name of `mxflash recipes`, or a JSON file")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  CLI::Option* causality = verb.add_option(
      "--causality", arguments.causality,
      "How far a later token may reach in the backward: exact (not at all) or block (inside one block of 32)");
  refuse_empty(*causality->type_name("exact|block"));
}

void add_result_options(CLI::App& verb, RunArguments& arguments) {
  CLI::Option* out = verb.add_option("--out", arguments.out, "Write o, lse, dq, dk, dv to this safetensors file");
  refuse_empty(*out->type_name("OUT"));
  verb.add_flag("--check", arguments.check, "Compare with float64 attention on the unquantized inputs");
  CLI::Option* least = verb.add_option("--min-cosine", arguments.min_cosine,
                                       "Check, and exit 1 where a cosine is lower (o=0.999,dq=0.99)");
  refuse_empty(*least->type_name("NAME=X,..."));
  add_json_option(verb, arguments.json);
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<RunArguments>();
  CLI::App* verb =
      app.add_subcommand("run",
                         "Attention of a file, forward and, where it has `do`, backward; a recipe without a "
                         "backward runs forward only and says so");
  verb->add_option("IN", arguments->input, "safetensors file: q, k, v, cu_seqlens, do, dlse")
      ->required()
      ->type_name("");
  add_recipe_options(*verb, *arguments);
  verb->add_flag("--forward-only", arguments->forward_only, "No gradients even where the file has `do`");
  add_mask_options(*verb, arguments->mask);
  verb->add_flag("--deterministic", arguments->deterministic, "Bit-identical gradients (the forward always is)");
  add_engine_options(*verb, arguments->engine);
  add_result_options(*verb, *arguments);
  verb->callback([arguments, &action] { action = [arguments] { return run_verb(*arguments); }; });
}

}  // namespace mxflash::tool
