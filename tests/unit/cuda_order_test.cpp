// In which order key tiles meet queries and add to dQ, for every small document: what the kernels ask of backward.hpp,
// against the definition. Needs no device.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backward.hpp"
#include "mxflash/packing.hpp"

namespace mxflash {
namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 40;

struct Shape {
  std::int32_t queries = 0;
  std::int32_t keys = 0;
  cuda::Band band;
  [[nodiscard]] std::string name() const {
    return fmt::format("{} queries, {} keys, window ({}, {})", queries, keys, band.left, band.right);
  }
};

/// All key tiles of a document.
std::vector<cuda::KeyItem> items_of(const Shape& shape) {
  std::vector<cuda::KeyItem> items;
  for (std::int32_t key = 0; key < shape.keys; key += cuda::kTileRows) {
    cuda::KeyItem item;
    item.first_key = key;
    item.queries = shape.queries;
    item.keys_of_document = shape.keys;
    const cuda::QueryTiles tiles = cuda::tiles_that_see(item, shape.band);
    item.first_tile = tiles.first;
    item.end_tile = tiles.end;
    items.push_back(item);
  }
  return items;
}

/// By key tile, the tiles of queries that see one of its keys.
std::vector<std::vector<std::int32_t>> tiles_by_definition(const Shape& shape) {
  std::vector<std::vector<std::int32_t>> tiles((static_cast<std::size_t>(shape.keys) + 127) / 128);
  const Document document{.q_begin = 0, .q_length = shape.queries, .k_begin = 0, .k_length = shape.keys};
  const auto side = [](std::int64_t bound) { return bound == kFar ? Mask::unbounded : bound; };
  for (std::int32_t query = 0; query < shape.queries; ++query) {
    const KeyRange keys = visible_keys(document, Mask::window(side(shape.band.left), side(shape.band.right)), query);
    if (keys.empty()) continue;
    for (std::int64_t tile = keys.begin / 128; tile <= (keys.end - 1) / 128; ++tile) {
      std::vector<std::int32_t>& seen = tiles[static_cast<std::size_t>(tile)];
      if (seen.empty() || seen.back() != query / 64) seen.push_back(query / 64);
    }
  }
  return tiles;
}

/// Each key tile meets the tiles that see it, from the last to the first; those that meet the same one have turns 0, 1,
/// 2 and so on, in the order in which they are taken.
void expect_order(const Shape& shape) {
  const std::vector<std::vector<std::int32_t>> want = tiles_by_definition(shape);
  std::vector<std::int32_t> added((static_cast<std::size_t>(shape.queries) + 63) / 64);
  for (const cuda::KeyItem& item : items_of(shape)) {
    std::vector<std::int32_t> met;
    for (std::int32_t i = 0; i < item.tiles(); ++i) {
      met.push_back(item.met(i, 1).tile);
      ASSERT_EQ(cuda::tiles_before(item, met.back(), shape.band), added[static_cast<std::size_t>(met.back())]++)
          << shape.name() << ", key " << item.first_key << ", tile of queries " << met.back();
    }
    std::ranges::reverse(met);
    ASSERT_EQ(met, want[static_cast<std::size_t>(item.first_key / 128)]) << shape.name() << ", key " << item.first_key;
  }
}

TEST(CudaOrder, EveryKeyTileAddsInItsTurn) {
  constexpr std::int64_t kBounds[] = {-kFar, -400, -129, -64, -1, 0, 1, 63, 64, 127, 128, 200, 500, kFar};
  for (std::int32_t queries = 1; queries <= 6 * 64; queries += 21) {
    for (const std::int32_t keys : {1, 64, 127, 128, 129, 256, 300, 385, 639, 768}) {
      for (const std::int64_t left : kBounds) {
        for (const std::int64_t right : kBounds) {
          expect_order({queries, keys, {left, right}});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

/// How many have added before is a matter of what a query sees: not of how the document goes on.
TEST(CudaOrder, ALongerDocumentDoesNotMoveATurn) {
  for (const cuda::Band& band : {cuda::Band{kFar, 0}, cuda::Band{1'000, 0}}) {
    for (std::int32_t length = 1; length <= 20'000; length += 997) {
      const std::vector<cuda::KeyItem> items = items_of({length, length, band});
      const std::vector<cuda::KeyItem> longer = items_of({length + 7'000, length + 7'000, band});
      for (std::size_t i = 0; i < items.size(); ++i) {
        for (std::int32_t tile = items[i].first_tile; tile < items[i].end_tile; ++tile) {
          ASSERT_EQ(cuda::tiles_before(items[i], tile, band), cuda::tiles_before(longer[i], tile, band))
              << length << ", key tile " << i << ", tile of queries " << tile;
        }
      }
    }
  }
}

/// All pieces of a document once; of a plane the tiles in their order, however many planes come together.
TEST(CudaOrder, EveryPieceIsTakenOnce) {
  for (std::uint32_t tiles = 1; tiles <= 70; ++tiles) {
    for (const std::uint32_t planes : {1U, 2U, 3U, 4U, 5U, 8U, 11U, 16U, 31U, 32U, 64U, 257U}) {
      std::vector<std::uint32_t> taken(planes);
      for (std::uint32_t index = 0; index < tiles * planes; ++index) {
        const cuda::Piece piece = cuda::piece_of(index, tiles, planes);
        ASSERT_LT(piece.plane, planes) << tiles << " tiles, " << planes << " planes, piece " << index;
        ASSERT_EQ(piece.tile, taken[piece.plane]++) << tiles << " tiles, " << planes << " planes, piece " << index;
      }
      for (std::uint32_t index = 0; index < std::min(planes, cuda::planes_together(tiles)); ++index) {
        ASSERT_EQ(cuda::piece_of(index, tiles, planes).tile, 0U) << tiles << " tiles, " << planes << " planes";
      }
      ASSERT_EQ(std::ranges::count(taken, tiles), std::ssize(taken)) << tiles << " tiles, " << planes << " planes";
    }
  }
}

TEST(CudaOrder, AllHeadsOfAGroupMeetATileBeforeTheNext) {
  cuda::KeyItem item;
  item.first_tile = 3;
  item.end_tile = 8;
  for (const std::int32_t heads : {1, 2, 3, 16}) {
    std::int32_t i = 0;
    for (std::int32_t tile = 7; tile >= 3; --tile) {
      for (std::int32_t head = 0; head < heads; ++head, ++i) {
        const cuda::KeyItem::Meeting met = item.met(i, heads);
        EXPECT_EQ(std::pair(met.head, met.tile), std::pair(head, tile)) << heads << " heads, meeting " << i;
      }
    }
    EXPECT_EQ(i, heads * item.tiles());
  }
}

}  // namespace
}  // namespace mxflash
