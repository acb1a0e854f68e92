// dK and dV of a document once its queries have been gone through: stored, or first added to what earlier items have.
#if defined(MXFLASH_CPU_KEY_GRADIENTS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_KEY_GRADIENTS_INL
#undef MXFLASH_CPU_KEY_GRADIENTS_INL
#else
#define MXFLASH_CPU_KEY_GRADIENTS_INL
#endif

#include "cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Sums over queries for the keys of blocks of 32, from `begin` on.
struct KeyGradients {
  float* dk = nullptr;  ///< [keys][head_dim], padded to 32
  float* dv = nullptr;  ///< [keys][value_dim], padded to 32
  std::int32_t* dk_nan = nullptr;
  std::int32_t* dv_nan = nullptr;
  std::int64_t begin = 0;
  std::size_t blocks = 0;
};

class KeyGradientStore {
 public:
  KeyGradientStore(const Plan& plan, const Item& item, Workspace& work)
      : plan_(plan),
        item_(item),
        document_(*item.document),
        work_(work),
        d_(padded_dims(plan.head_dim)),
        dv_(padded_dims(plan.value_dim)) {}

  /// The last item of the document, or its only one, writes.
  void finish(const Backward& out, const KeyGradients& own) {
    if (item_.sums == nullptr) {
      store(out, own);
    } else {
      merge(out, own);
    }
  }

 private:
  /// Adds this item's sums to those of the items before it; the last one stores them.
  void merge(const Backward& out, const KeyGradients& own) {
    KeySums& sums = *item_.sums;
    sums.wait(item_.number);
    const auto blocks = static_cast<std::size_t>((document_.k_length + kBlockRows - 1) / kBlockRows);
    sums.reserve(blocks * kBlockSize, d_, dv_);
    const auto first = static_cast<std::size_t>(own.begin);
    const std::size_t count = own.blocks * kBlockSize;
    add_floats(own.dk, count * d_, sums.dk() + first * d_);
    add_floats(own.dv, count * dv_, sums.dv() + first * dv_);
    for (std::size_t i = 0; i < count; ++i) {
      sums.dk_nan()[first + i] |= own.dk_nan[i];
      sums.dv_nan()[first + i] |= own.dv_nan[i];
    }
    if (sums.is_last(item_.number)) {
      store(out, {sums.dk(), sums.dv(), sums.dk_nan(), sums.dv_nan(), 0, blocks});
      sums.release();
    }
    sums.pass();
  }

  static void add_floats(const float* from, std::size_t count, float* to) {
    for (std::size_t i = 0; i < count; i += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(kF, to + i), hn::LoadU(kF, from + i)), kF, to + i);
    }
  }

  /// Every key of the document, zeros where no query sees it.
  void store(const Backward& out, const KeyGradients& sums) {
    for (std::int64_t key = 0; key < document_.k_length; key += kBlockRows) {
      const TokenPlace place{document_.k_begin + key, key, item_.kv_head,
                             static_cast<std::size_t>(HWY_MIN(kBlockRows, document_.k_length - key))};
      const auto end = sums.begin + static_cast<std::int64_t>(sums.blocks) * kBlockRows;
      const bool seen = key >= sums.begin && key < end;
      const auto row = static_cast<std::size_t>(seen ? key - sums.begin : 0);
      const std::int32_t none[kBlockSize] = {};
      turn_keys(seen ? sums.dk + row * d_ : nullptr, d_, static_cast<std::size_t>(plan_.head_dim));
      unrotate(plan_, work_.block.data(), static_cast<std::size_t>(plan_.head_dim));
      put_keys(out.dk, plan_.head_dim, plan_.dk_factor, place, seen ? sums.dk_nan + row : none);
      turn_keys(seen ? sums.dv + row * dv_ : nullptr, dv_, static_cast<std::size_t>(plan_.value_dim));
      put_keys(out.dv, plan_.value_dim, plan_.dv_factor, place, seen ? sums.dv_nan + row : none);
    }
  }

  /// A block of 32 rows of sums to work_.block, tokens in the lanes; zeros where there are none.
  void turn_keys(const float* rows, std::size_t padded, std::size_t dims) const {
    float* x = work_.block.data();
    if (rows == nullptr) {
      for (std::size_t i = 0; i < dims * kBlockSize; ++i) x[i] = 0.0F;
      return;
    }
    transpose(reinterpret_cast<const std::uint32_t*>(rows), padded, kBlockSize, dims,
              reinterpret_cast<std::uint32_t*>(x), kBlockSize);
  }

  void put_keys(const Output& out, std::int64_t dims, float factor, const TokenPlace& place,
                const std::int32_t* nan) const {
    float* x = work_.block.data();
    if (factor != 1.0F) scale_all(x, static_cast<std::size_t>(dims), factor);
    store_block(out, x, static_cast<std::size_t>(dims), plan_.kv_heads, place, nan, work_.rows.data());
  }

  const Plan& plan_;
  const Item& item_;
  const Document& document_;
  Workspace& work_;
  std::size_t d_;
  std::size_t dv_;
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
