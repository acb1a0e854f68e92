// Aligned scratch memory of one worker thread: grows, never shrinks, is not initialized.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hwy/aligned_allocator.h"

namespace mxflash::cpu {

template <class T>
class Buffer {
 public:
  /// Room for `count` elements; what was there before is lost when it grows.
  T* require(std::size_t count) {
    if (count > size_) {
      data_.reset();  // Before the new one: the two never exist together.
      data_ = hwy::AllocateAligned<T>(count);
      size_ = count;
    }
    return data_.get();
  }
  [[nodiscard]] T* data() const { return data_.get(); }

 private:
  hwy::AlignedFreeUniquePtr<T[]> data_;
  std::size_t size_ = 0;
};

/// Named by what they hold; `Bytes` are elements of the multiply's type (FP32 or BF16).
struct Workspace {
  Buffer<float> block;                      ///< One block of 32 tokens, dims x 32.
  Buffer<float> rows;                       ///< The same before or after a transposition.
  Buffer<std::byte> k_rows, v_rows;         ///< Of the scores and of dP: 32 x dims per block of keys.
  Buffer<std::byte> v_columns, v_cut;       ///< Of O: dims x 32 per block of keys.
  Buffer<std::byte> k_columns, k_cut;       ///< Of dQ.
  Buffer<std::byte> q_columns, do_columns;  ///< One block of queries: dims x 32.
  Buffer<std::byte> q_small, k_small;       ///< Scaled down, where logits overflow.
  Buffer<std::byte> q_pairs, do_pairs;      ///< Queries of a strip, for dK and dV: 32 x dims per block.
  Buffer<std::byte> weights;                ///< P or dS against keys: 32 x 32 per block of keys.
  Buffer<std::byte> p_rows, ds_rows;        ///< P and dS of a strip against queries: 32 x 32 per block of both.
  Buffer<std::byte> staging;                ///< While an operand changes its order.
  Buffer<float> scores;                     ///< 32 keys x 32 queries per block of keys.
  Buffer<float> gradients;                  ///< dP, then dS, likewise.
  Buffer<float> codes;                      ///< Of dS, one tile.
  Buffer<float> k_largest;                  ///< Of |k|, by block of keys.
  Buffer<float> product;                    ///< dims x 32.
  Buffer<double> v_most, k_most;            ///< Running maxima by key, of |v| and |k|: for an FP16 dQ.
  Buffer<float> dk, dv;                     ///< keys x dims.
  Buffer<std::int32_t> folds;               ///< Exponents by key: of v, v_cut, k, k_cut.
  Buffer<std::int32_t> key_nan;             ///< By key: whether dK, dV are NaN.
  Buffer<std::int32_t> poisoned;            ///< Running counts by key: of k, of v.
  Buffer<const void*> left;                 ///< Operands of a multiply, by block.
  Buffer<void*> right;
};

}  // namespace mxflash::cpu
