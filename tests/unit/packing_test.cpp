#include "mxflash/packing.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

namespace mxflash {
namespace {

constexpr std::int64_t kIntMax = INT32_MAX;
constexpr std::int64_t kIntMin = INT32_MIN;
constexpr std::int64_t kLongMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLongMin = std::numeric_limits<std::int64_t>::min();

std::string describe(const Document& document, const Mask& mask) {
  return fmt::format("q_length {} k_length {} window ({}, {})", document.q_length, document.k_length, mask.left,
                     mask.right);
}

/// The definition, with a floor and a ceiling that no short document reaches in place of bounds that would overflow.
bool allows(const Document& document, const Mask& mask, std::int64_t query, std::int64_t key) {
  const std::int64_t aligned = query + document.k_length - document.q_length;
  const bool after_left = mask.left >= Mask::unbounded || aligned - std::max(mask.left, -kIntMax) <= key;
  const bool before_right = mask.right >= Mask::unbounded || key <= aligned + std::max(mask.right, -kIntMax);
  return after_left && before_right;
}

std::vector<Mask> masks() {
  std::vector<Mask> all = {Mask::causal(),           Mask::full(),
                           Mask::window(0, 0),       Mask::window(7, -8),
                           Mask::window(-3, 5),      Mask::window(kIntMax, kIntMax),
                           Mask::window(2, kIntMax), Mask::window(kIntMax, 2),
                           Mask::window(31, 0),      Mask::window(4, -2)};
  for (const std::int64_t left : {kLongMin, kLongMin + 1, kIntMin, -kIntMax, kIntMax - 1, kLongMax - 1, kLongMax}) {
    for (const std::int64_t right : {kLongMin, kLongMin + 1, kIntMin, -kIntMax, kIntMax - 1, kLongMax - 1, kLongMax}) {
      all.push_back(Mask::window(left, right));
    }
  }
  return all;
}

void expect_as_defined(const Document& document, const Mask& mask) {
  std::int64_t pairs = 0;
  KeyRange previous{0, 0};
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    const KeyRange keys = visible_keys(document, mask, query);
    ASSERT_LE(0, keys.begin) << describe(document, mask) << " query " << query;
    ASSERT_LE(keys.begin, keys.end) << describe(document, mask) << " query " << query;
    ASSERT_LE(keys.end, document.k_length) << describe(document, mask) << " query " << query;
    ASSERT_LE(previous.begin, keys.begin) << describe(document, mask) << " query " << query;
    ASSERT_LE(previous.end, keys.end) << describe(document, mask) << " query " << query;
    previous = keys;
    pairs += keys.end - keys.begin;
    for (std::int64_t key = 0; key < document.k_length; ++key) {
      const bool allowed = allows(document, mask, query, key);
      ASSERT_EQ(keys.contains(key), allowed) << describe(document, mask) << " query " << query << " key " << key;
      ASSERT_EQ(visible_queries(document, mask, key).contains(query), allowed)
          << describe(document, mask) << " query " << query << " key " << key;
    }
  }
  EXPECT_EQ(visible_pairs(document, mask), pairs) << describe(document, mask);
}

/// Rows of the mask as the case list draws them: "11110/11111".
std::string drawing(const Document& document, const Mask& mask) {
  std::string rows;
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    if (query > 0) rows += '/';
    const KeyRange keys = visible_keys(document, mask, query);
    for (std::int64_t key = 0; key < document.k_length; ++key) rows += keys.contains(key) ? '1' : '0';
  }
  return rows;
}

std::string refusal(const std::vector<std::int32_t>& q, const std::vector<std::int32_t>& k, std::int64_t tokens_q,
                    std::int64_t tokens_k) {
  const Result<Packing> packing = Packing::make(q, k, tokens_q, tokens_k);
  if (packing) return "accepted";
  EXPECT_EQ(packing.error().kind, ErrorKind::invalid_argument);
  return packing.error().message;
}

template <class T>
Tensor offsets_tensor(DType dtype, const std::vector<T>& values) {
  Tensor tensor = Tensor::zeros(dtype, {static_cast<std::int64_t>(values.size())});
  std::memcpy(tensor.data.data(), values.data(), tensor.data.size());
  return tensor;
}

TEST(Packing, MatchesTheDefinitionOnAllShortLengths) {
  for (const Mask& mask : masks()) {
    for (const std::int64_t q : {0, 1, 2, 3, 5, 8, 9, 13}) {
      for (const std::int64_t k : {0, 1, 2, 3, 5, 8, 9, 13}) expect_as_defined({0, q, 0, k}, mask);
    }
  }
}

TEST(Packing, C9_MatchesTheDefinitionAroundTheBlock) {
  for (const Mask& mask : masks()) {
    for (const std::int64_t q : {0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
      for (const std::int64_t k : {0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129}) expect_as_defined({5, q, 7, k}, mask);
    }
  }
}

TEST(Packing, EveryNarrowWindowMatchesTheDefinition) {
  for (std::int64_t left = -8; left <= 8; ++left) {
    for (std::int64_t right = -8; right <= 8; ++right) {
      for (const std::int64_t q : {1, 4, 7}) {
        for (const std::int64_t k : {1, 4, 7}) expect_as_defined({0, q, 0, k}, Mask::window(left, right));
      }
    }
  }
}

TEST(Packing, PairsOfTheLongestDocumentsAreExact) {
  const Document square{0, kIntMax, 0, kIntMax};
  EXPECT_EQ(visible_pairs(square, Mask::full()), kIntMax * kIntMax);
  EXPECT_EQ(visible_pairs(square, Mask::causal()), kIntMax * (kIntMax + 1) / 2);
  EXPECT_EQ(visible_pairs(square, Mask::window(0, 0)), kIntMax);
  EXPECT_EQ(visible_pairs(square, Mask::window(1, 1)), 3 * kIntMax - 2);
  EXPECT_EQ(visible_pairs(square, Mask::window(7, -8)), 0);
  EXPECT_EQ(visible_pairs(square, Mask::window(kLongMin, kLongMin)), 0);
  EXPECT_EQ(visible_pairs({0, kIntMax, 0, 1}, Mask::full()), kIntMax);
  EXPECT_EQ(visible_pairs({0, 1, 0, kIntMax}, Mask::causal()), kIntMax);
  EXPECT_EQ(visible_pairs({0, kIntMax, 0, 2}, Mask::causal()), 3);
  const KeyRange last = visible_keys(square, Mask::window(kIntMax - 1, 0), kIntMax - 1);
  EXPECT_EQ(last, (KeyRange{0, kIntMax}));
}

TEST(Packing, C5_QueriesWithoutKeysAndKeysWithoutQueries) {
  const Document short_keys{0, 5, 0, 2};
  EXPECT_EQ(drawing(short_keys, Mask::causal()), "00/00/00/10/11");
  const Result<Packing> packing =
      Packing::make(std::vector<std::int32_t>{0, 150, 150, 300}, std::vector<std::int32_t>{0, 100, 200, 300}, 300, 300);
  ASSERT_TRUE(packing.ok()) << packing.error().message;
  const std::vector<Document> expected = {{0, 150, 0, 100}, {150, 0, 100, 100}, {150, 150, 200, 100}};
  EXPECT_EQ(packing->documents(), expected);
  for (std::int64_t key = 0; key < 100; ++key) {
    ASSERT_TRUE(visible_queries(packing->documents()[1], Mask::causal(), key).empty()) << "key " << key;
  }
  const Document no_keys{270, 6898, 2022, 0};
  for (std::int64_t query = 0; query < 6898; ++query) {
    ASSERT_TRUE(visible_keys(no_keys, Mask::full(), query).empty()) << "query " << query;
  }
  EXPECT_EQ(visible_pairs(no_keys, Mask::full()), 0);
  // Of 1785 queries on 540 keys the first 1245 see nothing.
  const Document few_keys{7168, 1785, 2022, 540};
  EXPECT_TRUE(visible_keys(few_keys, Mask::causal(), 1244).empty());
  EXPECT_EQ(visible_keys(few_keys, Mask::causal(), 1245), (KeyRange{0, 1}));
  EXPECT_EQ(visible_keys(few_keys, Mask::causal(), 1784), (KeyRange{0, 540}));
}

TEST(Packing, C7_AlignsAtTheBottomRight) {
  const Result<Packing> packing =
      Packing::make(std::vector<std::int32_t>{0, 2, 7, 9}, std::vector<std::int32_t>{0, 5, 7, 9}, 9, 9);
  ASSERT_TRUE(packing.ok()) << packing.error().message;
  EXPECT_EQ(drawing(packing->documents()[0], Mask::causal()), "11110/11111");
  EXPECT_EQ(drawing(packing->documents()[1], Mask::causal()), "00/00/00/10/11");
  EXPECT_EQ(drawing(packing->documents()[2], Mask::causal()), "10/11");
}

TEST(Packing, C8_Windows) {
  for (const std::int64_t q : {1, 5, 33}) {
    for (const std::int64_t k : {1, 5, 33}) {
      const Document document{0, q, 0, k};
      const std::int64_t longest = std::max(q, k);
      for (std::int64_t query = 0; query < q; ++query) {
        const std::int64_t aligned = query + k - q;
        const KeyRange one = visible_keys(document, Mask::window(0, 0), query);
        EXPECT_EQ(one.end - one.begin, aligned >= 0 ? 1 : 0) << describe(document, Mask::window(0, 0));
        EXPECT_TRUE(one.empty() || one.begin == aligned) << describe(document, Mask::window(0, 0));
        const KeyRange causal = visible_keys(document, Mask::causal(), query);
        EXPECT_EQ(visible_keys(document, Mask::window(longest - 1, 0), query), causal);
        EXPECT_EQ(visible_keys(document, Mask::window(kIntMax, 0), query), causal);
        EXPECT_TRUE(visible_keys(document, Mask::window(7, -8), query).empty());
        EXPECT_EQ(visible_keys(document, Mask::window(kIntMax, kIntMax), query), (KeyRange{0, k}));
        EXPECT_EQ(visible_keys(document, Mask::window(0, kIntMax), query).end, k);
      }
    }
  }
}

TEST(Packing, C9_TimeFollowsTheTokens) {
  std::vector<std::int32_t> offsets(65537);
  std::iota(offsets.begin(), offsets.end(), 0);
  const auto start = std::chrono::steady_clock::now();
  const Result<Packing> packing = Packing::make(offsets, offsets, 65536, 65536);
  ASSERT_TRUE(packing.ok()) << packing.error().message;
  std::int64_t pairs = 0;
  for (const Document& document : packing->documents()) pairs += visible_pairs(document, Mask::causal());
  EXPECT_EQ(packing->documents().size(), 65536U);
  EXPECT_EQ(pairs, 65536);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST(Packing, C12_NamesWhatIsWrong) {
  EXPECT_EQ(refusal({3, 10}, {0, 10}, 10, 10), "cu_seqlens_q: starts at 3, 0 allowed");
  EXPECT_EQ(refusal({-1, 10}, {0, 10}, 10, 10), "cu_seqlens_q: starts at -1, 0 allowed");
  EXPECT_EQ(refusal({0, 10}, {0, 7, 5, 10}, 10, 10),
            "cu_seqlens_k: decreases from 7 to 5 at index 2, non-decreasing offsets allowed");
  EXPECT_EQ(refusal({0, 10}, {0, 9}, 10, 10),
            "cu_seqlens_k: ends at 9 but k has 10 rows, an end equal to the rows allowed");
  EXPECT_EQ(refusal({0, 11}, {0, 10}, 10, 10),
            "cu_seqlens_q: ends at 11 but q has 10 rows, an end equal to the rows allowed");
  EXPECT_EQ(refusal({0, 3, 5, 6, 10}, {0, 3, 5, 10}, 10, 10),
            "cu_seqlens_k: 4 entries (3 documents), cu_seqlens_q has 5 (4 documents)");
  EXPECT_EQ(refusal({}, {0}, 0, 0), "cu_seqlens_q: 0 entries given, one more than the number of documents allowed");
  EXPECT_EQ(refusal({0}, {}, 0, 0), "cu_seqlens_k: 0 entries given, one more than the number of documents allowed");
  EXPECT_EQ(refusal({0}, {0}, kIntMax + 1, 0), "q: 2147483648 rows given, 0 to 2147483647 allowed");
  EXPECT_EQ(refusal({0}, {0}, 0, kLongMax), "k: 9223372036854775807 rows given, 0 to 2147483647 allowed");
  EXPECT_EQ(refusal({0}, {0}, -1, 0), "q: -1 rows given, 0 to 2147483647 allowed");
  // B lengths or B offsets in place of B + 1 offsets.
  EXPECT_EQ(refusal({5, 5}, {0, 10}, 10, 10), "cu_seqlens_q: starts at 5, 0 allowed");
  EXPECT_EQ(refusal({0, 5}, {0, 5, 10}, 10, 10),
            "cu_seqlens_q: ends at 5 but q has 10 rows, an end equal to the rows allowed");
  EXPECT_EQ(refusal({0, INT32_MAX}, {0, INT32_MIN}, kIntMax, 0),
            "cu_seqlens_k: decreases from 0 to -2147483648 at index 1, non-decreasing offsets allowed");
}

TEST(Packing, C12_AcceptsExactlyTheValidLists) {
  const std::vector<std::int32_t> values = {-1, 0, 1, 2, 3};
  std::vector<std::int32_t> offsets;
  int accepted = 0;
  const auto check = [&] {
    for (std::int64_t rows = 0; rows <= 3; ++rows) {
      const bool valid =
          !offsets.empty() && offsets.front() == 0 && std::ranges::is_sorted(offsets) && offsets.back() == rows;
      const Result<Packing> packing = Packing::make(offsets, offsets, rows, rows);
      ASSERT_EQ(packing.ok(), valid) << fmt::format("{} entries, {} rows", offsets.size(), rows);
      accepted += packing.ok() ? 1 : 0;
    }
  };
  for (int length = 0; length <= 5; ++length) {
    int count = 1;
    for (int i = 0; i < length; ++i) count *= 5;
    for (int index = 0; index < count; ++index) {
      offsets.clear();
      for (int i = 0, rest = index; i < length; ++i, rest /= 5) {
        offsets.push_back(values[static_cast<std::size_t>(rest % 5)]);
      }
      check();
    }
  }
  EXPECT_EQ(accepted, 1 + 4 + 10 + 20 + 35);  // Rising walks from 0 to at most 3 in 0 to 4 steps.
}

TEST(Packing, C12_TensorsOfOtherTypesAndShapesAreRefused) {
  const Tensor good = offsets_tensor<std::int32_t>(DType::i32, {0, 3, 8});
  const Result<Packing> packing = Packing::from_tensors(good, good, 8, 8);
  ASSERT_TRUE(packing.ok()) << packing.error().message;
  const std::vector<Document> expected = {{0, 3, 0, 3}, {3, 5, 3, 5}};
  EXPECT_EQ(packing->documents(), expected);
  EXPECT_EQ(packing->tokens_q(), 8);
  EXPECT_EQ(packing->tokens_k(), 8);

  const auto refused = [&](const Tensor& q, const Tensor& k) {
    const Result<Packing> result = Packing::from_tensors(q, k, 8, 8);
    return result ? std::string("accepted") : result.error().message;
  };
  EXPECT_EQ(refused(offsets_tensor<std::int64_t>(DType::i64, {0, 3, 8}), good),
            "cu_seqlens_q: type I64 given, I32 allowed");
  EXPECT_EQ(refused(good, offsets_tensor<float>(DType::f32, {0, 3, 8})), "cu_seqlens_k: type F32 given, I32 allowed");
  EXPECT_EQ(refused(good, Tensor::zeros(DType::i32, {1, 3})),
            "cu_seqlens_k: shape [1, 3] given, one dimension [documents + 1] allowed");
  EXPECT_EQ(refused(Tensor::zeros(DType::i32, {}), good),
            "cu_seqlens_q: shape [] given, one dimension [documents + 1] allowed");
  EXPECT_EQ(refused(Tensor::zeros(DType::i32, {0}), good),
            "cu_seqlens_q: 0 entries given, one more than the number of documents allowed");
  Tensor lying = good;
  lying.shape = {4};
  EXPECT_EQ(refused(lying, good), "cu_seqlens_q: 12 bytes given for shape [4] of I32, 4 an entry allowed");
  lying.shape = {3};
  lying.data.push_back(std::byte{0});
  EXPECT_EQ(refused(lying, good), "cu_seqlens_q: 13 bytes given for shape [3] of I32, 4 an entry allowed");
}

TEST(Packing, ZeroDocumentsAndOneDocument) {
  const Result<Packing> none = Packing::make(std::vector<std::int32_t>{0}, std::vector<std::int32_t>{0}, 0, 0);
  ASSERT_TRUE(none.ok()) << none.error().message;
  EXPECT_TRUE(none->documents().empty());
  const Packing one = Packing::single(7, 9);
  EXPECT_EQ(one.documents(), (std::vector<Document>{{0, 7, 0, 9}}));
  EXPECT_EQ(one.tokens_q(), 7);
  EXPECT_EQ(one.tokens_k(), 9);
}

TEST(Packing, TilesAreCutWhereAQueryDoesNotSeeAKeyOfTheSquare) {
  for (const std::int64_t queries : {1, 31, 32, 33, 64, 70}) {
    for (const std::int64_t keys : {1, 31, 32, 33, 64, 70}) {
      const Document document{0, queries, 0, keys};
      for (const Mask& mask :
           {Mask::causal(), Mask::full(), Mask::window(3, 0), Mask::window(40, 5), Mask::window(0, 0),
            Mask::window(Mask::unbounded, -7), Mask::window(7, -8), Mask::window(100, 100)}) {
        for (std::int64_t query = 0; query < queries; query += 5) {
          for (std::int64_t key = 0; key < keys; key += 3) {
            bool masked = false;
            for (std::int64_t i = query / 32 * 32; i < std::min(query / 32 * 32 + 32, queries); ++i) {
              for (std::int64_t j = key / 32 * 32; j < key / 32 * 32 + 32; ++j) {
                const std::int64_t distance = j - i - (keys - queries);
                masked = masked || (mask.right != Mask::unbounded && distance > mask.right) ||
                         (mask.left != Mask::unbounded && -distance > mask.left);
              }
            }
            ASSERT_EQ(cuts_tile(document, mask, query, key), masked)
                << queries << " x " << keys << ", window " << mask.left << "," << mask.right << " at " << query << ","
                << key;
          }
        }
      }
    }
  }
}

TEST(Mask, IsCausalWhenNoQuerySeesALaterKey) {
  EXPECT_TRUE(Mask::causal().is_causal());
  EXPECT_TRUE(Mask::window(7, -8).is_causal());
  EXPECT_FALSE(Mask::window(7, 1).is_causal());
  EXPECT_FALSE(Mask::full().is_causal());
}

}  // namespace
}  // namespace mxflash
