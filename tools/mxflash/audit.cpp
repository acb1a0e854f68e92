// `mxflash audit`: whether recipes keep the causality that they claim, by perturbing later tokens.
#include "mxflash/audit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "arguments.hpp"
#include "capture.hpp"
#include "output.hpp"
#include "selection.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostProbes = 1'000'000;

struct AuditArguments {
  std::string input;
  std::string recipes = "all";
  std::string probes = "64";
  EngineArguments engine;
  std::string json;
};

struct Skipped {
  std::string name;
  Error error;
};

struct Audited {
  AuditReport report;
  Selection engines;
};

struct Audit {
  std::string engine;  ///< Of every forward; where they differ, the name that was asked for.
  std::vector<Audited> reports;
  std::vector<Skipped> skipped;  ///< Of `all`: recipes that refuse this file or this engine.
};

Result<std::vector<Recipe>> choose_recipes(const std::string& text) {
  if (text == "all") return recipes();
  std::vector<Recipe> chosen;
  for (const std::string& name : split(text, ',')) {
    Result<Recipe> recipe = load_recipe(name);
    if (!recipe) return recipe.error();
    chosen.push_back(*std::move(recipe));
  }
  if (chosen.empty()) return invalid("--recipe: '' given, all, names or JSON files separated by commas allowed");
  return chosen;
}

/// The bar of one recipe's share of the whole.
Progress share_of(const Progress& bar, std::size_t index, std::size_t count) {
  if (!bar) return {};
  return [bar, index, count](double share) { bar((static_cast<double>(index) + share) / static_cast<double>(count)); };
}

Result<Audited> audit_one(const Recipe& recipe, const Capture& capture, const AuditOptions& probes,
                          const Options& options) {
  const bool backward = capture.inputs.dout && validate_backward(recipe).ok();
  const Result<Selection> engines = select_engines(options, recipe, backward);
  if (!engines) return engines.error();
  Result<AuditReport> report = audit_recipe(recipe, capture.problem, capture.inputs, probes, options);
  if (!report) return report.error();
  return Audited{*std::move(report), *engines};
}

std::string common_engine(const std::vector<Audited>& reports, const std::string& asked) {
  const std::string& first = reports.front().engines.forward;
  const auto same = [&](const Audited& audited) { return audited.engines.forward == first; };
  return std::ranges::all_of(reports, same) ? first : asked;
}

Result<Audit> audit_all(const AuditArguments& arguments, const std::vector<Recipe>& chosen, const Capture& capture,
                        const Options& options) {
  const Result<std::int64_t> probes = parse_integer("--probes", arguments.probes, {1, kMostProbes});
  if (!probes) return probes.error();
  Audit audit;
  const Progress bar = progress_bar("audit");
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const AuditOptions audit_options{static_cast<int>(*probes), options.seed, share_of(bar, i, chosen.size())};
    Result<Audited> report = audit_one(chosen[i], capture, audit_options, options);
    if (!report && arguments.recipes != "all") return report.error();
    if (!report) {
      audit.skipped.push_back({chosen[i].name, report.error()});
      continue;
    }
    audit.reports.push_back(*std::move(report));
  }
  // Where every recipe refuses, the file or the engine is at fault.
  if (audit.reports.empty()) return audit.skipped.front().error;
  audit.engine = common_engine(audit.reports, options.engine);
  return audit;
}

Json leak_json(const Leak& leak) {
  return {{"document", leak.document},
          {"head", leak.head},
          {"position", leak.position},
          {"perturbed", leak.perturbed},
          {"tensor", leak.tensor},
          {"output", leak.output},
          {"perturbation", to_string(leak.perturbation)},
          {"change", leak.change}};
}

Json summary_json(const LeakSummary& summary) {
  return {{"leaks", summary.leaks},
          {"max_relative_change", summary.max_relative_change},
          {"reach_tokens", summary.reach_tokens},
          {"probes", summary.probes},
          {"worst", summary.leaks == 0 ? Json() : leak_json(summary.worst)}};
}

void append_examples(Json& examples, const LeakSummary& summary, const char* kind) {
  for (const Leak& leak : summary.examples) {
    examples.push_back(leak_json(leak));
    examples.back()["kind"] = kind;
  }
}

Json report_json(const Audited& audited) {
  const AuditReport& report = audited.report;
  Json examples = Json::array();
  append_examples(examples, report.forward, "forward");
  append_examples(examples, report.backward, "backward");
  append_examples(examples, report.documents, "documents");
  return {{"name", report.name},
          {"engine", selection_json(audited.engines)},
          {"claims", {{"forward", to_string(report.claims.forward)}, {"backward", to_string(report.claims.backward)}}},
          {"has_backward", report.has_backward},
          {"forward", summary_json(report.forward)},
          {"backward", summary_json(report.backward)},
          {"documents", summary_json(report.documents)},
          {"row_sum_error", report.row_sum_error},
          {"holds", report.holds},
          {"verdict", report.verdict},
          {"examples", examples}};
}

Json audit_json(const AuditArguments& arguments, const Audit& audit, const Capture& capture) {
  Json json = {{"version", MXFLASH_VERSION},
               {"input", arguments.input},
               {"engine", {{"name", audit.engine}}},
               {"seed", arguments.engine.seed},
               {"problem", problem_json(capture)},
               {"backward",
                {{"audited", capture.inputs.dout.has_value()},
                 {"reason", capture.inputs.dout ? Json() : Json("the input has no tensor do")}}},
               {"recipes", Json::array()},
               {"skipped", Json::array()}};
  for (const Audited& audited : audit.reports) json["recipes"].push_back(report_json(audited));
  for (const auto& [name, error] : audit.skipped)
    json["skipped"].push_back({{"name", name}, {"reason", error.message}});
  return json;
}

std::string leaks_text(const LeakSummary& summary, bool present) {
  return present ? fmt::format("{}/{}", summary.leaks, summary.probes) : "-";
}

void print_audit(const AuditArguments& arguments, const Audit& audit, const Capture& capture) {
  print_line(fmt::format("{}: {}", arguments.input, describe(capture)));
  if (!capture.inputs.dout) print_line("forward only: the input has no tensor do");
  print_line("claim, leaks (leaking probes of all), largest relative change and reach in tokens: forward | backward");
  print_line("");
  Table table{{"recipe", "claim", "", "leaks", "", "change", "", "reach", "", "documents", "verdict"},
              {},
              {true, true, true, false, false, false, false, false, false, false, true}};
  for (const auto& [report, engines] : audit.reports) {
    const bool backward = report.has_backward;
    table.rows.push_back({report.name, to_string(report.claims.forward),
                          backward ? to_string(report.claims.backward) : "-", leaks_text(report.forward, true),
                          leaks_text(report.backward, backward), show_small(report.forward.max_relative_change),
                          backward ? show_small(report.backward.max_relative_change) : "-",
                          fmt::format("{}", report.forward.reach_tokens),
                          backward ? fmt::format("{}", report.backward.reach_tokens) : "-",
                          leaks_text(report.documents, true),
                          fmt::format("{}: {}", report.holds ? "holds" : "BROKEN", report.verdict)});
  }
  print(table);
  for (const auto& [name, error] : audit.skipped) print_line(fmt::format("{}: skipped, {}", name, error.message));
}

Result<Outcome> audit_verb(const AuditArguments& arguments) {
  const Result<Options> options = make_options(arguments.engine);
  if (!options) return options.error();
  const Result<std::vector<Recipe>> chosen = choose_recipes(arguments.recipes);
  if (!chosen) return chosen.error();
  const std::array inputs = {arguments.input};
  if (const Status status = check_json_output(arguments.json, inputs); !status) return status.error();
  const Result<Capture> capture = load_capture(arguments.input, {});
  if (!capture) return capture.error();
  const Result<Audit> audit = audit_all(arguments, *chosen, *capture, *options);
  end_progress();
  if (!audit) return audit.error();
  const Status status = write_json(arguments.json, audit_json(arguments, *audit, *capture));
  if (!status) return status.error();
  if (wants_table(arguments.json)) print_audit(arguments, *audit, *capture);
  for (const Audited& audited : audit->reports) {
    if (!audited.report.holds) return Outcome::check_failed;
  }
  return Outcome::done;
}

}  // namespace

void add_audit(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<AuditArguments>();
  CLI::App* verb = app.add_subcommand(
      "audit",
      "Perturb later tokens and see what earlier results do; exit 1 where a recipe breaks its claim, or where one "
      "that is known to leak was not caught");
  verb->add_option("IN", arguments->input, "safetensors file: q, k, v, cu_seqlens, do, dlse (without do: forward only)")
      ->required()
      ->type_name("");
  verb->add_option("--recipe", arguments->recipes, "all, or names and JSON files separated by commas")
      ->type_name("all|A,B")
      ->capture_default_str();
  verb->add_option("--probes", arguments->probes,
                   "Perturbed positions, rounded up to whole rounds of one in every document and key/value head")
      ->type_name("N")
      ->capture_default_str();
  add_engine_options(*verb, arguments->engine);
  add_json_option(*verb, arguments->json);
  verb->callback([arguments, &action] { action = [arguments] { return audit_verb(*arguments); }; });
}

}  // namespace mxflash::tool
