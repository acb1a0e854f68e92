#include "mxflash/schedule.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>

#include "unit/support.hpp"

namespace mxflash {
namespace {

constexpr std::int64_t kIntMax = INT32_MAX;

using test::Lengths;
using test::pack;

std::string describe(const std::vector<Lengths>& lengths, const Mask& mask) {
  std::string text = fmt::format("window ({}, {}) documents", mask.left, mask.right);
  for (const Lengths& document : lengths) text += fmt::format(" {}x{}", document.q, document.k);
  return text;
}

std::vector<Mask> masks(const std::vector<Lengths>& lengths) {
  std::int32_t longest = 1;
  for (const Lengths& document : lengths) longest = std::max({longest, document.q, document.k});
  return {Mask::causal(),      Mask::full(),        Mask::window(0, 0),       Mask::window(longest - 1, 0),
          Mask::window(7, -8), Mask::window(-3, 5), Mask::window(2, kIntMax), Mask::window(kIntMax, kIntMax)};
}

/// Independent of prove_coverage: a count for every (document, query, key), compared with the mask's definition.
void expect_covered_once(const Schedule& schedule, const Packing& packing, const Mask& mask, const std::string& where) {
  std::vector<std::vector<int>> covers;
  std::vector<std::vector<int>> written;
  for (const Document& document : packing.documents()) {
    covers.emplace_back(static_cast<std::size_t>(document.q_length * document.k_length));
    written.emplace_back(static_cast<std::size_t>(document.q_length));
  }
  for (const WorkItem& item : schedule.items) {
    const auto index = static_cast<std::size_t>(item.document);
    for (std::int64_t query = item.query_begin; query < item.query_end; ++query) {
      ++written[index].at(static_cast<std::size_t>(query));
      for (const Tile& tile : item.tiles) {
        for (std::int64_t key = tile.key_begin; key < tile.key_end; ++key) {
          const bool counts =
              tile.kind == TileKind::whole || visible_keys(packing.documents()[index], mask, query).contains(key);
          if (!counts) continue;
          ++covers[index].at(static_cast<std::size_t>(query * packing.documents()[index].k_length + key));
        }
      }
    }
  }
  for (std::size_t index = 0; index < covers.size(); ++index) {
    const Document& document = packing.documents()[index];
    for (std::int64_t query = 0; query < document.q_length; ++query) {
      ASSERT_EQ(written[index][static_cast<std::size_t>(query)], 1) << where << " document " << index;
      const std::int64_t aligned = query + document.k_length - document.q_length;
      for (std::int64_t key = 0; key < document.k_length; ++key) {
        const bool allowed = (mask.left >= kIntMax || aligned - mask.left <= key) &&
                             (mask.right >= kIntMax || key <= aligned + mask.right);
        ASSERT_EQ(covers[index][static_cast<std::size_t>(query * document.k_length + key)], allowed ? 1 : 0)
            << where << " document " << index << " query " << query << " key " << key;
      }
    }
  }
}

void expect_proved(const std::vector<Lengths>& lengths, const TileShape& shape) {
  const Packing packing = pack(lengths);
  for (const Mask& mask : masks(lengths)) {
    const Result<Schedule> schedule = make_schedule(packing, mask, shape);
    ASSERT_TRUE(schedule.ok()) << schedule.error().message;
    const Status proof = prove_coverage(*schedule, packing, mask);
    ASSERT_TRUE(proof.ok()) << proof.error().message << "; " << describe(lengths, mask);
    expect_covered_once(*schedule, packing, mask, describe(lengths, mask));
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// Every list of `documents` entries out of `choices`.
void expect_all_proved(const std::vector<Lengths>& choices, int documents, const TileShape& shape) {
  std::size_t count = 1;
  for (int i = 0; i < documents; ++i) count *= choices.size();
  for (std::size_t index = 0; index < count; ++index) {
    std::vector<Lengths> lengths;
    for (std::size_t i = 0, rest = index; i < static_cast<std::size_t>(documents); ++i, rest /= choices.size()) {
      lengths.push_back(choices[rest % choices.size()]);
    }
    expect_proved(lengths, shape);
    if (testing::Test::HasFatalFailure()) return;
  }
}

std::vector<Lengths> all_pairs(const std::vector<std::int32_t>& lengths) {
  std::vector<Lengths> pairs;
  for (const std::int32_t q : lengths) {
    for (const std::int32_t k : lengths) pairs.push_back({q, k});
  }
  return pairs;
}

TEST(Schedule, CoversAllPackingsOfUpToFourShortDocuments) {
  for (int documents = 0; documents <= 3; ++documents) {
    expect_all_proved(all_pairs({0, 1, 2, 3, 5}), documents, {32, 32});
  }
  expect_all_proved(all_pairs({0, 1, 2, 5}), 4, {32, 32});
}

TEST(Schedule, CoversAllPackingsOfFiveShortDocuments) { expect_all_proved(all_pairs({0, 1, 3}), 5, {32, 32}); }

TEST(Schedule, C9_CoversAllPackingsAroundTheBlock) {
  const std::vector<Lengths> choices = all_pairs({0, 1, 31, 32, 33, 64, 65});
  expect_all_proved(choices, 1, {32, 32});
  expect_all_proved(choices, 1, {64, 32});
  expect_all_proved(choices, 1, {32, 64});
  expect_all_proved({{0, 33}, {33, 0}, {1, 65}, {65, 31}, {64, 64}}, 2, {32, 32});
}

TEST(Schedule, C9_CoversTheListedLengths) {
  for (const std::int32_t length : {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1025}) {
    expect_proved({{length, length}}, {128, 128});
  }
  expect_proved({{129, 257}, {0, 3}, {300, 100}, {1, 1}}, {128, 64});
}

TEST(Schedule, C5_ItemsWithoutKeysArePresent) {
  const Packing packing = pack({{270, 2022}, {6898, 0}, {1785, 540}});
  const Result<Schedule> schedule = make_schedule(packing, Mask::causal(), {});
  ASSERT_TRUE(schedule.ok());
  std::int64_t without_keys = 0;
  for (const WorkItem& item : schedule->items) {
    if (item.tiles.empty()) without_keys += item.query_end - item.query_begin;
    EXPECT_EQ(item.tiles.empty(), item.cost == 0);
  }
  // Of the third document the nine whole items before query 1245.
  EXPECT_EQ(without_keys, 6898 + 1152);
  EXPECT_TRUE(prove_coverage(*schedule, packing, Mask::causal()).ok());
  expect_proved({{150, 100}, {0, 100}, {150, 100}}, {});
}

TEST(Schedule, C8_AnEmptyWindowHasItemsAndNoTiles) {
  const Packing packing = pack({{100, 100}, {33, 500}});
  const Result<Schedule> schedule = make_schedule(packing, Mask::window(7, -8), {32, 32});
  ASSERT_TRUE(schedule.ok());
  EXPECT_EQ(schedule->items.size(), 6U);
  for (const WorkItem& item : schedule->items) EXPECT_TRUE(item.tiles.empty()) << item.query_begin;
  EXPECT_TRUE(prove_coverage(*schedule, packing, Mask::window(7, -8)).ok());
}

TEST(Schedule, C8_ANarrowWindowVisitsFewTiles) {
  const Result<Schedule> schedule = make_schedule(pack({{4096, 4096}}), Mask::window(127, 0), {});
  ASSERT_TRUE(schedule.ok());
  for (const WorkItem& item : schedule->items) EXPECT_LE(item.tiles.size(), 2U) << item.query_begin;
}

TEST(Schedule, C9_TimeAndMemoryFollowTheTokens) {
  std::vector<Lengths> lengths(32768, Lengths{1, 1});
  lengths.push_back({32768, 32768});
  const Packing packing = pack(lengths);
  const auto start = std::chrono::steady_clock::now();
  const Result<Schedule> schedule = make_schedule(packing, Mask::causal(), {});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  ASSERT_TRUE(schedule.ok());
  std::size_t tiles = 0;
  std::int64_t pairs = 0;
  for (const WorkItem& item : schedule->items) {
    tiles += item.tiles.size();
    pairs += item.cost;
  }
  EXPECT_EQ(schedule->items.size(), 32768U + 256U);
  EXPECT_EQ(tiles, 32768U + 256U * 257U / 2U);
  EXPECT_EQ(pairs, 32768 + std::int64_t{32768} * 32769 / 2);
  EXPECT_EQ(schedule->items.front().document, 32768);
}

TEST(Schedule, OneTokenDocumentsAreProvedQuickly) {
  const Packing packing = pack(std::vector<Lengths>(65536, Lengths{1, 1}));
  const Result<Schedule> schedule = make_schedule(packing, Mask::causal(), {});
  ASSERT_TRUE(schedule.ok());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(prove_coverage(*schedule, packing, Mask::causal()).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Schedule, TilesOfAnySizeDoNotOverflow) {
  const TileShape huge{INT64_MAX - 31, INT64_MAX - 31};
  expect_proved({{33, 70}, {5, 0}}, huge);
}

TEST(Schedule, RefusesTileRowsThatAreNoMultipleOfTheBlock) {
  for (const std::int64_t rows : {-32, 0, 1, 31, 48}) {
    for (const TileShape& shape : {TileShape{rows, 128}, TileShape{128, rows}}) {
      const Result<Schedule> schedule = make_schedule(pack({{4, 4}}), Mask::causal(), shape);
      ASSERT_FALSE(schedule.ok());
      EXPECT_EQ(schedule.error().message,
                fmt::format("tile shape: {} query rows x {} key rows given, positive multiples of 32 allowed",
                            shape.query_rows, shape.key_rows));
      EXPECT_FALSE(prove_coverage({shape, {}}, pack({}), Mask::causal()).ok());
    }
  }
}

/// A schedule that is right, for the mutations below: document 0 has items of 4, 3, ... tiles.
class Mutation : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(verdict(), "proved"); }

  [[nodiscard]] std::string verdict() const {
    const Status status = prove_coverage(schedule_, packing_, mask_);
    return status ? "proved" : status.error().message;
  }
  WorkItem& item(std::int32_t document, std::int64_t query_begin) {
    return *std::ranges::find_if(schedule_.items, [&](const WorkItem& candidate) {
      return candidate.document == document && candidate.query_begin == query_begin;
    });
  }
  void erase_item(std::int32_t document, std::int64_t query_begin) {
    schedule_.items.erase(schedule_.items.begin() + (&item(document, query_begin) - schedule_.items.data()));
  }

  Packing packing_ = pack({{100, 100}, {40, 0}, {40, 70}});
  Mask mask_ = Mask::causal();
  Schedule schedule_ = *make_schedule(packing_, mask_, {32, 32});
};

TEST_F(Mutation, ADroppedTileIsFound) {
  item(0, 64).tiles.erase(item(0, 64).tiles.begin() + 1);
  EXPECT_EQ(verdict(), "schedule: document 0 query 64 key 32: covered 0 times, once allowed");
}

TEST_F(Mutation, EveryDroppedTileIsFound) {
  const Schedule good = schedule_;
  for (std::size_t i = 0; i < good.items.size(); ++i) {
    for (std::size_t t = 0; t < good.items[i].tiles.size(); ++t) {
      schedule_ = good;
      std::vector<Tile>& tiles = schedule_.items[i].tiles;
      tiles.erase(tiles.begin() + static_cast<std::ptrdiff_t>(t));
      EXPECT_NE(verdict().find("covered 0 times"), std::string::npos) << "item " << i << " tile " << t;
    }
  }
}

TEST_F(Mutation, ADuplicatedTileIsFound) {
  item(0, 64).tiles.insert(item(0, 64).tiles.begin(), Tile{0, 32, TileKind::whole});
  EXPECT_EQ(verdict(), "schedule: document 0 query 64 key 0: covered 2 times, once allowed");
}

TEST_F(Mutation, EveryWrongKindIsFound) {
  const Schedule good = schedule_;
  for (std::size_t i = 0; i < good.items.size(); ++i) {
    for (std::size_t t = 0; t < good.items[i].tiles.size(); ++t) {
      schedule_ = good;
      TileKind& kind = schedule_.items[i].tiles[t].kind;
      kind = kind == TileKind::cut ? TileKind::whole : TileKind::cut;
      EXPECT_NE(verdict().find("kind "), std::string::npos) << "item " << i << " tile " << t << ": " << verdict();
    }
  }
  schedule_ = good;
  item(0, 32).tiles[1].kind = TileKind::whole;
  EXPECT_EQ(verdict(),
            "schedule: document 0 queries 32..64 keys 32..64: kind whole given, but the mask allows 528 of 1024 pairs");
}

TEST_F(Mutation, ATileBeyondTheDocumentIsFound) {
  item(0, 96).tiles.back().key_end = 128;
  EXPECT_EQ(verdict(),
            "schedule: document 0 queries 96..100 keys 96..128: a range within the document's 100 keys allowed");
  item(0, 96).tiles.back() = {-32, 0, TileKind::cut};
  EXPECT_EQ(verdict(),
            "schedule: document 0 queries 96..100 keys -32..0: a range within the document's 100 keys allowed");
}

TEST_F(Mutation, ATileInADocumentWithoutKeysIsFound) {
  item(1, 0).tiles.push_back({0, 32, TileKind::cut});
  EXPECT_EQ(verdict(), "schedule: document 1 queries 0..32 keys 0..32: a range within the document's 0 keys allowed");
}

TEST_F(Mutation, AMisalignedTileIsFound) {
  item(0, 64).tiles[0] = {0, 64, TileKind::whole};
  EXPECT_EQ(verdict(),
            "schedule: document 0 queries 64..96 keys 0..64: tiles of 32 keys from the document's first allowed");
}

TEST_F(Mutation, ATileThatSeesNothingIsFound) {
  item(0, 0).tiles.push_back({32, 64, TileKind::cut});
  EXPECT_EQ(verdict(), "schedule: document 0 queries 0..32 keys 32..64: no query sees a key, such a tile is left out");
}

TEST_F(Mutation, TilesOutOfOrderAreFound) {
  std::swap(item(0, 64).tiles[0], item(0, 64).tiles[1]);
  EXPECT_EQ(verdict(), "schedule: document 0 queries 64..96: tiles out of order, rising keys allowed");
}

TEST_F(Mutation, EveryPairOfSwappedItemsIsFound) {
  const Schedule good = schedule_;
  for (std::size_t i = 0; i < good.items.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      schedule_ = good;
      std::swap(schedule_.items[i], schedule_.items[j]);
      EXPECT_NE(verdict().find("out of order, falling cost"), std::string::npos) << i << " and " << j;
    }
  }
}

TEST_F(Mutation, EveryDroppedItemIsFound) {
  const Schedule good = schedule_;
  for (std::size_t i = 0; i < good.items.size(); ++i) {
    schedule_ = good;
    schedule_.items.erase(schedule_.items.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_NE(verdict().find("in no item"), std::string::npos) << "item " << i << ": " << verdict();
  }
  schedule_ = good;
  erase_item(1, 32);
  EXPECT_EQ(verdict(), "schedule: document 1 query 32: in no item, one allowed");
}

TEST_F(Mutation, ADuplicatedItemIsFound) {
  schedule_.items.push_back(schedule_.items.back());
  EXPECT_EQ(verdict(), "schedule: document 1 query 32: in two items, one allowed");
}

TEST_F(Mutation, QueriesBeyondTheDocumentAreFound) {
  item(0, 96).query_end = 128;
  EXPECT_EQ(verdict(), "schedule: document 0 queries 96..128: an end of 100 allowed");
}

TEST_F(Mutation, AWrongDocumentIsFound) {
  schedule_.items.back().document = 3;
  EXPECT_EQ(verdict(), "schedule: document 3 queries 32..40: a document below 3 allowed");
  schedule_.items.back().document = -1;
  EXPECT_EQ(verdict(), "schedule: document -1 queries 32..40: a document below 3 allowed");
}

TEST_F(Mutation, AWrongCostIsFound) {
  item(0, 0).cost += 1;
  EXPECT_EQ(verdict(), "schedule: document 0 queries 0..32: cost 529 given, the mask allows 528 pairs");
}

TEST_F(Mutation, AnotherMaskIsFound) {
  mask_ = Mask::full();
  EXPECT_NE(verdict(), "proved");
  mask_ = Mask::window(31, 0);
  EXPECT_NE(verdict(), "proved");
}

/// A schedule whose text is kept in tests/data/schedules; MXFLASH_UPDATE_GOLDEN=1 writes the files anew.
struct Golden {
  std::string name;
  std::vector<Lengths> lengths;
  Mask mask;
  TileShape shape;
};

class GoldenSchedule : public testing::TestWithParam<Golden> {};

TEST_P(GoldenSchedule, PrintsAsKept) {
  const Golden& golden = GetParam();
  const Result<Schedule> schedule = make_schedule(pack(golden.lengths), golden.mask, golden.shape);
  ASSERT_TRUE(schedule.ok());
  const std::string text = to_string(*schedule);
  const std::string path = fmt::format("{}/schedules/{}.txt", MXFLASH_TEST_DATA, golden.name);
  if (std::getenv("MXFLASH_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
  std::ifstream file(path);
  ASSERT_TRUE(file.is_open()) << path;
  std::stringstream kept;
  kept << file.rdbuf();
  EXPECT_EQ(text, kept.str()) << path;
}

INSTANTIATE_TEST_SUITE_P(Kept, GoldenSchedule,
                         testing::Values(Golden{"causal", {{256, 256}, {1, 1}, {130, 130}}, Mask::causal(), {}},
                                         Golden{"full", {{65, 200}, {0, 7}, {7, 0}}, Mask::full(), {64, 128}},
                                         Golden{"window", {{300, 300}, {33, 64}}, Mask::window(63, 0), {64, 32}},
                                         Golden{"short_keys", {{150, 100}, {0, 100}, {5, 2}}, Mask::causal(), {32, 32}},
                                         Golden{"no_documents", {}, Mask::causal(), {}}),
                         [](const auto& golden) { return golden.param.name; });

}  // namespace
}  // namespace mxflash
