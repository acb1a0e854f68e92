// Vector arithmetic shared by the kernels. Included once per instruction set.
#if defined(MXFLASH_CPU_SIMD_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_SIMD_INL
#undef MXFLASH_CPU_SIMD_INL
#else
#define MXFLASH_CPU_SIMD_INL
#endif

#include <cstddef>
#include <cstdint>
#include <numbers>

#include "cpu/scalar.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
using VU = hn::Vec<U32>;
using MF = hn::Mask<F32>;

inline constexpr F32 kF;
inline constexpr I32 kI;
inline constexpr U32 kU;
inline constexpr std::size_t kBlockSize = 32;
inline constexpr std::size_t kLanes = hn::MaxLanes(kF);

HWY_INLINE VF minus_infinity() { return hn::BitCast(kF, hn::Set(kI, static_cast<std::int32_t>(0xFF800000U))); }

/// 2^exponent, held between 2^-127, which is subnormal, and 2^127.
HWY_INLINE VF pow2(VI exponent) {
  exponent = hn::Min(hn::Max(exponent, hn::Set(kI, -127)), hn::Set(kI, 127));
  const VI bits = hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(kI, 127)));
  return hn::BitCast(kF, hn::Max(bits, hn::Set(kI, 0x00400000)));
}

/// 2^x to two ulp, for x below 128; 0 for -inf, and next to nothing below 2^-126.
HWY_INLINE VF exp2(VF x) {
  const VF held = hn::Max(x, hn::Set(kF, -127.0F));
  // Adding 1.5 2^23 rounds to an integer, which then lies in the low bits.
  const VF magic = hn::Set(kF, 12582912.0F);
  const VF shifted = hn::Add(held, magic);
  const VF f = hn::Sub(held, hn::Sub(shifted, magic));
  // Least relative error on [-1/2, 1/2]: 1.0e-7. At 0 it has to be 1 exactly: weights of 1 are, and -127 gives 0.
  VF p = hn::Set(kF, 0.0013300605351105332F);
  p = hn::MulAdd(p, f, hn::Set(kF, 0.009669691324234009F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.05550558492541313F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.24022282660007477F));
  p = hn::MulAdd(p, f, hn::Set(kF, std::numbers::ln2_v<float>));
  p = hn::MulAdd(p, f, hn::Set(kF, 1.0F));
  return hn::BitCast(kF, hn::Add(hn::BitCast(kI, p), hn::ShiftLeft<23>(hn::BitCast(kI, shifted))));
}

/// Rounds to the nearest number of a format, ties to even, saturating; a zero loses its sign.
class NearestRounder {
 public:
  explicit NearestRounder(const RoundTo& to)
      : rounds_(to.rounds),
        least_(hn::Set(kI, to.least_field)),
        magic_(hn::Set(kI, to.magic)),
        max_(hn::Set(kF, to.saturates ? to.max : 3.4028234664e38F)) {}

  HWY_INLINE VF operator()(VF x) const {
    if (!rounds_) return x;
    const VF held = hn::Max(hn::Min(x, max_), hn::Neg(max_));
    return unsaturated(held);
  }
  /// Of x that is not negative.
  HWY_INLINE VF positive(VF x) const { return rounds_ ? unsaturated(hn::Min(x, max_)) : x; }
  /// Of |x| at most the format's maximum.
  HWY_INLINE VF unsaturated(VF x) const {
    const VI field = hn::And(hn::BitCast(kI, x), hn::Set(kI, 0x7F800000));
    const VF magic = hn::BitCast(kF, hn::Add(hn::Max(field, least_), magic_));
    return hn::Sub(hn::Add(x, magic), magic);
  }
  [[nodiscard]] bool rounds() const { return rounds_; }

 private:
  bool rounds_;
  VI least_;
  VI magic_;
  VF max_;
};

/// BF16 as conversions give it, up to overflow into Inf.
HWY_INLINE VF round_bf16(VF x) {
  const VU bits = hn::BitCast(kU, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kU, 1U));
  const VU up = hn::Add(bits, hn::Add(odd, hn::Set(kU, 0x7FFFU)));
  return hn::BitCast(kF, hn::And(up, hn::Set(kU, 0xFFFF0000U)));
}

struct Wide {
  VU low;
  VU high;
};
/// 32 x 32 -> 64 bits, lane by lane; `b` is the same in all lanes.
HWY_INLINE Wide multiply_wide(VU a, VU b) {
#if HWY_TARGET == HWY_SCALAR
  const std::uint64_t product = std::uint64_t{hn::GetLane(a)} * hn::GetLane(b);
  return {hn::Set(kU, static_cast<std::uint32_t>(product)), hn::Set(kU, static_cast<std::uint32_t>(product >> 32))};
#else
  const hn::Repartition<std::uint64_t, U32> u64;
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(kU, hn::ShiftRight<32>(hn::BitCast(u64, a))), b);
  return {hn::OddEven(hn::BitCast(kU, hn::ShiftLeft<32>(odd)), hn::BitCast(kU, even)),
          hn::OddEven(hn::BitCast(kU, odd), hn::BitCast(kU, hn::ShiftRight<32>(even)))};
#endif
}

/// The place of random bits: element (row, column) of a head's operand.
struct RandomPlace {
  std::uint64_t seed = 0;
  std::uint32_t stream = 0;
  std::uint32_t head = 0;
  std::int32_t row = 0;  ///< Of the first of 32 lanes.
};

/// `random_bits` of formats.hpp for rows place.row + lane.
HWY_INLINE VU random_bits(const RandomPlace& place, std::size_t lane, std::uint32_t column) {
  VU c0 = hn::Set(kU, column);
  VU c1 = hn::BitCast(kU, hn::Iota(kI, place.row + static_cast<std::int32_t>(lane)));
  VU c2 = hn::Set(kU, place.head);
  VU c3 = hn::Set(kU, place.stream);
  auto key0 = static_cast<std::uint32_t>(place.seed);
  auto key1 = static_cast<std::uint32_t>(place.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = multiply_wide(c0, hn::Set(kU, 0xD2511F53U));
    const Wide p1 = multiply_wide(c2, hn::Set(kU, 0xCD9E8D57U));
    c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(kU, key0));
    c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(kU, key1));
    c1 = p1.low;
    c3 = p0.low;
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return c0;
}

/// Rounds away from zero when the random bits are below the remainder times 2^32, saturating.
class StochasticRounder {
 public:
  explicit StochasticRounder(const RoundTo& to)
      : least_(hn::Set(kI, to.least_field)), mantissa_(to.mantissa_bits), max_(hn::Set(kF, to.max)) {}

  HWY_INLINE VF operator()(VF x, VU random) const {
    const VF size = hn::Min(hn::Abs(x), max_);
    const VI field = hn::Max(hn::And(hn::BitCast(kI, size), hn::Set(kI, 0x7F800000)), least_);
    // One unit in the last place of the format, and its inverse: both powers of two.
    const VI ulp_exponent = hn::Sub(hn::ShiftRight<23>(field), hn::Set(kI, 127 + mantissa_));
    const VF units = hn::Mul(size, pow2(hn::Neg(ulp_exponent)));
    const VF kept = hn::Floor(units);
    const VF part = hn::Mul(hn::Sub(units, kept), hn::Set(kF, 65536.0F));
    const VF part_high = hn::Floor(part);
    const VI high = hn::ConvertTo(kI, part_high);
    const VI low = hn::ConvertTo(kI, hn::Floor(hn::Mul(hn::Sub(part, part_high), hn::Set(kF, 65536.0F))));
    const VI random_high = hn::BitCast(kI, hn::ShiftRight<16>(random));
    const VI random_low = hn::BitCast(kI, hn::And(random, hn::Set(kU, 0xFFFFU)));
    const auto up = hn::Or(hn::Lt(random_high, high), hn::And(hn::Eq(random_high, high), hn::Lt(random_low, low)));
    const VF rounded = hn::Add(kept, hn::IfThenElseZero(hn::RebindMask(kF, up), hn::Set(kF, 1.0F)));
    return hn::CopySign(hn::Min(hn::Mul(rounded, pow2(ulp_exponent)), max_), x);
  }

 private:
  VI least_;
  int mantissa_;
  VF max_;
};

#if HWY_TARGET != HWY_SCALAR
/// 128-bit block b of `v` to out + 4 b stride.
template <class D>
HWY_INLINE void store_blocks(D d, hn::Vec<D> v, std::uint32_t* out, std::size_t stride) {
  if constexpr (hn::MaxLanes(d) == 4) {
    hn::StoreU(v, d, out);
  } else {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), out, stride);
    store_blocks(half, hn::UpperHalf(half, v), out + hn::MaxLanes(d) / 2 * stride, stride);
  }
}

/// 4 rows by as many columns as a vector has lanes.
template <class D>
HWY_INLINE void transpose_strip(D d, const std::uint32_t* in, std::size_t in_stride, std::uint32_t* out,
                                std::size_t out_stride) {
  const hn::Repartition<std::uint64_t, D> u64;
  const auto a = hn::LoadU(d, in);
  const auto b = hn::LoadU(d, in + in_stride);
  const auto x = hn::LoadU(d, in + 2 * in_stride);
  const auto y = hn::LoadU(d, in + 3 * in_stride);
  const auto ab_low = hn::BitCast(u64, hn::InterleaveLower(d, a, b));
  const auto ab_high = hn::BitCast(u64, hn::InterleaveUpper(d, a, b));
  const auto xy_low = hn::BitCast(u64, hn::InterleaveLower(d, x, y));
  const auto xy_high = hn::BitCast(u64, hn::InterleaveUpper(d, x, y));
  store_blocks(d, hn::BitCast(d, hn::InterleaveLower(u64, ab_low, xy_low)), out, out_stride);
  store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(u64, ab_low, xy_low)), out + out_stride, out_stride);
  store_blocks(d, hn::BitCast(d, hn::InterleaveLower(u64, ab_high, xy_high)), out + 2 * out_stride, out_stride);
  store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(u64, ab_high, xy_high)), out + 3 * out_stride, out_stride);
}
#endif

/// out[c][r] = in[r][c]; rows and columns are multiples of 4.
HWY_INLINE void transpose(const std::uint32_t* in, std::size_t in_stride, std::size_t rows, std::size_t columns,
                          std::uint32_t* out, std::size_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
#else
  const hn::FixedTag<std::uint32_t, 4> four;
  for (std::size_t r = 0; r < rows; r += 4) {
    std::size_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      transpose_strip(kU, in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    }
    for (; c < columns; c += 4) {
      transpose_strip(four, in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    }
  }
#endif
}

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
