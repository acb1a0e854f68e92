#include "cpu/key_sums.hpp"

namespace mxflash::cpu {

void KeySums::wait(int item) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return turn_ == item; });
}

void KeySums::pass() {
  {
    const std::scoped_lock lock(mutex_);
    ++turn_;
  }
  changed_.notify_all();
}

void KeySums::reserve(std::size_t keys, std::size_t head_dim, std::size_t value_dim) {
  if (!nan_.empty()) return;
  dk_.resize(keys * head_dim);
  dv_.resize(keys * value_dim);
  nan_.resize(2 * keys);
}

void KeySums::release() {
  dk_ = {};
  dv_ = {};
  nan_ = {};
}

}  // namespace mxflash::cpu
