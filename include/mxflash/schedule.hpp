// The order of the work: which tiles of which document, longest first. A schedule is data: printable, comparable, and
// proved by prove_coverage to touch every allowed (query, key) pair exactly once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mxflash/packing.hpp"

namespace mxflash {

/// How a key tile meets the mask.
enum class TileKind : std::uint8_t {
  whole,  ///< Every query of the tile sees every key of it.
  cut,    ///< Some pair is masked: the mask has to be applied, and token-block scales would leak.
};

/// Keys [key_begin, key_end) (document-relative) against the queries of a work item.
struct Tile {
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  TileKind kind = TileKind::whole;
  bool operator==(const Tile&) const = default;
};

/// Queries [query_begin, query_end) (document-relative) of one document and the key tiles they see, in rising order.
struct WorkItem {
  std::int32_t document = 0;
  std::int64_t query_begin = 0;
  std::int64_t query_end = 0;
  std::vector<Tile> tiles;
  std::int64_t cost = 0;  ///< Visible (query, key) pairs.
  bool operator==(const WorkItem&) const = default;
};

/// Rows of a query tile and of a key tile; both multiples of kBlock.
struct TileShape {
  std::int64_t query_rows = 128;
  std::int64_t key_rows = 128;
};

struct Schedule {
  TileShape shape;
  /// Falling cost; equal costs in rising (document, query_begin). Items that see no key are present with no tiles, so
  /// that their outputs are written.
  std::vector<WorkItem> items;
};

/// Tiles start at each document's first query and first key. Refuses tile rows that are not positive multiples of 32.
Result<Schedule> make_schedule(const Packing& packing, const Mask& mask, const TileShape& shape);

/// Walks every pair: an Error names the first query that is in no item or in two, pair that is covered twice or not at
/// all, tile that leaves the document, sees nothing or has the wrong kind, or item or tile out of order. Time is the
/// sum over documents of q_length x k_length.
Status prove_coverage(const Schedule& schedule, const Packing& packing, const Mask& mask);

/// One line an item: `document 3 queries 128..256 pairs 24640 tiles 0..128 128..256/`, where `/` marks a cut tile, and
/// `tiles none` an item that sees no key.
std::string to_string(const Schedule& schedule);

}  // namespace mxflash
