// The unit of the reference engine's work: up to 128 queries of one document and head against every key they see, with
// dense matrices over that rectangle. Time follows the visible pairs, memory the document's keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mxflash/packing.hpp"
#include "mxflash/quantize.hpp"

namespace mxflash {

/// Queries of a strip; also the tile of keys over which dQ is added up and dS shares nvfp4's second level.
inline constexpr std::int64_t kStrip = 128;

/// A token operand of one document and head in double: rows x dims, row-major. Poisoned rows are NaN.
struct Rows {
  std::int64_t count = 0;
  std::int64_t dims = 0;
  std::vector<double> values;
  /// The exponent that folds into the weights, by row; empty where the operand does not fold.
  std::vector<std::int32_t> exponents;
  std::vector<std::uint8_t> poisoned;

  [[nodiscard]] const double* row(std::int64_t index) const { return values.data() + index * dims; }
  [[nodiscard]] double* row(std::int64_t index) { return values.data() + index * dims; }
  [[nodiscard]] int exponent(std::int64_t index) const {
    return exponents.empty() ? 0 : exponents[static_cast<std::size_t>(index)];
  }
};

/// Codes times scales, for products over dims.
Rows dequantized_rows(const Quantized& operand, const Document& document, Side side, std::int64_t head);
/// For products over tokens: the folding exponent, where there is one, apart from the values.
Rows folding_rows(const Quantized& operand, bool folds, const Document& document, Side side, std::int64_t head);
/// dims x count.
std::vector<double> transposed(const Rows& rows);

/// y += a x. Separate roundings, in index order: vectorizing it changes no bit.
inline void add_scaled(std::int64_t count, double a, const double* x, double* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += a * x[i];
}

struct Strip {
  Document document;
  Mask mask;
  std::int64_t query_begin = 0;  ///< Document-relative, as every position here.
  std::int64_t query_end = 0;
  std::int64_t key_begin = 0;  ///< First key any query sees, rounded down to a block of 32.
  std::int64_t key_end = 0;
  std::vector<KeyRange> visible;  ///< By query - query_begin.

  Strip(const Document& of, const Mask& with, std::int64_t begin, std::int64_t end);

  [[nodiscard]] std::int64_t queries() const { return query_end - query_begin; }
  [[nodiscard]] std::int64_t keys() const { return key_end - key_begin; }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(queries() * keys()); }
  [[nodiscard]] std::size_t at(std::int64_t query, std::int64_t key) const {
    return static_cast<std::size_t>((query - query_begin) * keys() + key - key_begin);
  }
  [[nodiscard]] const KeyRange& sees(std::int64_t query) const {
    return visible[static_cast<std::size_t>(query - query_begin)];
  }
  /// The visible part of a row between two keys; empty ranges have begin == end.
  [[nodiscard]] KeyRange sees_within(std::int64_t query, std::int64_t begin, std::int64_t end) const {
    const KeyRange range{std::max(begin, sees(query).begin), std::min(end, sees(query).end)};
    return range.begin < range.end ? range : KeyRange{begin, begin};
  }
  /// Whether the mask cuts the 32 x 32 tile that holds the pair.
  [[nodiscard]] bool cuts(std::int64_t query, std::int64_t key) const { return cuts_tile(document, mask, query, key); }
};

/// left . right^T over dims for the strip's visible rows x keys; masked pairs hold whatever falls out.
std::vector<double> dot_products(const Strip& strip, const Rows& left, const std::vector<double>& right_transposed,
                                 std::int64_t right_count);

}  // namespace mxflash
