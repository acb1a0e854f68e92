// The packings that benchmarks run on, as data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mxflash/status.hpp"

namespace mxflash::tool {

struct Workload {
  std::string name;
  std::string summary;
  std::vector<std::int64_t> lengths;  ///< Of its documents, in order.
};

/// Every workload, its documents adding up to `tokens`.
std::vector<Workload> workloads(std::int64_t tokens);
/// By names separated by commas, or `all`; lists of lengths such as 8192+32x256 too, whatever `tokens` is.
Result<std::vector<Workload>> find_workloads(const std::string& names, std::int64_t tokens);

}  // namespace mxflash::tool
