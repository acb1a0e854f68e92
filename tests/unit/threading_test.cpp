#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <numeric>
#include <thread>
#include <vector>

#include "threading/parallel.hpp"

namespace mxflash {
namespace {

/// How often each index was visited; one atomic an index, so that a doubled visit shows instead of racing.
std::vector<int> visits(std::int64_t count, int threads) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
  parallel_for(count, threads, [&](std::int64_t i) { ++seen[static_cast<std::size_t>(i)]; });
  return {seen.begin(), seen.end()};
}

TEST(Threading, ThreadCountIsTheRequestOrOneACore) {
  EXPECT_EQ(thread_count(1), 1);
  EXPECT_EQ(thread_count(7), 7);
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  EXPECT_EQ(thread_count(0), cores);
  EXPECT_EQ(thread_count(-3), cores);
}

TEST(Threading, VisitsEveryIndexOnce) {
  for (const int threads : {0, 1, 2, 3, 8}) {
    for (const std::int64_t count : {0, 1, 2, 3, 7, 8, 9, 1000, 20000}) {
      const std::vector<int> seen = visits(count, threads);
      const auto wrong = std::ranges::find_if(seen, [](int n) { return n != 1; });
      EXPECT_EQ(wrong, seen.end()) << "threads " << threads << ", count " << count << ": index " << wrong - seen.begin()
                                   << " visited " << *wrong << " times";
    }
  }
}

TEST(Threading, MoreThreadsThanItems) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    EXPECT_EQ(visits(3, 16), std::vector<int>({1, 1, 1})) << "repeat " << repeat;
  }
}

TEST(Threading, OneThreadVisitsInRisingOrderOnTheCallersThread) {
  std::vector<std::int64_t> order;
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for(100, 1, [&](std::int64_t i) {
    order.push_back(i);
    EXPECT_EQ(std::this_thread::get_id(), caller) << "index " << i;
  });
  std::vector<std::int64_t> rising(100);
  std::iota(rising.begin(), rising.end(), 0);
  EXPECT_EQ(order, rising);
}

TEST(Threading, TwoThreadsRunAtTheSameTime) {
  std::latch both(2);
  std::atomic<int> met{0};
  parallel_for(2, 2, [&](std::int64_t) {
    both.arrive_and_wait();  // One thread alone would wait here until the test's time limit.
    ++met;
  });
  EXPECT_EQ(met, 2);
}

TEST(Threading, WritesOfTheBodiesAreVisibleAfterwards) {
  std::vector<std::int64_t> squares(5000, -1);  // Plain memory: the thread sanitizer judges the hand-over.
  parallel_for(5000, 4, [&](std::int64_t i) { squares[static_cast<std::size_t>(i)] = i * i; });
  for (std::size_t i = 0; i < squares.size(); ++i) {
    ASSERT_EQ(squares[i], static_cast<std::int64_t>(i * i)) << "index " << i;
  }
}

TEST(Threading, DoneCountsUpByOneFromOneThreadAtATime) {
  for (const int threads : {1, 2, 5}) {
    for (const std::int64_t count : {0, 1, 2, 777}) {
      std::vector<std::int64_t> reports;  // Plain memory, as a progress bar would use.
      parallel_for(count, threads, [](std::int64_t) {}, [&](std::int64_t n) { reports.push_back(n); });
      std::vector<std::int64_t> expected(static_cast<std::size_t>(count));
      std::iota(expected.begin(), expected.end(), 1);
      EXPECT_EQ(reports, expected) << "threads " << threads << ", count " << count;
    }
  }
}

TEST(Threading, NestedLoopsFinish) {
  std::atomic<int> total{0};
  parallel_for(8, 2, [&](std::int64_t) { parallel_for(8, 2, [&](std::int64_t) { ++total; }); });
  EXPECT_EQ(total, 64);
}

}  // namespace
}  // namespace mxflash
