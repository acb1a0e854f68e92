// Sums of one document and key/value head that several items add to, in one order whatever their threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace mxflash::cpu {

/// What a document's items have added up to so far. Each waits until those before it have added theirs; those before it
/// must have been started earlier.
class KeySums {
 public:
  explicit KeySums(int items) : items_(items) {}

  /// Blocks until it is `item`'s turn.
  void wait(int item);
  /// Ends the item's turn.
  void pass();
  [[nodiscard]] bool is_last(int item) const { return item + 1 == items_; }

  /// In a turn only. The first makes room, zeroed: keys x head_dim and value_dim, and a flag by key for each.
  void reserve(std::size_t keys, std::size_t head_dim, std::size_t value_dim);
  void release();
  float* dk() { return dk_.data(); }
  float* dv() { return dv_.data(); }
  std::int32_t* dk_nan() { return nan_.data(); }
  std::int32_t* dv_nan() { return nan_.data() + nan_.size() / 2; }

 private:
  int items_;
  int turn_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<float> dk_;
  std::vector<float> dv_;
  std::vector<std::int32_t> nan_;
};

}  // namespace mxflash::cpu
