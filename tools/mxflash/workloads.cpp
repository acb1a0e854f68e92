#include "workloads.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "arguments.hpp"
#include "mxflash/formats.hpp"

namespace mxflash::tool {

namespace {

/// Documents, and tokens, that a list of lengths may have.
constexpr std::int64_t kMostListed = 1 << 22;

/// Documents of at most `length` tokens each, the last one shorter where `tokens` is no multiple.
void append_equal(std::vector<std::int64_t>& lengths, std::int64_t tokens, std::int64_t length) {
  for (std::int64_t left = tokens; left > 0; left -= length) lengths.push_back(std::min(left, length));
}

/// Lengths whose logarithm is uniform between 16 tokens and half of all.
std::vector<std::int64_t> log_uniform(std::int64_t tokens) {
  const double least = std::log2(16.0);
  const double most = std::max(least, std::log2(static_cast<double>(tokens) / 2));
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const double share = random_bits(0, 0, lengths.size()) * 0x1p-32;
    lengths.push_back(std::min(left, static_cast<std::int64_t>(std::exp2(least + share * (most - least)))));
  }
  return lengths;
}

/// "8192+32x256": one document of 8192 tokens and 32 of 256. None where the text is no such list.
std::optional<std::vector<std::int64_t>> listed_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  for (const std::string& part : split(text, '+')) {
    const std::size_t cross = part.find('x');
    const std::string count = cross == std::string::npos ? "1" : part.substr(0, cross);
    const std::string length = cross == std::string::npos ? part : part.substr(cross + 1);
    const Result<std::int64_t> times = parse_integer("count", count, {1, kMostListed});
    const Result<std::int64_t> tokens = parse_integer("length", length, {1, kMostListed});
    if (!times || !tokens || static_cast<std::int64_t>(lengths.size()) + *times > kMostListed) return std::nullopt;
    lengths.insert(lengths.end(), static_cast<std::size_t>(*times), *tokens);
  }
  if (lengths.empty() || std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) > kMostListed) {
    return std::nullopt;
  }
  return lengths;
}

}  // namespace

std::vector<Workload> workloads(std::int64_t tokens) {
  Workload equal{"equal", "four documents of a quarter of the tokens each", {}};
  append_equal(equal.lengths, tokens, std::max<std::int64_t>(1, (tokens + 3) / 4));
  Workload skewed{"skewed", "one document of three quarters of the tokens, then documents of 32", {}};
  skewed.lengths.push_back(tokens - tokens / 4);
  append_equal(skewed.lengths, tokens / 4, 32);
  return {
      {"single", "one document", {tokens}},
      equal,
      skewed,
      {"log-uniform", "lengths log-uniform from 16 to half of the tokens, always the same ones", log_uniform(tokens)}};
}

Result<std::vector<Workload>> find_workloads(const std::string& names, std::int64_t tokens) {
  const std::vector<Workload> known = workloads(tokens);
  if (names == "all") return known;
  std::vector<Workload> chosen;
  for (const std::string& name : split(names, ',')) {
    const auto found = std::ranges::find_if(known, [&](const Workload& workload) { return workload.name == name; });
    if (found == known.end()) {
      if (const auto lengths = listed_lengths(name)) {
        chosen.push_back({name, "documents of these lengths", *lengths});
        continue;
      }
      std::string allowed = "all";
      for (const Workload& workload : known) allowed += ", " + workload.name;
      return invalid(fmt::format("--workload: '{}' given, {}, or lengths such as 8192+32x256 allowed", name, allowed));
    }
    chosen.push_back(*found);
  }
  if (chosen.empty()) return invalid("--workload: '' given, all or names separated by commas allowed");
  return chosen;
}

}  // namespace mxflash::tool
