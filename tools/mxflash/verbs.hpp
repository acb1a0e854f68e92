// The verbs of the command line, one file each. A verb declares its options and, when chosen, leaves an Action to run
// once the whole line has been parsed.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "mxflash/status.hpp"

namespace mxflash::tool {

/// The exit code of a verb that ran; an Error becomes 2, or 3 when the engine asked for cannot run.
enum class Outcome : int { done = 0, check_failed = 1 };

using Action = std::function<Result<Outcome>()>;

void add_run(CLI::App& app, Action& action);
void add_audit(CLI::App& app, Action& action);
void add_quantize(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_compare(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_recipes(CLI::App& app, Action& action);
void add_engines(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);

}  // namespace mxflash::tool
