// Where everything lies in the workspace, and the records that kernels hand to each other. Plain data, no CUDA: the
// tests read codes and schedules back through it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxflash::cuda {

/// Queries of a work item, and keys of an entry in the table of exponent ranges.
inline constexpr std::int32_t kTileRows = 128;

/// Documents begin at columns that are multiples of this.
inline constexpr std::int32_t kColumnStep = 16;

/// Sizes the host knows. `key_dims` is head_dim rounded up to what the kernels are built for, with zeros in between;
/// `value_dims` is what a pass over the keys computes of value_dim.
struct Sizes {
  std::int32_t documents = 0;
  std::int32_t tokens_q = 0;
  std::int32_t tokens_k = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t value_dim = 0;
  std::int32_t key_dims = 0;
  std::int32_t value_dims = 0;
  std::int32_t value_parts = 1;  ///< Passes of `value_dims` each.

  /// Rows of the code tables: tokens rounded up to a tile, or one more.
  [[nodiscard]] constexpr std::int64_t rows_q() const { return padded(tokens_q); }
  [[nodiscard]] constexpr std::int64_t rows_k() const { return padded(tokens_k); }
  /// Slots for work items: block b of document d has slot cu_seqlens_q[d] / 128 + d + b, which no other block has.
  [[nodiscard]] constexpr std::int64_t item_slots() const { return tokens_q / kTileRows + documents; }
  /// The same for tiles of keys.
  [[nodiscard]] constexpr std::int64_t tile_slots() const { return tokens_k / kTileRows + documents; }
  /// Columns of what lies along keys: the first key of document d has column (cu_seqlens_k[d] / 16 + d) 16, since the
  /// copy engine takes rows from multiples of 16 bytes alone. The last tile is filled to its end.
  [[nodiscard]] constexpr std::int64_t columns() const {
    return padded(tokens_k + std::int64_t{documents} * kColumnStep) + kTileRows;
  }
  /// Rows of V's transposed codes: for each part its dims, then the multipliers of the row sum.
  [[nodiscard]] constexpr std::int64_t value_rows() const { return std::int64_t{value_parts} * (value_dims + 1); }

 private:
  /// Never 0: the copy engine knows no empty arrays.
  static constexpr std::int64_t padded(std::int64_t tokens) { return (tokens / kTileRows + 1) * kTileRows; }
};

/// What malformed cu_seqlens leave in `Control::status`.
enum StatusBit : std::uint32_t {
  kQStart = 1,
  kQOrder = 2,
  kQEnd = 4,
  kKStart = 8,
  kKOrder = 16,
  kKEnd = 32,
};

/// Cleared at the start of every call.
struct Control {
  std::uint32_t status = 0;  ///< Of StatusBit.
  std::uint32_t next = 0;    ///< Work taken so far: (item, head, part) triples.
};

/// A block of up to 128 queries of one document; rows are of the pack, positions of the document.
struct Item {
  std::int32_t query_row = 0;
  std::int32_t queries = 0;
  std::int32_t key_row = 0;
  std::int32_t keys = 0;            ///< Of the document.
  std::int32_t first_position = 0;  ///< Of the first query: its place in the document + keys - queries of the document.
  std::int32_t first_tile = 0;      ///< Slot of the document's first tile of keys.
  std::int32_t first_column = 0;    ///< Of the document's first key.
  std::int32_t document = 0;
};

/// Up to 128 keys of one document.
struct KeyTile {
  std::int32_t row = 0;
  std::int32_t keys = 0;  ///< 0: the slot has no tile.
  std::int32_t column = 0;
  std::int32_t columns = 0;    ///< Those up to the next document's, 128 at most, are this tile's to fill.
  std::int32_t first_row = 0;  ///< Of the document.
};

/// What the keys of a tile have in common.
struct Range {
  float least = 0;     ///< Exponents of V; kPoisonedValue counts.
  float most = 0;      ///< The same.
  float key_norm = 0;  ///< At least the largest norm of K as rounded.
  float unused = 0;
};

/// A query's factor 2^exponent (NaN: poisoned) and a bound of its norm as rounded (0: poisoned).
struct QueryScale {
  float factor = 0;
  float norm = 0;
};
/// A key's factor 2^exponent of K (NaN: poisoned) and exponent of V.
struct KeyScale {
  float factor = 0;
  float value_exponent = 0;
};
/// What the forward leaves of a query for the backward: weights are codes 2^(unit - value_exponent) inverse.
struct RowRecord {
  float base = 0;     ///< The last reference, m - 8 or an octave less, an integer: codes are those of 2^(logit - base).
  float inverse = 0;  ///< 1 / the row sum, in units of 2^(base - unit); 0: the query sees no key.
  float unit = 0;     ///< An integer.
  float most = 0;     ///< Largest value_exponent of the keys it sees where its item has irregular tiles, else -inf.
};
/// The value_exponent of a poisoned V: as a logit it counts as -127.
inline constexpr float kPoisonedValue = -128.0F;
/// Reference of the row sum where the first key of a document has no exponent: values of about 1.
inline constexpr float kUsualExponent = -7.0F;
/// The row sum's multipliers 2^(reference - exponent) are E4M3 numbers for exponents reference - 8 to reference + 9.
inline constexpr float kBelowReference = 8.0F;
inline constexpr float kAboveReference = 9.0F;

/// Byte offsets from the start of the workspace.
struct Layout {
  std::size_t control = 0;    ///< Control
  std::size_t items = 0;      ///< Item [item_slots]
  std::size_t tiles = 0;      ///< KeyTile [tile_slots]
  std::size_t costs = 0;      ///< uint64 [item_slots]: visible pairs + 1, or 0 for a slot without an item
  std::size_t slots = 0;      ///< int32 [item_slots]: 0, 1, 2, ...
  std::size_t costs_out = 0;  ///< Sorted, falling.
  std::size_t order = 0;      ///< int32 [item_slots]: slots in the order of the work
  std::size_t sort = 0;       ///< Scratch of the sort.
  std::size_t sort_bytes = 0;
  std::size_t query_scale = 0;  ///< QueryScale [heads, rows_q]
  std::size_t key_scale = 0;    ///< KeyScale [kv_heads, columns]
  std::size_t ranges = 0;       ///< Range [kv_heads, tile_slots]
  std::size_t query_codes = 0;  ///< E4M3 [heads, rows_q, key_dims]
  std::size_t key_codes = 0;    ///< E4M3 [kv_heads, rows_k, key_dims], and 128 rows of anything
  std::size_t value_codes = 0;  ///< E4M3 [kv_heads, value_rows, columns]
  /// Where a backward follows:
  std::size_t rows = 0;      ///< RowRecord [heads, rows_q]
  std::size_t residual = 0;  ///< [tokens_q, heads, value_dim], o's type: what rounding took from it. Not of FP32.
  /// In the place of the codes and their scales, of a recipe that is embedded in BF16: EmbeddedTables.
  std::size_t embedded_queries = 0;
  std::size_t embedded_query_factor = 0;
  std::size_t embedded_keys = 0;
  std::size_t embedded_values[2] = {0, 0};   ///< By kind of tile; as many as the recipe has.
  std::size_t embedded_about[2] = {0, 0};    ///< The same.
  std::size_t embedded_heights[2] = {0, 0};  ///< The same.
  std::size_t bytes = 0;
};

}  // namespace mxflash::cuda
