#include "output.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <span>

#include "mxflash/safetensors.hpp"

namespace mxflash::tool {

namespace {

constexpr int kBarWidth = 40;

bool on_terminal() { return isatty(STDERR_FILENO) == 1; }

std::string aligned(const std::string& cell, std::size_t width, bool left) {
  return left ? fmt::format("{:<{}}", cell, width) : fmt::format("{:>{}}", cell, width);
}

void print_row(const Table& table, const std::vector<std::string>& row, const std::vector<std::size_t>& widths) {
  std::string line;
  for (std::size_t column = 0; column < row.size(); ++column) {
    const bool left = column == 0 || (column < table.text.size() && table.text[column]);
    line += (column == 0 ? "" : "  ") + aligned(row[column], widths[column], left);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  print_line(line);
}

}  // namespace

void print(const Table& table) {
  std::vector<std::size_t> widths;
  widths.reserve(table.header.size());
  for (const std::string& name : table.header) widths.push_back(name.size());
  for (const std::vector<std::string>& row : table.rows) {
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  print_row(table, table.header, widths);
  for (const std::vector<std::string>& row : table.rows) print_row(table, row, widths);
}

void print_line(const std::string& line) { fmt::print("{}\n", line); }

std::string show(double value, int decimals) {
  return std::isnan(value) ? "-" : fmt::format("{:.{}f}", value, decimals);
}

std::string show_small(double value) {
  if (std::isnan(value)) return "-";
  return value == 0 ? "0" : fmt::format("{:.1e}", value);
}

std::string dump(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Status write_json(const std::string& path, const nlohmann::ordered_json& json) {
  if (path.empty()) return {};
  const std::string text = dump(json);
  if (path != "-") return write_file(path, std::as_bytes(std::span(text)));
  fmt::print("{}", text);
  return {};
}

bool wants_table(const std::string& json_path) { return json_path != "-"; }

Progress progress_bar(const std::string& label) {
  if (!on_terminal()) return {};
  return [label, last = std::make_shared<int>(-1)](double share) {
    const int permille = static_cast<int>(std::clamp(share, 0.0, 1.0) * 1000);
    if (permille == *last) return;
    *last = permille;
    const int filled = permille * kBarWidth / 1000;
    fmt::print(stderr, "\r{:<20} [{}{}] {:5.1f} %", label, std::string(static_cast<std::size_t>(filled), '='),
               std::string(static_cast<std::size_t>(kBarWidth - filled), ' '), permille / 10.0);
  };
}

void end_progress() {
  if (!on_terminal()) return;
  fmt::print(stderr, "\r\033[K");
}

}  // namespace mxflash::tool
