// What people and programs see: tables on standard output, JSON in a file or on standard output, a progress bar on a
// terminal.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mxflash/attention.hpp"

namespace mxflash::tool {

/// Columns as wide as their widest cell; the first is aligned left, the others right unless they read as text.
struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  std::vector<bool> text;  ///< Columns aligned left, missing entries are numbers.
};
void print(const Table& table);
/// The command line's standard output, one line.
void print_line(const std::string& line);

/// A number for people; `-` for none.
std::string show(double value, int decimals);
/// Two significant digits in scientific notation.
std::string show_small(double value);

/// Keys in the order in which they were written. NaN and Inf become null, bytes that are no UTF-8 a replacement mark.
std::string dump(const nlohmann::ordered_json& json);
/// --json: nothing, a file, or standard output.
Status write_json(const std::string& path, const nlohmann::ordered_json& json);
/// Whether the table goes to standard output: not when the JSON does.
bool wants_table(const std::string& json_path);

/// A bar on standard error, only where that is a terminal; otherwise an empty function.
Progress progress_bar(const std::string& label);
/// Wipes the bar.
void end_progress();

}  // namespace mxflash::tool
