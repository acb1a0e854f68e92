#include "mxflash/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <tuple>

namespace mxflash {
namespace {

/// Whether the mask allows the pair, straight from its definition.
bool allows(const Document& document, const Mask& mask, std::int64_t query, std::int64_t key) {
  const std::int64_t distance = key - (query + document.k_length - document.q_length);
  return (mask.left >= Mask::unbounded || -distance <= mask.left) &&
         (mask.right >= Mask::unbounded || distance <= mask.right);
}

std::vector<Tile> tiles_of(const WorkItem& item, const Document& document, const Mask& mask, std::int64_t key_rows) {
  // Ranges of neighbouring queries touch or overlap, so all between the first and the last visible key is seen.
  const KeyRange first = visible_keys(document, mask, item.query_begin);
  const KeyRange last = visible_keys(document, mask, item.query_end - 1);
  std::vector<Tile> tiles;
  for (std::int64_t begin = first.begin / key_rows * key_rows; begin < last.end; begin += key_rows) {
    const std::int64_t end = begin + std::min(key_rows, document.k_length - begin);
    const bool whole = last.begin <= begin && end <= first.end;
    tiles.push_back({begin, end, whole ? TileKind::whole : TileKind::cut});
    if (end == document.k_length) break;  // begin + key_rows may overflow.
  }
  return tiles;
}

void append_items(std::vector<WorkItem>& items, const Packing& packing, std::size_t index, const Mask& mask,
                  const TileShape& shape) {
  const Document& document = packing.documents()[index];
  for (std::int64_t begin = 0, end = 0; begin < document.q_length; begin = end) {
    end = begin + std::min(shape.query_rows, document.q_length - begin);
    WorkItem item{static_cast<std::int32_t>(index), begin, end, {}, 0};
    for (std::int64_t query = begin; query < end; ++query) {
      const KeyRange keys = visible_keys(document, mask, query);
      item.cost += keys.end - keys.begin;
    }
    if (item.cost > 0) item.tiles = tiles_of(item, document, mask, shape.key_rows);
    items.push_back(std::move(item));
  }
}

bool comes_before(const WorkItem& a, const WorkItem& b) {
  return std::tuple(-a.cost, a.document, a.query_begin) < std::tuple(-b.cost, b.document, b.query_begin);
}

Status check_shape(const TileShape& shape) {
  const auto bad = [](std::int64_t rows) { return rows <= 0 || rows % kBlock != 0; };
  if (bad(shape.query_rows) || bad(shape.key_rows)) {
    return invalid(fmt::format("tile shape: {} query rows x {} key rows given, positive multiples of {} allowed",
                               shape.query_rows, shape.key_rows, kBlock));
  }
  return {};
}

std::string place_of(const WorkItem& item) {
  return fmt::format("schedule: document {} queries {}..{}", item.document, item.query_begin, item.query_end);
}

std::string place_of(const WorkItem& item, const Tile& tile) {
  return fmt::format("{} keys {}..{}", place_of(item), tile.key_begin, tile.key_end);
}

/// What coverage of one document is proved against.
struct Claim {
  const Document& document;
  const Mask& mask;
  const TileShape& shape;
};

/// Tiles within the document, at its multiples of the tile's rows.
Status check_bounds(const WorkItem& item, const Claim& claim) {
  for (const Tile& tile : item.tiles) {
    const std::int64_t rows = claim.shape.key_rows;
    if (tile.key_begin < 0 || tile.key_begin >= tile.key_end || tile.key_end > claim.document.k_length) {
      return invalid(fmt::format("{}: a range within the document's {} keys allowed", place_of(item, tile),
                                 claim.document.k_length));
    }
    if (tile.key_begin % rows != 0 ||
        tile.key_end - tile.key_begin != std::min(rows, claim.document.k_length - tile.key_begin)) {
      return invalid(fmt::format("{}: tiles of {} keys from the document's first allowed", place_of(item, tile), rows));
    }
  }
  return {};
}

/// Every pair of the item's queries: allowed ones in one tile, the others in none or in a cut one.
Status check_pairs(const WorkItem& item, const Claim& claim) {
  std::vector<int> covers(static_cast<std::size_t>(claim.document.k_length));
  for (std::int64_t query = item.query_begin; query < item.query_end; ++query) {
    std::ranges::fill(covers, 0);
    for (const Tile& tile : item.tiles) {
      for (std::int64_t key = tile.key_begin; key < tile.key_end; ++key) ++covers[static_cast<std::size_t>(key)];
    }
    for (std::int64_t key = 0; key < claim.document.k_length; ++key) {
      const int count = covers[static_cast<std::size_t>(key)];
      if (allows(claim.document, claim.mask, query, key) ? count != 1 : count > 1) {
        return invalid(fmt::format("schedule: document {} query {} key {}: covered {} times, once allowed",
                                   item.document, query, key, count));
      }
    }
  }
  return {};
}

/// Visible pairs of a tile by the mask's definition.
std::int64_t count_pairs(const WorkItem& item, const Tile& tile, const Claim& claim) {
  std::int64_t pairs = 0;
  for (std::int64_t query = item.query_begin; query < item.query_end; ++query) {
    for (std::int64_t key = tile.key_begin; key < tile.key_end; ++key) {
      pairs += allows(claim.document, claim.mask, query, key) ? 1 : 0;
    }
  }
  return pairs;
}

Status check_kinds(const WorkItem& item, const Claim& claim) {
  std::int64_t cost = 0;
  for (const Tile& tile : item.tiles) {
    const std::int64_t pairs = count_pairs(item, tile, claim);
    const std::int64_t area = (item.query_end - item.query_begin) * (tile.key_end - tile.key_begin);
    cost += pairs;
    if (pairs == 0)
      return invalid(fmt::format("{}: no query sees a key, such a tile is left out", place_of(item, tile)));
    if ((tile.kind == TileKind::whole) != (pairs == area)) {
      return invalid(fmt::format("{}: kind {} given, but the mask allows {} of {} pairs", place_of(item, tile),
                                 tile.kind == TileKind::whole ? "whole" : "cut", pairs, area));
    }
  }
  const auto falls = [](const Tile& a, const Tile& b) { return a.key_begin >= b.key_begin; };
  if (std::ranges::adjacent_find(item.tiles, falls) != item.tiles.end()) {
    return invalid(fmt::format("{}: tiles out of order, rising keys allowed", place_of(item)));
  }
  if (cost != item.cost) {
    return invalid(fmt::format("{}: cost {} given, the mask allows {} pairs", place_of(item), item.cost, cost));
  }
  return {};
}

/// The items of one document, by first query: they have to partition its queries at multiples of the tile's rows.
Status check_queries(std::span<const WorkItem* const> items, std::int32_t index, const Claim& claim) {
  std::int64_t next = 0;
  for (const WorkItem* item : items) {
    if (item->query_begin > next) break;
    if (item->query_begin < next) {
      return invalid(
          fmt::format("schedule: document {} query {}: in two items, one allowed", index, item->query_begin));
    }
    const std::int64_t end = next + std::min(claim.shape.query_rows, claim.document.q_length - next);
    if (item->query_end != end || next == end) {
      return invalid(fmt::format("{}: an end of {} allowed", place_of(*item), end));
    }
    next = end;
  }
  if (next != claim.document.q_length) {
    return invalid(fmt::format("schedule: document {} query {}: in no item, one allowed", index, next));
  }
  return {};
}

Status check_document(std::span<const WorkItem* const> items, std::int32_t index, const Claim& claim) {
  if (Status status = check_queries(items, index, claim); !status) return status;
  for (const WorkItem* item : items) {
    if (Status status = check_bounds(*item, claim); !status) return status;
    if (Status status = check_pairs(*item, claim); !status) return status;
    if (Status status = check_kinds(*item, claim); !status) return status;
  }
  return {};
}

}  // namespace

Result<Schedule> make_schedule(const Packing& packing, const Mask& mask, const TileShape& shape) {
  if (Status status = check_shape(shape); !status) return status.error();
  Schedule schedule{shape, {}};
  for (std::size_t index = 0; index < packing.documents().size(); ++index) {
    append_items(schedule.items, packing, index, mask, shape);
  }
  std::ranges::sort(schedule.items, comes_before);
  return schedule;
}

Status prove_coverage(const Schedule& schedule, const Packing& packing, const Mask& mask) {
  if (Status status = check_shape(schedule.shape); !status) return status;
  std::vector<std::vector<const WorkItem*>> items(packing.documents().size());
  for (const WorkItem& item : schedule.items) {
    if (item.document < 0 || static_cast<std::size_t>(item.document) >= items.size()) {
      return invalid(fmt::format("{}: a document below {} allowed", place_of(item), items.size()));
    }
    items[static_cast<std::size_t>(item.document)].push_back(&item);
  }
  for (std::size_t index = 0; index < items.size(); ++index) {
    std::ranges::sort(items[index], {}, [](const WorkItem* item) { return item->query_begin; });
    const Claim claim{packing.documents()[index], mask, schedule.shape};
    if (Status status = check_document(items[index], static_cast<std::int32_t>(index), claim); !status) return status;
  }
  const auto misplaced = std::ranges::adjacent_find(
      schedule.items, [](const WorkItem& a, const WorkItem& b) { return !comes_before(a, b); });
  if (misplaced != schedule.items.end()) {
    return invalid(fmt::format("{}: out of order, falling cost then rising document and query allowed",
                               place_of(*(misplaced + 1))));
  }
  return {};
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (const WorkItem& item : schedule.items) {
    text += fmt::format("document {} queries {}..{} pairs {} tiles", item.document, item.query_begin, item.query_end,
                        item.cost);
    for (const Tile& tile : item.tiles) {
      text += fmt::format(" {}..{}{}", tile.key_begin, tile.key_end, tile.kind == TileKind::cut ? "/" : "");
    }
    text += item.tiles.empty() ? " none\n" : "\n";
  }
  return text;
}

}  // namespace mxflash
