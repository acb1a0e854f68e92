// P of one block of 32 queries against all keys it sees: tiles of 32 keys x 32 queries, queries in the lanes.
#if defined(MXFLASH_CPU_SOFTMAX_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_SOFTMAX_INL
#undef MXFLASH_CPU_SOFTMAX_INL
#else
#define MXFLASH_CPU_SOFTMAX_INL
#endif

#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

inline constexpr std::size_t kTileSize = kBlockSize * kBlockSize;

/// A tile of keys as one block of queries meets it.
struct Tile {
  std::int32_t key = 0;                 ///< First key, document-relative.
  bool masked = false;                  ///< Some pair of it is not visible.
  bool cut = false;                     ///< Takes the operands of cut tiles.
  const std::int32_t* folds = nullptr;  ///< V's exponents; none: V does not fold here.
};

/// What a row of P needs to know, by lane. t includes V's exponent, s does not.
struct Rows {
  std::int32_t begin[kBlockSize] = {};  ///< Visible keys.
  std::int32_t end[kBlockSize] = {};
  float largest_t[kBlockSize] = {};
  float largest_s[kBlockSize] = {};
  float largest_fold[kBlockSize] = {};
  float reference[kBlockSize] = {};     ///< m: the least integer not below t.
  float reference_s[kBlockSize] = {};   ///< The same of s: what l is held relative to.
  std::int32_t shift[kBlockSize] = {};  ///< m - reference_s.
  double sum[kBlockSize] = {};          ///< l 2^shift, times Plan.unit.
  double plain_sum[kBlockSize] = {};    ///< The same before quantization; only with WeightRule.counts_plain.
  float most_fold = 0;                  ///< Largest of largest_fold.
};

/// How P is quantized on one kind of tile.
struct WeightRule {
  RoundTo to;
  bool in_groups = false;
  ScaleLimit limit;      ///< Of groups.
  float log2_scale = 0;  ///< Static P is encoded times 2^this.
  float factor = 1;      ///< From a code to units of Plan.unit.
  float smallest_normal = 0;
  Exponential exponential = Exponential::exact;
  bool is_e2m1 = false;
  float unit = 1;
  bool counts_plain = false;
  bool early = false;  ///< E2M1 in groups: codes may be made before the row's maximum is known.
};

struct ExactExponential {
  static HWY_INLINE VF of(VF t, std::size_t /*pair*/) { return exp2(t); }
};
/// Mitchell's: the logarithm's fixed point read as a float.
struct MitchellExponential {
  static HWY_INLINE VF of(VF t, std::size_t /*pair*/) {
    const VF held = hn::Max(hn::Sub(t, hn::Set(kF, 0.0695F)), hn::Set(kF, -127.0F));
    const VF whole = hn::Floor(held);
    const VI fraction = hn::ConvertTo(kI, hn::Mul(hn::Sub(held, whole), hn::Set(kF, 8388608.0F)));
    const VI field = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(kI, whole), hn::Set(kI, 127)));
    return hn::IfThenElseZero(hn::Gt(held, hn::Set(kF, -127.0F)), hn::BitCast(kF, hn::Add(field, fraction)));
  }
};
/// Schraudolph's, in the bits of a BF16, for five of eight pairs of keys.
struct SchraudolphExponential {
  static HWY_INLINE VF of(VF t, std::size_t pair) {
    if (pair % 8 >= 5) return exp2(t);
    const VF held = hn::Max(t, hn::Set(kF, -127.0F));
    const VF bits = hn::MulAdd(hn::Add(held, hn::Set(kF, 127.0F)), hn::Set(kF, 128.0F), hn::Set(kF, -7.0F));
    const VI clamped = hn::Min(hn::Max(hn::NearestInt(bits), hn::Zero(kI)), hn::Set(kI, 32639));
    return hn::BitCast(kF, hn::ShiftLeft<16>(clamped));
  }
};

/// The values of the codes of 2^t by an exponential.
template <class Exp>
class RoundedExponential {
 public:
  using Exponential = Exp;
  explicit RoundedExponential(const WeightRule& rule) : round_(rule.to) {}
  HWY_INLINE VF of(VF t, std::size_t pair) const { return round_.positive(Exp::of(t, pair)); }

 private:
  NearestRounder round_;
};

#if HWY_TARGET == HWY_AVX3

/// Codes of E2M1 without an exponential: t against the logarithm of the tie between two codes. Half octaves hold one
/// tie each at most, and 16 of them are all there are below 3, beyond which no weight lies. The thresholds are the
/// largest FP32 numbers whose 2^t, rounded to FP32, still has the lower code: what the exact exponential gives, bit for
/// bit.
class E2m1Logarithm {
 public:
  using Exponential = ExactExponential;
  /// By the integer nearest to 2 t, modulo 16: 0 to 7, then -8 to -1.
  using Table = std::int32_t[16];

  explicit E2m1Logarithm(const WeightRule& /*rule*/) {}

  struct Place {
    __m512i half_octave;  ///< Modulo 16; bits above are of no account.
    __mmask16 above;      ///< Of the tie.
  };
  static HWY_INLINE Place place(VF t) {
    // Adding 1.5 2^22 rounds to halves, which then lie in the low bits.
    const VF held = hn::Max(t, hn::Set(kF, -4.0F));
    const VI half_octave = hn::BitCast(kI, hn::Add(held, hn::Set(kF, 6291456.0F)));
    const __m512 tie = _mm512_permutexvar_ps(half_octave.raw, hn::LoadU(kF, kTies).raw);
    return {half_octave.raw, _mm512_cmp_ps_mask(t.raw, tie, _CMP_GT_OQ)};
  }
  /// `low` and `high`: what codes below and above the tie of a half octave become.
  static HWY_INLINE VI look_up(const Place& place, VI low, VI high) {
    const __m512i below = _mm512_permutexvar_epi32(place.half_octave, low.raw);
    return VI{_mm512_mask_permutexvar_epi32(below, place.above, place.half_octave, high.raw)};
  }
  HWY_INLINE VF of(VF t, std::size_t /*pair*/) const {
    const VF twice = hn::ConvertTo(kF, look_up(place(t), hn::LoadU(kI, kTwiceBelow), hn::LoadU(kI, kTwiceAbove)));
    return hn::Mul(twice, hn::Set(kF, 0.5F));
  }

  /// Twice the codes' values.
  static constexpr Table kTwiceBelow = {2, 2, 3, 4, 6, 8, 12, 12, 0, 0, 0, 0, 0, 1, 1, 1};
  static constexpr Table kTwiceAbove = {2, 3, 4, 6, 8, 12, 12, 12, 0, 0, 0, 0, 1, 1, 1, 2};

 private:
  static constexpr float kNone = 1e30F;
  static constexpr float kTies[16] = {
      kNone, 0x1.49a788p-2F, 0x1.9d5d9ep-1F, 0x1.5269e2p+0F, 0x1.ceaecep+0F, 0x1.2934fp+1F, kNone, kNone,
      kNone, kNone,          kNone,          kNone,          -2.0F,          kNone,         kNone, -0x1.a8ff9cp-2F};
};

#endif

HWY_INLINE void start_rows(Rows& rows) {
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    hn::StoreU(minus_infinity(), kF, rows.largest_t + lane);
    hn::StoreU(minus_infinity(), kF, rows.largest_s + lane);
    hn::StoreU(hn::Set(kF, -127.0F), kF, rows.largest_fold + lane);
  }
  for (std::size_t lane = 0; lane < kBlockSize; ++lane) rows.sum[lane] = rows.plain_sum[lane] = 0;
}

/// The largest exponent of a tile that every lane sees.
HWY_INLINE float largest_fold(const Tile& tile) {
  std::int32_t most = tile.folds[0];
  for (std::size_t key = 1; key < kBlockSize; ++key) most = HWY_MAX(most, tile.folds[key]);
  return static_cast<float>(most);
}

/// Dot products to logits in place, and their maxima, where every lane sees every key.
HWY_INLINE void score_whole(const Tile& tile, float factor, float* tile_scores, Rows& rows) {
  const VF by = hn::Set(kF, factor);
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    VF largest_t = hn::LoadU(kF, rows.largest_t + lane);
    VF largest_s = hn::LoadU(kF, rows.largest_s + lane);
    for (std::size_t key = 0; key < kBlockSize; ++key) {
      float* at = tile_scores + key * kBlockSize + lane;
      const VF s = hn::Mul(hn::Load(kF, at), by);
      largest_s = hn::Max(largest_s, s);
      if (tile.folds == nullptr) {
        largest_t = hn::Max(largest_t, s);
        hn::Store(s, kF, at);
        continue;
      }
      const VF t = hn::Add(s, hn::Set(kF, static_cast<float>(tile.folds[key])));
      largest_t = hn::Max(largest_t, t);
      hn::Store(t, kF, at);
    }
    hn::StoreU(largest_t, kF, rows.largest_t + lane);
    hn::StoreU(largest_s, kF, rows.largest_s + lane);
    if (tile.folds == nullptr) continue;
    const VF fold = hn::Max(hn::LoadU(kF, rows.largest_fold + lane), hn::Set(kF, largest_fold(tile)));
    hn::StoreU(fold, kF, rows.largest_fold + lane);
  }
}

/// The same with -inf where masked: the same bits elsewhere.
HWY_INLINE void score_masked(const Tile& tile, float factor, float* tile_scores, Rows& rows) {
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    const VI before = hn::Sub(hn::LoadU(kI, rows.begin + lane), hn::Set(kI, 1));
    const VI end = hn::LoadU(kI, rows.end + lane);
    VF largest_t = hn::LoadU(kF, rows.largest_t + lane);
    VF largest_s = hn::LoadU(kF, rows.largest_s + lane);
    VF most_fold = hn::LoadU(kF, rows.largest_fold + lane);
    for (std::size_t key = 0; key < kBlockSize; ++key) {
      float* at = tile_scores + key * kBlockSize + lane;
      const VI position = hn::Set(kI, tile.key + static_cast<std::int32_t>(key));
      const MF visible = hn::RebindMask(kF, hn::And(hn::Gt(position, before), hn::Lt(position, end)));
      const VF fold = hn::Set(kF, tile.folds == nullptr ? 0.0F : static_cast<float>(tile.folds[key]));
      const VF s = hn::IfThenElse(visible, hn::Mul(hn::Load(kF, at), hn::Set(kF, factor)), minus_infinity());
      const VF t = hn::Add(s, fold);
      hn::Store(t, kF, at);
      largest_t = hn::Max(largest_t, t);
      largest_s = hn::Max(largest_s, s);
      if (tile.folds == nullptr) continue;
      most_fold = hn::Max(most_fold, hn::IfThenElse(visible, fold, hn::Set(kF, -127.0F)));
    }
    hn::StoreU(largest_t, kF, rows.largest_t + lane);
    hn::StoreU(largest_s, kF, rows.largest_s + lane);
    hn::StoreU(most_fold, kF, rows.largest_fold + lane);
  }
}

HWY_INLINE void score_tile(const Tile& tile, float factor, float* tile_scores, Rows& rows) {
  if (tile.masked) {
    score_masked(tile, factor, tile_scores, rows);
  } else {
    score_whole(tile, factor, tile_scores, rows);
  }
}

/// Replaces sums that FP32 could not hold by `small` times 2^128, held at `most` where that is beyond FP32 too.
HWY_INLINE void restore_scores(const float* small, float most, float* tile_scores) {
  const VF up = hn::Set(kF, 0x1p64F);
  for (std::size_t i = 0; i < kTileSize; i += kLanes) {
    const VF s = hn::Load(kF, tile_scores + i);
    const VF value = hn::Mul(hn::Mul(hn::Load(kF, small + i), up), up);
    const VF held = hn::Max(hn::Min(value, hn::Set(kF, most)), hn::Set(kF, -most));
    hn::Store(hn::IfThenElse(hn::Le(hn::Abs(s), hn::Set(kF, most)), s, held), kF, tile_scores + i);
  }
}

/// The row references, from the maxima.
HWY_INLINE void reference_rows(Rows& rows) {
  VF most = hn::Set(kF, -127.0F);
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    const VF t = hn::LoadU(kF, rows.largest_t + lane);
    const VF s = hn::LoadU(kF, rows.largest_s + lane);
    const VF m = hn::IfThenElseZero(hn::Gt(t, minus_infinity()), hn::Ceil(t));
    const VF m_s = hn::IfThenElseZero(hn::Gt(s, minus_infinity()), hn::Ceil(s));
    hn::StoreU(m, kF, rows.reference + lane);
    hn::StoreU(m_s, kF, rows.reference_s + lane);
    hn::StoreU(hn::NearestInt(hn::Sub(m, m_s)), kI, rows.shift + lane);
    most = hn::Max(most, hn::LoadU(kF, rows.largest_fold + lane));
  }
  rows.most_fold = hn::GetLane(hn::MaxOfLanes(kF, most));
}

HWY_INLINE bool overflows(const Rows& rows) {
  VF most = minus_infinity();
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    most = hn::Max(most, hn::LoadU(kF, rows.largest_t + lane));
  }
  return hn::GetLane(hn::MaxOfLanes(kF, most)) > kHeld;
}

HWY_INLINE void hold_scores(float* scores, std::size_t count, Rows& rows) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    hn::Store(hn::Min(hn::Load(kF, scores + i), hn::Set(kF, kHeld)), kF, scores + i);
  }
  for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
    rows.largest_t[lane] = HWY_MIN(rows.largest_t[lane], kHeld);
    rows.largest_s[lane] = HWY_MIN(rows.largest_s[lane], kHeld);
  }
}

/// log2 of what divides the weights before they are rounded, and the factor from their codes, by lane.
struct TileScales {
  float log2_divisor[kBlockSize] = {};
  float factor[kBlockSize] = {};
};

/// log2 of the scale of a group whose largest t is g.
HWY_INLINE VF group_exponent(const WeightRule& rule, VF g) {
  const VF octave = hn::Floor(g);
  const Scales of_octave = power_scales(exp2(hn::Sub(g, octave)), rule.limit);
  return hn::Add(octave, hn::ConvertTo(kF, of_octave.exponent));
}

HWY_INLINE TileScales tile_scales(const WeightRule& rule, const float* tile_scores, const Rows& rows) {
  TileScales out;
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    const VF m = hn::LoadU(kF, rows.reference + lane);
    if (!rule.in_groups) {
      hn::StoreU(hn::Sub(m, hn::Set(kF, rule.log2_scale)), kF, out.log2_divisor + lane);
      hn::StoreU(hn::Set(kF, rule.factor), kF, out.factor + lane);
      continue;
    }
    VF g = minus_infinity();
    for (std::size_t key = 0; key < kBlockSize; ++key) {
      g = hn::Max(g, hn::Load(kF, tile_scores + key * kBlockSize + lane));
    }
    const MF any = hn::Gt(g, minus_infinity());
    g = hn::IfThenElse(any, g, m);
    const VF scale = hn::IfThenElse(any, hn::Max(group_exponent(rule, g), hn::Sub(m, hn::Set(kF, 127.0F))), m);
    hn::StoreU(scale, kF, out.log2_divisor + lane);
    hn::StoreU(hn::Mul(pow2(hn::NearestInt(hn::Sub(scale, m))), hn::Set(kF, rule.unit)), kF, out.factor + lane);
  }
  return out;
}

/// Powers of two that take P to what a key counts in l: 2^(base - fold_j), and 2^(shift - base) by lane.
struct FoldFactors {
  float by_key[kBlockSize] = {};
  float by_lane[kBlockSize] = {};
  bool plain = true;  ///< All of them finite powers of two, no key of the tile light.
};

HWY_INLINE FoldFactors fold_factors(const Tile& tile, const Rows& rows) {
  constexpr std::int32_t kSpread = 60;  // keeps products of both factors and a weight inside FP32
  FoldFactors out;
  if (tile.folds == nullptr) {
    // The row's other tiles may fold, so it may have a shift.
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
      hn::StoreU(hn::Set(kF, 1.0F), kF, out.by_key + i);
      hn::StoreU(pow2(hn::LoadU(kI, rows.shift + i)), kF, out.by_lane + i);
    }
    return out;
  }
  std::int32_t least = tile.folds[0];
  std::int32_t base = tile.folds[0];
  for (std::size_t key = 1; key < kBlockSize; ++key) {
    least = HWY_MIN(least, tile.folds[key]);
    base = HWY_MAX(base, tile.folds[key]);
  }
  out.plain = least > -127 && least + kLightFold > static_cast<std::int32_t>(rows.most_fold) && base - least <= kSpread;
  for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
    const VI fold = hn::LoadU(kI, tile.folds + i);
    hn::StoreU(pow2(hn::Sub(hn::Set(kI, base), fold)), kF, out.by_key + i);
    hn::StoreU(pow2(hn::Sub(hn::LoadU(kI, rows.shift + i), hn::Set(kI, base))), kF, out.by_lane + i);
  }
  return out;
}

/// P of two keys: its codes, codes times factors, and what the keys count in l.
struct WeighedPair {
  VF even_code, odd_code;
  VF even, odd;
  VF even_counted, odd_counted;
};

/// P to `sink`, and its share of the row sums: `Sink::begin(scales)`, then `Sink::put(pair, lane, weighed)`.
template <class Codes, class Sink>
HWY_INLINE void weigh_plain(const WeightRule& rule, const TileScales& scales, const FoldFactors& folds,
                            const float* tile_scores, const Sink& sink, Rows& rows) {
  const Codes codes(rule);
  float counted[kBlockSize];
  sink.begin(scales);
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    const VF divisor = hn::LoadU(kF, scales.log2_divisor + lane);
    const VF factor = hn::LoadU(kF, scales.factor + lane);
    const VF by_lane = hn::LoadU(kF, folds.by_lane + lane);
    VF sum = hn::Zero(kF);
    for (std::size_t pair = 0; pair < kBlockSize / 2; ++pair) {
      const float* at = tile_scores + 2 * pair * kBlockSize + lane;
      const VF even_code = codes.of(hn::Sub(hn::Load(kF, at), divisor), pair);
      const VF odd_code = codes.of(hn::Sub(hn::Load(kF, at + kBlockSize), divisor), pair);
      VF even = even_code;
      VF odd = odd_code;
      if (rule.in_groups || rule.factor != 1.0F) {
        even = hn::Mul(even, factor);
        odd = hn::Mul(odd, factor);
      }
      const VF even_counted = hn::Mul(even, hn::Set(kF, folds.by_key[2 * pair]));
      const VF odd_counted = hn::Mul(odd, hn::Set(kF, folds.by_key[2 * pair + 1]));
      sum = hn::Add(hn::Add(sum, even_counted), odd_counted);
      sink.put(pair, lane,
               {even_code, odd_code, even, odd, hn::Mul(even_counted, by_lane), hn::Mul(odd_counted, by_lane)});
    }
    hn::StoreU(hn::Mul(sum, by_lane), kF, counted + lane);
  }
  for (std::size_t lane = 0; lane < kBlockSize; ++lane) rows.sum[lane] += static_cast<double>(counted[lane]);
}

/// One key of weigh_any: P, and what it counts in l before and after quantization. Always initialized as a whole: g++
/// compiles an implicit constructor for the baseline, which NEON's vectors do not accept.
struct Weighed {
  VF code;
  VF p;
  VF counted;
  VF plain;
};

template <class Codes>
HWY_INLINE Weighed weigh_key(const WeightRule& rule, const Codes& codes, const TileScales& scales, const Tile& tile,
                             std::size_t key, std::size_t lane, VF t, const Rows& rows) {
  const std::int32_t fold = tile.folds == nullptr ? 0 : tile.folds[key];
  const VF code = codes.of(hn::Sub(t, hn::LoadU(kF, scales.log2_divisor + lane)), key / 2);
  const VF p = hn::Mul(code, hn::LoadU(kF, scales.factor + lane));
  const VF s = hn::Sub(t, hn::Set(kF, static_cast<float>(fold)));
  const VF plain = hn::Mul(Codes::Exponential::of(hn::Sub(s, hn::LoadU(kF, rows.reference_s + lane)), key / 2),
                           hn::Set(kF, rule.unit));
  VF counted = hn::Mul(p, pow2(hn::Sub(hn::LoadU(kI, rows.shift + lane), hn::Set(kI, fold))));
  if (tile.folds != nullptr && rule.smallest_normal > 0) {
    const VF light = hn::Set(kF, static_cast<float>(fold + kLightFold));
    MF is_light = hn::Le(light, hn::LoadU(kF, rows.largest_fold + lane));
    if (fold == -127) is_light = hn::Eq(light, light);
    is_light = hn::And(is_light, hn::Lt(code, hn::Set(kF, rule.smallest_normal)));
    counted = hn::IfThenElse(is_light, plain, counted);
  }
  return {code, p, counted, plain};
}

/// The same for any tile, light keys and far exponents included. Where both apply they give the same bits: a factor of
/// a power of two rounds nothing.
template <class Codes, class Sink>
HWY_INLINE void weigh_any(const WeightRule& rule, const TileScales& scales, const Tile& tile, const float* tile_scores,
                          const Sink& sink, Rows& rows) {
  const Codes codes(rule);
  float counted[kBlockSize];
  float plain[kBlockSize];
  sink.begin(scales);
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    VF sum = hn::Zero(kF);
    VF plain_sum = hn::Zero(kF);
    for (std::size_t pair = 0; pair < kBlockSize / 2; ++pair) {
      const float* at = tile_scores + 2 * pair * kBlockSize + lane;
      const Weighed even = weigh_key(rule, codes, scales, tile, 2 * pair, lane, hn::Load(kF, at), rows);
      const Weighed odd = weigh_key(rule, codes, scales, tile, 2 * pair + 1, lane, hn::Load(kF, at + kBlockSize), rows);
      sum = hn::Add(hn::Add(sum, even.counted), odd.counted);
      plain_sum = hn::Add(hn::Add(plain_sum, even.plain), odd.plain);
      sink.put(pair, lane, {even.code, odd.code, even.p, odd.p, even.counted, odd.counted});
    }
    hn::StoreU(sum, kF, counted + lane);
    hn::StoreU(plain_sum, kF, plain + lane);
  }
  for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
    rows.sum[lane] += static_cast<double>(counted[lane]);
    rows.plain_sum[lane] += static_cast<double>(plain[lane]);
  }
}

template <class Codes, class Sink>
HWY_INLINE void weigh_with(const WeightRule& rule, const Tile& tile, const float* tile_scores, const Sink& sink,
                           Rows& rows) {
  const TileScales scales = tile_scales(rule, tile_scores, rows);
  const FoldFactors folds = fold_factors(tile, rows);
  if (folds.plain && !rule.counts_plain) {
    weigh_plain<Codes>(rule, scales, folds, tile_scores, sink, rows);
  } else {
    weigh_any<Codes>(rule, scales, tile, tile_scores, sink, rows);
  }
}

template <class Sink>
HWY_INLINE void weigh_tile(const WeightRule& rule, const Tile& tile, const float* tile_scores, const Sink& sink,
                           Rows& rows) {
#if HWY_TARGET == HWY_AVX3
  if (rule.is_e2m1 && rule.exponential == Exponential::exact) {
    return weigh_with<E2m1Logarithm>(rule, tile, tile_scores, sink, rows);
  }
#endif
  switch (rule.exponential) {
    case Exponential::exact:
      return weigh_with<RoundedExponential<ExactExponential>>(rule, tile, tile_scores, sink, rows);
    case Exponential::mitchell:
      return weigh_with<RoundedExponential<MitchellExponential>>(rule, tile, tile_scores, sink, rows);
    case Exponential::schraudolph:
      return weigh_with<RoundedExponential<SchraudolphExponential>>(rule, tile, tile_scores, sink, rows);
  }
}

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
