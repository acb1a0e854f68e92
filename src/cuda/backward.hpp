// The backward on E4M3 codes: the records its kernels hand to each other, and what the host calls. No CUDA headers
// here.
//
// schedule: key tiles, longest first.  prepare: dO to codes and D; q, k, dO codes transposed, v codes by rows; one
// record a tile of queries.  prescale, where dQ adds up in FP16: the power of two before each row.  backward: a key
// tile walks the queries that see it; dK and dV stay with it, dQ is added up.  finish: dQ is rotated back and rounded,
// and dK where the kernel's dims are more than 128.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels.hpp"
#include "cuda/layout.hpp"
#include "mxflash/recipe.hpp"

namespace mxflash::cuda {

/// Queries that a key tile meets at a time; slots for tiles of queries count as Sizes::item_slots does.
inline constexpr std::int32_t kQueryTile = 64;

/// Sizes of the backward's own tables. `dims`: what the kernels are built for, 64, 128 or 256, at least head_dim and
/// value_dim; `parts`: passes of up to 128 dims of dK, dV and dQ each.
struct BackwardSizes {
  Sizes forward;
  std::int32_t dims = 0;
  std::int32_t parts = 1;
  DqAccumulation dq_accumulation = DqAccumulation::f32;  ///< Or f16_causal.

  /// Slot of block b of 64 queries of document d: cu_seqlens_q[d] / 64 + d + b.
  [[nodiscard]] constexpr std::int64_t query_slots() const {
    return forward.tokens_q / kQueryTile + std::int64_t{forward.documents};
  }
  /// As Sizes::columns, of queries.
  [[nodiscard]] constexpr std::int64_t query_columns() const {
    return (forward.tokens_q + std::int64_t{forward.documents} * kColumnStep + kTileRows - 1) / kTileRows * kTileRows +
           2 * std::int64_t{kTileRows};
  }
  [[nodiscard]] constexpr bool has_prescale() const { return dq_accumulation == DqAccumulation::f16_causal; }
  /// Bytes of a number of BackwardWorkspace::dq_sums.
  [[nodiscard]] constexpr std::size_t dq_bytes() const { return has_prescale() ? 2 : sizeof(float); }
  /// Of BackwardWorkspace::prescale: a tile of queries may end beyond the last row.
  [[nodiscard]] constexpr std::int64_t prescale_rows() const {
    return has_prescale() ? forward.heads * forward.rows_q() + kQueryTile : 0;
  }
  /// Of BackwardWorkspace::tile_most.
  [[nodiscard]] constexpr std::int64_t most_tiles() const {
    return has_prescale() ? forward.kv_heads * forward.tile_slots() : 0;
  }
};

/// Of QueryTile::logit. References beyond are not there: such a tile is irregular.
inline constexpr float kMostBase = 2'048;

/// What a tile of 64 queries and one head brings along: copied whole into shared memory. Queries past the document's
/// end have zeros. NaN in `logit` (q is poisoned), in `slope` (dO is) or in `offset` (O, dLSE) reaches
/// the keys that see the query.
struct alignas(16) QueryTile {
  /// 2^(exponent of q), a BF16, above RowRecord::base, an FP16: a load less for every query.
  std::uint32_t logit[kQueryTile];
  float slope[kQueryTile];   ///< scale 2^(exponent of dO) / row sum
  float offset[kQueryTile];  ///< (D - dLSE) 2^-(exponent of dO)
  float scale[kQueryTile];   ///< 2^(exponent of q); 0 where q is poisoned
  float scale_most[2];       ///< Largest `scale` of each 32 queries.
  float norm;                ///< Largest bound of a norm of q, QueryScale::norm.
  float most;                ///< Largest RowRecord::most.
  std::int32_t irregular;    ///< Not 0: numbers of a query leave the range in which the products above are safe.
  std::int32_t first;        ///< Place of the first query in the document.
  std::int32_t head;         ///< Of all.
  std::int32_t unused;
};

/// What the tile's records cannot say of a query whose numbers are far apart: then the kernel reads these.
struct DoutRecord {
  float factor = 0;  ///< 2^(exponent of dO); NaN: poisoned
  float delta = 0;   ///< D - dLSE
};

/// Of keys up to one of them, what a row of dQ is bounded by: the largest |V|_2 and |K|_inf as quantized, times
/// kMostUnit.
struct KeyMost {
  float value;
  float key;
};
/// Norms of 256 numbers leave FP32 above, and exponents of -127 below: between them there is room.
inline constexpr float kMostUnit = 0x1p-5F;
/// Powers of two before a row of dQ are held at these. Beyond, what is multiplied has left FP32 itself.
inline constexpr std::int32_t kMostPrescale = 250;

/// A tile of 128 keys of one document and the queries that see one of them.
struct alignas(16) KeyItem {
  std::int32_t key_row = 0;
  std::int32_t keys = 0;
  std::int32_t column = 0;     ///< Of the first key.
  std::int32_t first_key = 0;  ///< Its place in the document.
  std::int32_t document = 0;
  std::int32_t tile_slot = 0;     ///< Of the tile, as Sizes::tile_slots.
  std::int32_t query_row = 0;     ///< Of the document's first query.
  std::int32_t queries = 0;       ///< Of the document.
  std::int32_t query_column = 0;  ///< Of the document's first query.
  std::int32_t query_slot = 0;    ///< Of the document's first tile of queries.
  std::int32_t first_tile = 0;    ///< Tiles [first_tile, end_tile) of the document's queries see a key; none: equal.
  std::int32_t end_tile = 0;
  std::int32_t keys_of_document = 0;
  std::int32_t tile_slots = 0;  ///< Sizes::tile_slots.

  /// Query i stands where key i + offset does.
  [[nodiscard]] constexpr std::int64_t offset() const { return std::int64_t{keys_of_document} - queries; }
  /// Tiles of queries that see a key.
  [[nodiscard]] constexpr std::int32_t tiles() const { return end_tile - first_tile; }

  /// A head of a group of `heads` and one of its tiles, the i-th that is met: from the last tile to the first, each by
  /// all heads.
  struct Meeting {
    std::int32_t head;
    std::int32_t tile;
  };
  [[nodiscard]] constexpr Meeting met(std::int32_t i, std::int32_t heads) const {
    return {i % heads, end_tile - 1 - i / heads};
  }
};

/// Tiles [first, end) of a document's queries; none: equal.
struct QueryTiles {
  std::int32_t first = 0;
  std::int32_t end = 0;
};

/// Those that see a key of the tile. Key j is seen by the queries j - offset - right to j - offset + left.
constexpr QueryTiles tiles_that_see(const KeyItem& item, const Band& band) {
  const std::int32_t end_key = std::min(item.first_key + kTileRows, item.keys_of_document);
  const std::int64_t begin = std::max(item.first_key - item.offset() - band.right, std::int64_t{0});
  const std::int64_t end = std::min(end_key - item.offset() + band.left, std::int64_t{item.queries});
  // A band of no width has no keys, though a tile has more than one.
  if (band.left + band.right < 0 || end <= begin) return {};
  return {static_cast<std::int32_t>(begin / kQueryTile),
          static_cast<std::int32_t>((end + kQueryTile - 1) / kQueryTile)};
}

/// Key tiles that add to the sums of a tile of queries before this one: those that see one of its queries are
/// neighbours, and come from the first to the last. All of these were taken before this one, and a block does its
/// pieces of work as it took them: of all that are under way the one taken first waits for nobody, so none waits for
/// ever.
constexpr std::int32_t tiles_before(const KeyItem& item, std::int32_t tile, const Band& band) {
  const std::int64_t first = std::int64_t{tile} * kQueryTile + item.offset();
  const std::int64_t least = std::max(first - band.left, std::int64_t{0});
  return item.first_key / kTileRows - static_cast<std::int32_t>(least / kTileRows);
}

/// Of a document's pieces of work, one a plane (a head of k and v, and a part) and key tile.
struct Piece {
  std::uint32_t plane;
  std::uint32_t tile;
};

/// How many planes of a document of so many key tiles take a tile before any takes the next: so many that those before
/// have begun to add, and so few that what they all walk stays in the second-level cache.
constexpr std::uint32_t planes_together(std::uint32_t tiles) {
  constexpr std::uint32_t kLeast = 4;
  constexpr std::uint32_t kPieces = 256;
  return std::max(kLeast, kPieces / tiles);
}

/// The one that is taken `index`-th. The first tiles are taken first: they meet the most queries, and each waits for
/// those that add before it.
constexpr Piece piece_of(std::uint32_t index, std::uint32_t tiles, std::uint32_t planes) {
  const std::uint32_t most = planes_together(tiles);
  const std::uint32_t first = index / (tiles * most) * most;
  const std::uint32_t together = std::min(planes - first, most);
  const std::uint32_t rest = index - first * tiles;
  return {first + rest % together, rest / together};
}

/// The arrays of the backward's workspace, by address.
struct BackwardWorkspace {
  Control* control = nullptr;  ///< Its own: status is copied from the forward's, `next` counts (item, kv head, part).
  KeyItem* items = nullptr;    ///< [tile_slots]
  std::uint64_t* costs = nullptr;
  std::int32_t* slots = nullptr;
  std::uint64_t* costs_out = nullptr;  ///< Sorted, falling; 0: no item.
  std::int32_t* order = nullptr;       ///< [tile_slots]; the tiles of a document together, rising.
  void* sort = nullptr;
  std::size_t sort_bytes = 0;
  std::uint32_t* turns = nullptr;         ///< [heads, query_slots, parts]: key tiles that have added to dQ.
  std::int32_t* dout_base = nullptr;      ///< [heads, documents]: largest exponent of dO; INT32_MIN: none
  DoutRecord* dout_records = nullptr;     ///< [heads, rows_q]
  QueryTile* query_tiles = nullptr;       ///< [heads, query_slots]
  std::uint8_t* dout_codes = nullptr;     ///< E4M3 [heads, rows_q, dims], and 128 rows of anything
  std::uint8_t* dout_columns = nullptr;   ///< E4M3 [heads, dims, query_columns]
  std::uint8_t* query_columns = nullptr;  ///< E4M3 [heads, dims, query_columns]
  std::uint8_t* key_columns = nullptr;    ///< E4M3 [kv_heads, dims, columns]
  std::uint8_t* value_rows = nullptr;     ///< E4M3 [kv_heads, rows_k, dims], and 128 rows of anything
  /// FP32 or FP16 [heads, rows_q, dims] by place_of. Rows that see no key hold anything where dQ adds up in order, and
  /// zeros else.
  void* dq_sums = nullptr;
  float* dk_sums = nullptr;  ///< [kv_heads, rows_k, dims]; of BackwardSizes::parts more than 1 alone
  /// [blocks, scratch_bytes()]: sums of dK and dV on their way from the tensor cores' accumulators.
  std::byte* scratch = nullptr;
  // Of FP16 sums of dQ alone:
  std::int32_t* prescale = nullptr;  ///< [heads, rows_q], and 64 of anything: p, and the sums are 2^p times dQ.
  KeyMost* key_most = nullptr;       ///< [kv_heads, tile_slots, 128]: of the tile's keys up to each.
  KeyMost* tile_most = nullptr;      ///< [kv_heads, tile_slots]: of the tile's own.
};

/// Where dim `dim` of a row of dq_sums lies in it: eight rows that are written together lie in different banks.
constexpr std::int32_t place_of(std::int64_t row, std::int32_t dim) {
  return dim ^ (static_cast<std::int32_t>(row % 8) * 8);
}

/// Of a block of `backward`, one a processor.
constexpr std::size_t scratch_bytes(const BackwardSizes& sizes) {
  const std::size_t dims = sizes.dims < 128 ? 64 : 128;
  return 2 * dims * kTileRows * sizeof(float);
}

struct KeyScheduleArguments {
  BackwardSizes sizes;
  Offsets offsets;
  Band band;
  /// Of the forward, whose status is taken over: KeyTile, and nothing is read through malformed offsets.
  Workspace saved;
  BackwardWorkspace workspace;
  bool deterministic = true;  ///< As BackwardArguments::deterministic.
};

/// Longest documents first, within one the tiles in their order. Also clears `turns` and `control`, `dq_sums` unless
/// dQ adds up in order, and sets `dout_base` to INT32_MIN.
int launch_key_schedule(const KeyScheduleArguments& arguments, void* stream);

struct PrepareArguments {
  BackwardSizes sizes;
  Offsets offsets;
  Workspace saved;
  BackwardWorkspace workspace;
  Source dout;
  const void* o = nullptr;  ///< [tokens_q, heads, value_dim], dout's type
  const float* dlse = nullptr;
  std::int64_t dlse_token_stride = 0;
  std::int64_t dlse_head_stride = 0;
  float scale = 0;  ///< The softmax scale with the rotation's factor.
};

int launch_prepare(const PrepareArguments& arguments, void* stream);

struct PrescaleArguments {
  BackwardSizes sizes;
  Offsets offsets;
  Band band;
  Workspace saved;
  BackwardWorkspace workspace;
  const float* dlse = nullptr;
  std::int64_t dlse_token_stride = 0;
  std::int64_t dlse_head_stride = 0;
  float scale = 0;  ///< As PrepareArguments::scale.
};

/// After `prepare`; nothing unless dQ adds up in FP16.
int launch_prescale(const PrescaleArguments& arguments, void* stream);

/// What shares a scale of dS on its way to dQ: 32 queries and a tile's keys, or a query and these.
enum class ScoreScale : std::uint8_t { square, query };

struct BackwardArguments {
  BackwardSizes sizes;
  Band band;
  Workspace saved;
  BackwardWorkspace workspace;
  float logit_scale = 0;
  float scale = 0;
  std::int32_t blocks = 0;    ///< At most so many, which scratch has room for: one a processor.
  bool deterministic = true;  ///< dQ adds up from the first key tile to the last.
  ScoreScale ds_scale = ScoreScale::square;
  DType dtype = DType::bf16;
  void* dv = nullptr;                ///< [tokens_k, kv_heads, value_dim]
  void* dk = nullptr;                ///< [tokens_k, kv_heads, head_dim]; written unless there are dk_sums
  std::int32_t rotation_shift = -1;  ///< As FinishArguments::rotation_shift.
};

int launch_backward(const BackwardArguments& arguments, void* stream);

struct FinishArguments {
  BackwardSizes sizes;
  Workspace saved;
  BackwardWorkspace workspace;
  std::int32_t rotation_shift = -1;
  DType dtype = DType::bf16;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;  ///< Written here only where offsets are malformed, as dk where there are no sums of it: NaN.
};

/// dq_sums, and dk_sums where there are any, rotated back, rounded.
int launch_finish(const FinishArguments& arguments, void* stream);

}  // namespace mxflash::cuda
