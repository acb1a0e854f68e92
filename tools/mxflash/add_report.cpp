// `mxflash report`: the options; the page is made in report.cpp.
#include <memory>

#include "report.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

void add_report(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<ReportArguments>();
  CLI::App* verb = app.add_subcommand("report", "Results of run, audit and bench as one self-contained HTML page");
  verb->add_option("RESULTS", arguments->results, "JSON files of `run --check --json`, `audit --json`, `bench --json`")
      ->required()
      ->type_name("");
  verb->add_option("--out", arguments->out, "The page to write")->required()->type_name("OUT");
  verb->callback([arguments, &action] {
    action = [arguments]() -> Result<Outcome> { return static_cast<Outcome>(run_report(*arguments)); };
  });
}

}  // namespace mxflash::tool
