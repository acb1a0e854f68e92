// In which order key tiles meet queries and add to dQ, for every small document: what the kernels ask of backward.hpp,
// against the definition. Needs no device.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
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
std::vector<cuda::KeyItem> items_of(const Shape& shape, std::int32_t step) {
  std::vector<cuda::KeyItem> items;
  for (std::int32_t key = 0; key < shape.keys; key += cuda::kTileRows) {
    cuda::KeyItem item;
    item.first_key = key;
    item.queries = shape.queries;
    item.keys_of_document = shape.keys;
    item.step = step;
    const cuda::QueryTiles tiles = cuda::tiles_that_see(item, key, shape.band);
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

/// Each key tile meets the tiles that see it, in the order of its step; those that meet the same one have turns 0, 1, 2
/// and so on, in the order in which they are taken.
void expect_order(const Shape& shape, std::int32_t step) {
  const std::vector<std::vector<std::int32_t>> want = tiles_by_definition(shape);
  std::vector<cuda::KeyItem> taken = items_of(shape, step);
  if (step > 0) std::ranges::reverse(taken);
  std::vector<std::int32_t> added((static_cast<std::size_t>(shape.queries) + 63) / 64);
  for (const cuda::KeyItem& item : taken) {
    std::vector<std::int32_t> met;
    for (std::int32_t i = 0; i < item.tiles(); ++i) {
      met.push_back(item.met(i, 1).tile);
      ASSERT_EQ(cuda::tiles_before(item, met.back(), shape.band), added[static_cast<std::size_t>(met.back())]++)
          << shape.name() << ", step " << step << ", key " << item.first_key << ", tile of queries " << met.back();
    }
    if (step < 0) std::ranges::reverse(met);
    ASSERT_EQ(met, want[static_cast<std::size_t>(item.first_key / 128)])
        << shape.name() << ", step " << step << ", key " << item.first_key;
  }
}

TEST(CudaOrder, EveryKeyTileAddsInItsTurn) {
  constexpr std::int64_t kBounds[] = {-kFar, -400, -129, -64, -1, 0, 1, 63, 64, 127, 128, 200, 500, kFar};
  for (std::int32_t queries = 1; queries <= 6 * 64; queries += 21) {
    for (const std::int32_t keys : {1, 64, 127, 128, 129, 256, 300, 385, 639, 768}) {
      for (const std::int64_t left : kBounds) {
        for (const std::int64_t right : kBounds) {
          for (const std::int32_t step : {1, -1}) expect_order({queries, keys, {left, right}}, step);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

/// One head after the other, or all at each tile; in both every head meets every tile once.
TEST(CudaOrder, EveryHeadOfAGroupMeetsEveryTile) {
  cuda::KeyItem item;
  item.first_tile = 3;
  item.end_tile = 8;
  for (const std::int32_t heads : {1, 2, 3, 16}) {
    std::vector<std::pair<std::int32_t, std::int32_t>> one_by_one;
    std::vector<std::pair<std::int32_t, std::int32_t>> together;
    for (std::int32_t head = 0; head < heads; ++head) {
      for (std::int32_t tile = 3; tile < 8; ++tile) one_by_one.emplace_back(head, tile);
    }
    for (std::int32_t tile = 7; tile >= 3; --tile) {
      for (std::int32_t head = 0; head < heads; ++head) together.emplace_back(head, tile);
    }
    for (std::int32_t i = 0; i < heads * item.tiles(); ++i) {
      for (const std::int32_t step : {1, -1}) {
        item.step = step;
        const cuda::KeyItem::Meeting met = item.met(i, heads);
        EXPECT_EQ(std::pair(met.head, met.tile), (step > 0 ? one_by_one : together)[static_cast<std::size_t>(i)])
            << heads << " heads, step " << step << ", meeting " << i;
      }
    }
  }
}

std::int32_t step_of(const Shape& shape, std::int32_t heads_of_group) {
  std::vector<std::int32_t> steps;
  for (const cuda::KeyItem& item : items_of(shape, 1)) {
    steps.push_back(cuda::step_of(item, shape.band, heads_of_group));
  }
  // Of the document: all of its key tiles say the same.
  EXPECT_EQ(std::ranges::count(steps, steps.front()), std::ssize(steps)) << shape.name();
  return steps.front();
}

/// 96 tiles of queries more than the last key tile's, over all heads of a group.
TEST(CudaOrder, LongCausalDocumentsAreTurnedRound) {
  const cuda::Band causal{kFar, 0};
  for (const auto& [length, group] : {std::pair{6145, 1}, {3073, 2}, {1537, 4}, {385, 16}}) {
    EXPECT_EQ(step_of({length - 1, length - 1, causal}, group), 1) << length;
    EXPECT_EQ(step_of({length, length, causal}, group), -1) << length;
    EXPECT_EQ(step_of({length, length + 1024, causal}, group), -1) << "more keys, all of which the first tile's see";
    EXPECT_EQ(step_of({length, length, {kFar, kFar}}, group), 1) << "all meet the same";
    EXPECT_EQ(step_of({length, length, {0, kFar}}, group), 1) << "the last meets the most";
    EXPECT_EQ(step_of({length, length, {128, 0}}, group), 1) << "all meet few";
    EXPECT_EQ(step_of({4 * length, 4 * length, {length + 128, 0}}, group), -1) << "a window as wide";
  }
  EXPECT_EQ(step_of({1, 1, causal}, 1), 1);
  EXPECT_EQ(step_of({0, 300, causal}, 64), 1);
}

}  // namespace
}  // namespace mxflash
