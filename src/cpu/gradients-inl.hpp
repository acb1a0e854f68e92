// Quantization of P and dS for the backward's products: tiles of 32 keys x 32 queries in FP32, queries in the lanes,
// masked pairs zero.
#if defined(MXFLASH_CPU_GRADIENTS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_GRADIENTS_INL
#undef MXFLASH_CPU_GRADIENTS_INL
#else
#define MXFLASH_CPU_GRADIENTS_INL
#endif

#include "cpu/softmax-inl.hpp"
#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Exponents of 32 tokens that fold into the weights. None: they do not fold.
struct FoldSide {
  const std::int32_t* exponents = nullptr;
  const std::int32_t* poisoned = nullptr;
  [[nodiscard]] std::int32_t at(std::size_t i) const { return exponents == nullptr ? 0 : exponents[i]; }
};

/// In place, to the values of codes times scales. `column` is the first key.
HWY_INLINE void quantize_tile(const Operand& operand, const RandomPlace& random, std::int32_t column, float* tile) {
  if (operand.encoding == Encoding::f32) return;
  if (operand.encoding == Encoding::bf16) {
    for (std::size_t i = 0; i < kTileSize; i += kLanes) {
      hn::Store(round_bf16(hn::Load(kF, tile + i)), kF, tile + i);
    }
    return;
  }
  if (operand.block.rows == 0) {  // static
    const VF encode = pow2(hn::Set(kI, static_exponent(operand)));
    const VF decode = pow2(hn::Set(kI, -static_exponent(operand)));
    const NearestRounder round(round_to(operand.encoding));
    for (std::size_t i = 0; i < kTileSize; i += kLanes) {
      hn::Store(hn::Mul(round(hn::Mul(hn::Load(kF, tile + i), encode)), decode), kF, tile + i);
    }
    return;
  }
  quantize_rows(operand, random, static_cast<std::uint32_t>(column), tile, kBlockSize,
                static_cast<std::size_t>(operand.block.columns), static_cast<std::size_t>(operand.block.rows), {});
}

/// tile[key][lane] *= factor[key].
HWY_INLINE void scale_keys(float* tile, const float* factor) {
  for (std::size_t key = 0; key < kBlockSize; ++key) {
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      float* at = tile + key * kBlockSize + lane;
      hn::Store(hn::Mul(hn::Load(kF, at), hn::Set(kF, factor[key])), kF, at);
    }
  }
}

HWY_INLINE void powers_of_two(const std::int32_t* exponents, std::int32_t sign, std::int32_t base, float* out) {
  for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
    const VI exponent = hn::Sub(hn::LoadU(kI, exponents + i), hn::Set(kI, base));
    hn::StoreU(pow2(hn::Mul(exponent, hn::Set(kI, sign))), kF, out + i);
  }
}

/// One set of codes of dS, and what each product makes of them.
class SharedGradient {
 public:
  /// `codes` is room for a tile.
  SharedGradient(const Operand& operand, const RandomPlace& random, const Tile& tile, const Rows& rows, const float* ds,
                 float* codes)
      : tile_(tile), rows_(rows), by_row_(operand.block.rows == 1), round_(round_to(operand.encoding)), codes_(codes) {
    for (std::size_t i = 0; i < kTileSize; i += kLanes) hn::Store(hn::Load(kF, ds + i), kF, codes_ + i);
    float unit[kBlockSize];  // The codes stay codes.
    BlockScales scales;
    scales.exponent = exponent_;
    scales.decode = unit;
    quantize_rows(operand, random, static_cast<std::uint32_t>(tile.key), codes_, kBlockSize, kBlockSize,
                  static_cast<std::size_t>(operand.block.rows), scales);
  }

  /// Relative to the largest exponent of K in the block, or among the keys that a row sees.
  HWY_INLINE void for_dq(const FoldSide& k, std::int32_t keys, float* out) const {
    std::int32_t top[kBlockSize];
    tops_of_keys(k, keys, top);
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VI most = hn::LoadU(kI, top + lane);
      // Two factors: the sum of the exponents may be below what one can hold.
      const VF of_scale = pow2(hn::LoadU(kI, exponent_ + lane));
      const VF of_keys = pow2(most);
      for (std::size_t key = 0; key < kBlockSize; ++key) {
        const VI shift = hn::Min(hn::Sub(hn::Set(kI, k.at(key)), most), hn::Zero(kI));
        const VF code = hn::Load(kF, codes_ + key * kBlockSize + lane);
        const VF moved = hn::Mul(round_.unsaturated(hn::Mul(code, pow2(shift))), of_scale);
        hn::Store(hn::Mul(moved, of_keys), kF, out + key * kBlockSize + lane);
      }
    }
  }

  /// Relative to the largest exponent of Q, and of the row's scale where rows have their own, among the queries that
  /// see a key of the block.
  HWY_INLINE void for_dk(const FoldSide& q, float* out) const {
    std::int32_t own[kBlockSize];
    std::int32_t top = 0;
    bool any = false;
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      own[lane] = q.at(lane) + (by_row_ ? exponent_[lane] : 0);
      const bool sees =
          rows_.begin[lane] < tile_.key + 32 && rows_.end[lane] > tile_.key && rows_.begin[lane] < rows_.end[lane];
      if (!sees || q.poisoned[lane] != 0) continue;
      top = any ? HWY_MAX(top, own[lane]) : own[lane];
      any = true;
    }
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VI shift = hn::Min(hn::Sub(hn::LoadU(kI, own + lane), hn::Set(kI, top)), hn::Zero(kI));
      const VF encode = pow2(shift);
      const VF of_scale = by_row_ ? hn::Set(kF, 1.0F) : pow2(hn::LoadU(kI, exponent_ + lane));
      const VF of_queries = pow2(hn::Set(kI, top));
      for (std::size_t key = 0; key < kBlockSize; ++key) {
        const VF code = hn::Load(kF, codes_ + key * kBlockSize + lane);
        const VF moved = hn::Mul(round_.unsaturated(hn::Mul(code, encode)), of_scale);
        hn::Store(hn::Mul(moved, of_queries), kF, out + key * kBlockSize + lane);
      }
    }
  }

 private:
  HWY_INLINE void tops_of_keys(const FoldSide& k, std::int32_t keys, std::int32_t* top) const {
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      bool any = false;
      top[lane] = 0;
      if (lane > 0 && (!by_row_ || !tile_.masked)) {
        top[lane] = top[0];
        continue;
      }
      for (std::int32_t key = 0; key < keys; ++key) {
        const std::int32_t position = tile_.key + key;
        const auto i = static_cast<std::size_t>(key);
        if (by_row_ && (position < rows_.begin[lane] || position >= rows_.end[lane])) continue;
        if (k.poisoned[i] != 0) continue;
        top[lane] = any ? HWY_MAX(top[lane], k.at(i)) : k.at(i);
        any = true;
      }
    }
  }

  const Tile& tile_;
  const Rows& rows_;
  bool by_row_;
  NearestRounder round_;
  std::int32_t exponent_[kBlockSize] = {};
  float* codes_;
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
