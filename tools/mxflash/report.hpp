// `mxflash report`: results of run, audit and bench as one self-contained HTML page.
#pragma once

#include <string>
#include <vector>

namespace mxflash::tool {

struct ReportArguments {
  std::vector<std::string> results;  ///< JSON files of `run`, `audit` or `bench`, in the order to show them.
  std::string out;                   ///< The page.
};

/// The exit code: 0, or 2 with one line on standard error and nothing written.
int run_report(const ReportArguments& arguments);

}  // namespace mxflash::tool
