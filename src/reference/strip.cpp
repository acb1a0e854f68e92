#include "reference/strip.hpp"

#include <cmath>
#include <limits>

#include "quantize/scales.hpp"

namespace mxflash {
namespace {

std::int64_t first_row(const Document& document, Side side) {
  return side == Side::query ? document.q_begin : document.k_begin;
}

Rows empty_rows(const Quantized& operand, const Document& document, Side side) {
  Rows rows;
  rows.count = side == Side::query ? document.q_length : document.k_length;
  rows.dims = operand.shape[2];
  rows.values.resize(static_cast<std::size_t>(rows.count * rows.dims));
  rows.poisoned.resize(static_cast<std::size_t>(rows.count));
  return rows;
}

}  // namespace

Rows folding_rows(const Quantized& operand, bool folds, const Document& document, Side side, std::int64_t head) {
  Rows rows = empty_rows(operand, document, side);
  if (folds) rows.exponents.resize(static_cast<std::size_t>(rows.count));
  for (std::int64_t r = 0; r < rows.count; ++r) {
    const auto token = static_cast<std::size_t>((first_row(document, side) + r) * operand.shape[1] + head);
    const float* values = operand.values.data() + token * static_cast<std::size_t>(rows.dims);
    const bool poisoned = operand.poisoned[token] != 0;
    rows.poisoned[static_cast<std::size_t>(r)] = operand.poisoned[token];
    if (folds) rows.exponents[static_cast<std::size_t>(r)] = operand.exponents[token];
    const double factor = poisoned ? std::numeric_limits<double>::quiet_NaN()
                          : folds  ? 1.0
                                   : times_pow2(1.0, operand.exponents[token]);
    for (std::int64_t d = 0; d < rows.dims; ++d) rows.row(r)[d] = values[d] * factor;
  }
  return rows;
}

Rows dequantized_rows(const Quantized& operand, const Document& document, Side side, std::int64_t head) {
  return folding_rows(operand, false, document, side, head);
}

std::vector<double> transposed(const Rows& rows) {
  std::vector<double> result(rows.values.size());
  for (std::int64_t r = 0; r < rows.count; ++r) {
    for (std::int64_t d = 0; d < rows.dims; ++d) result[static_cast<std::size_t>(d * rows.count + r)] = rows.row(r)[d];
  }
  return result;
}

Strip::Strip(const Document& of, const Mask& with, std::int64_t begin, std::int64_t end)
    : document(of), mask(with), query_begin(begin), query_end(end) {
  bool any = false;
  for (std::int64_t query = begin; query < end; ++query) {
    const KeyRange range = visible_keys(document, mask, query);
    visible.push_back(range);
    if (range.empty()) continue;
    key_begin = any ? std::min(key_begin, range.begin) : range.begin;
    key_end = any ? std::max(key_end, range.end) : range.end;
    any = true;
  }
  key_begin -= key_begin % kBlock;
}

std::vector<double> dot_products(const Strip& strip, const Rows& left, const std::vector<double>& right_transposed,
                                 std::int64_t right_count) {
  std::vector<double> result(strip.size());
  for (std::int64_t query = strip.query_begin; query < strip.query_end; ++query) {
    const KeyRange range = strip.sees(query);
    if (range.empty()) continue;
    for (std::int64_t d = 0; d < left.dims; ++d) {
      add_scaled(range.end - range.begin, left.row(query)[d], right_transposed.data() + d * right_count + range.begin,
                 result.data() + strip.at(query, range.begin));
    }
  }
  return result;
}

}  // namespace mxflash
