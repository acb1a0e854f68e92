// The command line: parses, runs the chosen verb, and turns what became of it into an exit code: 0 done, 1 a check
// failed, 2 bad input or usage, 3 the engine asked for cannot run here. Failures are one line on standard error.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "verbs.hpp"

namespace {

using mxflash::ErrorKind;
using mxflash::Result;
using mxflash::tool::Action;
using mxflash::tool::Outcome;

constexpr int kBadInput = 2;
constexpr int kCannotRun = 3;

/// One line, whatever bytes a file name or a tensor name brought along.
int fail(int exit_code, const std::string& message) {
  std::string line = message;
  for (char& character : line) {
    if (static_cast<unsigned char>(character) < 0x20 || character == 0x7F) character = '?';
  }
  fmt::print(stderr, "mxflash: {}\n", line);
  return exit_code;
}

std::string verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands({})) names.push_back(verb->get_name());
  return fmt::format("{}", fmt::join(names, ", "));
}

/// The option that the parser's "Expected exactly 1 arguments to --seed, got 2" or "--seed: 1 required ..." is about.
std::string mismatched_option(const std::string& text) {
  const std::string before = "arguments to ";
  const std::size_t found = text.find(before);
  const std::size_t begin = found == std::string::npos ? 0 : found + before.size();
  return text.substr(begin, text.find_first_of(":, ", begin) - begin);
}

/// A usage error of the parser in the words of all other errors: argument, given, allowed.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const std::vector<std::string> extra = app.remaining(true);
  if (chosen.empty()) {
    if (extra.empty()) return fmt::format("verb: none given, {} allowed", verb_names(app));
    return fmt::format("{}: unknown verb given, {} allowed", extra.front(), verb_names(app));
  }
  const std::string help = fmt::format("what `mxflash {} --help` lists allowed", chosen.front()->get_name());
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !extra.empty()) {
    return fmt::format("{}: unknown or surplus argument given, {}", extra.front(), help);
  }
  std::string text = error.what();
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    return fmt::format("{}: none given, {}", text.substr(0, text.find(" is required")), help);
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    return fmt::format("{}: no value or more than one given, {}", mismatched_option(text), help);
  }
  return fmt::format("{}; {}", text, help);
}

int run_action(const Action& action) {
  try {
    const Result<Outcome> outcome = action();
    if (!outcome) {
      return fail(outcome.error().kind == ErrorKind::unsupported ? kCannotRun : kBadInput, outcome.error().message);
    }
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return fail(kBadInput, "standard output: cannot be written, a pipe or a file with room allowed");
    }
    return static_cast<int>(*outcome);
  } catch (const std::bad_alloc&) {
    return fail(kBadInput, "memory: the input needs more than this machine gives, a smaller one allowed");
  }
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Microscaling flash attention, forward and backward, on packed documents", "mxflash");
  app.set_version_flag("--version", "mxflash " MXFLASH_VERSION, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print what every option means and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done; 1 a check failed; 2 bad input or usage; 3 the engine asked for cannot run here.\n"
      "`mxflash VERB --help` explains a verb.");
  Action action;
  mxflash::tool::add_run(app, action);
  mxflash::tool::add_audit(app, action);
  mxflash::tool::add_quantize(app, action);
  mxflash::tool::add_generate(app, action);
  mxflash::tool::add_compare(app, action);
  mxflash::tool::add_bench(app, action);
  mxflash::tool::add_recipes(app, action);
  mxflash::tool::add_engines(app, action);
  mxflash::tool::add_report(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    return fail(kBadInput, usage_message(app, error));
  }
  return run_action(action);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    return fail(kBadInput, fmt::format("unexpected failure: {}", error.what()));
  }
}
