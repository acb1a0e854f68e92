// S = Q K^T on the codes themselves, with the interface of scores-inl.hpp. Twice an E2M1 value is a small integer, so
// 4-bit blocks multiply exactly in int8 (VNNI), their scales join in FP32.
#if defined(MXFLASH_CPU_INT8_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_INT8_INL
#undef MXFLASH_CPU_INT8_INL
#else
#define MXFLASH_CPU_INT8_INL
#endif

#include "cpu/scores-inl.hpp"
#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3

/// sum += four products of bytes in each word (VNNI). Not the intrinsic: of that, g++ 12 copies each sum twice a step,
/// and runs out of registers.
HWY_INLINE void add_dot(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

/// The codes times `factors` [blocks of `width` dims][32], as bytes: word [d / 4][lane] holds four dims, each plus
/// `bias`.
HWY_INLINE void pack_quads(const TokenBlock& block, const float* factors, std::int32_t bias, std::uint32_t* out) {
  const VI byte = hn::Set(kI, 0xFF);
  for (std::size_t quad = 0; quad < block.dims / 4; ++quad) {
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VF factor = hn::LoadU(kF, factors + 4 * quad / block.width * kBlockSize + lane);
      VI word = hn::Zero(kI);
      for (std::size_t i = 4; i-- > 0;) {
        const VF value = hn::Load(kF, block.x + (4 * quad + i) * kBlockSize + lane);
        const VI twice = hn::Add(hn::NearestInt(hn::Mul(value, factor)), hn::Set(kI, bias));
        word = hn::Or(hn::ShiftLeft<8>(word), hn::And(twice, byte));
      }
      hn::StoreU(hn::BitCast(kU, word), kU, out + quad * kBlockSize + lane);
    }
  }
}

/// Rows of A against 32 lanes of B in int32: word by word, one unsigned byte by one signed.
template <std::size_t Rows>
class Int8Sums {
 public:
  static constexpr std::size_t kRows = Rows;

  HWY_INLINE void start(VI low, VI high) {
    for (std::size_t r = 0; r < kRows; ++r) {
      low_[r] = low;
      high_[r] = high;
    }
  }
  /// Which of the two is unsigned: A's rows or B's lanes.
  struct UnsignedRows {
    static HWY_INLINE void dot(__m512i& sum, __m512i row, __m512i lanes) { add_dot(sum, row, lanes); }
  };
  struct UnsignedLanes {
    static HWY_INLINE void dot(__m512i& sum, __m512i row, __m512i lanes) { add_dot(sum, lanes, row); }
  };
  template <class Signs>
  HWY_INLINE void add(const std::uint8_t* a, std::size_t a_stride, const std::uint32_t* b, std::size_t words) {
    for (std::size_t w = 0; w < words; ++w) {
      const auto* lanes = reinterpret_cast<const std::int32_t*>(b) + w * kBlockSize;
      const __m512i b_low = hn::LoadU(kI, lanes).raw;
      const __m512i b_high = hn::LoadU(kI, lanes + kLanes).raw;
      for (std::size_t r = 0; r < kRows; ++r) {
        const __m512i row = word_of(a + r * a_stride + 4 * w);
        Signs::dot(low_[r].raw, row, b_low);
        Signs::dot(high_[r].raw, row, b_high);
      }
    }
  }
  /// t [rows][32] = sums times `lanes` times `rows`, and `largest` [2] the larger of itself and those.
  HWY_INLINE void scale_to(const VF* lanes, const float* rows, float* t, VF* largest) const {
    for (std::size_t r = 0; r < kRows; ++r) {
      const VF by_row = hn::Set(kF, rows[r]);
      const VF low = hn::Mul(hn::Mul(hn::ConvertTo(kF, low_[r]), lanes[0]), by_row);
      const VF high = hn::Mul(hn::Mul(hn::ConvertTo(kF, high_[r]), lanes[1]), by_row);
      largest[0] = hn::Max(largest[0], low);
      largest[1] = hn::Max(largest[1], high);
      hn::Store(low, kF, t + r * kBlockSize);
      hn::Store(high, kF, t + r * kBlockSize + kLanes);
    }
  }
  /// low, high [rows] += sums times `lanes` [32] times `rows`.
  HWY_INLINE void add_scaled(const float* lanes, const float* rows, std::size_t row_stride, VF* low, VF* high) const {
    const VF by_low = hn::LoadU(kF, lanes);
    const VF by_high = hn::LoadU(kF, lanes + kLanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const VF by_row = hn::Set(kF, rows[r * row_stride]);
      low[r] = hn::MulAdd(hn::Mul(hn::ConvertTo(kF, low_[r]), by_low), by_row, low[r]);
      high[r] = hn::MulAdd(hn::Mul(hn::ConvertTo(kF, high_[r]), by_high), by_row, high[r]);
    }
  }
  /// c [rows][32] = `initial` c + sums times `lanes` [32] times `rows`.
  HWY_INLINE void scale_into(const float* lanes, const float* rows, std::size_t row_stride, float initial,
                             float* c) const {
    const VF by_low = hn::LoadU(kF, lanes);
    const VF by_high = hn::LoadU(kF, lanes + kLanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const VF by_row = hn::Set(kF, rows[r * row_stride]);
      const VF low = hn::Mul(hn::ConvertTo(kF, low_[r]), by_low);
      const VF high = hn::Mul(hn::ConvertTo(kF, high_[r]), by_high);
      float* at = c + r * kBlockSize;
      const VF was_low = initial == 0.0F ? hn::Zero(kF) : hn::LoadU(kF, at);
      const VF was_high = initial == 0.0F ? hn::Zero(kF) : hn::LoadU(kF, at + kLanes);
      hn::StoreU(hn::MulAdd(low, by_row, was_low), kF, at);
      hn::StoreU(hn::MulAdd(high, by_row, was_high), kF, at + kLanes);
    }
  }

 private:
  static HWY_INLINE __m512i word_of(const std::uint8_t* bytes) {
    std::int32_t word = 0;
    __builtin_memcpy(&word, bytes, sizeof word);
    return _mm512_set1_epi32(word);
  }

  VI low_[kRows];
  VI high_[kRows];
};

/// As many rows as registers hold.
using Int8Tile = Int8Sums<8>;

/// A block of keys: codes [32][padded dims] as bytes, biased to be unsigned, and scales [blocks][32]. A block of
/// queries: codes [dims / 4][32][4], a quarter of the scales, and what the keys' bias adds, negative, [blocks][32].
///
/// Where no token's power-of-two scales lie more than 2^kMostShift apart, its codes are shifted to the least of them:
/// one integer sum over all dims is then exact, and so is the FP32 sum of the blocks: both have the same bits.
struct Int8Scores {
  static constexpr bool kCodes = true;
  static constexpr std::int32_t kMostShift = 3;            // 12 2^3 is a signed byte,
  static constexpr std::int32_t kBias = 12 << kMostShift;  // and twice that an unsigned one.
  /// Of shifted codes: FP32 holds every product, its scales and a logit factor up to kMostFactor exactly.
  static constexpr std::int32_t kMostExponent = 20;
  static constexpr float kMostFactor = 0x1p20F;
  static constexpr std::size_t kMostBlocks = kLargestDims / 16;
  /// After the codes.
  struct Tail {
    float scale[kMostBlocks * kBlockSize];
    std::int32_t bias[kMostBlocks * kBlockSize];
    std::int32_t whole_bias[kBlockSize];
    std::size_t width;
    std::size_t blocks;
    bool shifted;
  };

  static std::size_t bytes(std::size_t padded) { return padded * kBlockSize + sizeof(Tail); }
  static Tail* tail(std::byte* block, std::size_t padded) {
    return reinterpret_cast<Tail*>(block + padded * kBlockSize);
  }
  static const Tail* tail(const std::byte* block, std::size_t padded) {
    return reinterpret_cast<const Tail*>(block + padded * kBlockSize);
  }

  /// Codes in block.x, scales in the tail of `out`.
  static void quantize(const TokenOperand& operand, const RandomPlace& random, float strip, std::size_t padded,
                       TokenBlock& block, std::byte* out) {
    Tail* t = tail(out, padded);
    block.scale = t->scale;
    quantize_block(operand, random, strip, block);
    block.scale = nullptr;
    t->width = block.width;
    t->blocks = (block.dims + block.width - 1) / block.width;
    // The scale of a folding operand, or a second level, is in the exponents.
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VF factor = pow2(hn::LoadU(kI, block.exponent + lane));
      for (std::size_t i = 0; i < t->blocks; ++i) {
        float* at = t->scale + i * kBlockSize + lane;
        hn::StoreU(operand.folds ? factor : hn::Mul(hn::LoadU(kF, at), factor), kF, at);
      }
    }
  }
  static void put_keys(const TokenBlock& block, std::size_t padded, std::byte* staging, std::byte* out) {
    auto* words = reinterpret_cast<std::uint32_t*>(staging);
    float factors[kMostBlocks * kBlockSize];
    shift(block, *tail(out, padded), factors);
    pack_quads(block, factors, kBias, words);
    for (std::size_t i = block.dims / 4 * kBlockSize; i < padded / 4 * kBlockSize; ++i) words[i] = 0;
    transpose(words, kBlockSize, padded / 4, kBlockSize, reinterpret_cast<std::uint32_t*>(out), padded / 4);
  }
  static void put_queries(const TokenBlock& block, std::size_t padded, std::byte* out) {
    Tail* t = tail(out, padded);
    float factors[kMostBlocks * kBlockSize];
    shift(block, *t, factors);
    pack_quads(block, factors, 0, reinterpret_cast<std::uint32_t*>(out));
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      VI whole = hn::Zero(kI);
      for (std::size_t i = 0; i < t->blocks; ++i) {
        VF sum = hn::Zero(kF);
        for (std::size_t d = i * t->width; d < HWY_MIN((i + 1) * t->width, block.dims); ++d) {
          sum = hn::Add(sum, hn::Load(kF, block.x + d * kBlockSize + lane));
        }
        float* scale = t->scale + i * kBlockSize + lane;
        hn::StoreU(hn::Mul(hn::LoadU(kF, scale), hn::Set(kF, 0.25F)), kF, scale);
        const VF codes = hn::Mul(sum, hn::LoadU(kF, factors + i * kBlockSize + lane));
        const VI bias = hn::NearestInt(hn::Mul(codes, hn::Set(kF, static_cast<float>(-kBias))));
        hn::StoreU(bias, kI, t->bias + i * kBlockSize + lane);
        whole = hn::Add(whole, bias);
      }
      hn::StoreU(whole, kI, t->whole_bias + lane);
    }
  }
  static void run(const std::byte* keys, const std::byte* queries, std::size_t dims, std::size_t padded, float* c) {
    const auto* a = reinterpret_cast<const std::uint8_t*>(keys);
    const auto* b = reinterpret_cast<const std::uint32_t*>(queries);
    const Tail* of_keys = tail(keys, padded);
    const Tail* of_queries = tail(queries, padded);
    for (std::size_t key = 0; key < kBlockSize; key += Int8Tile::kRows) {
      for (std::size_t i = 0; i < of_keys->blocks; ++i) {
        const std::size_t begin = i * of_keys->width;
        const std::size_t end = HWY_MIN(begin + of_keys->width, dims);
        const std::int32_t* bias = of_queries->bias + i * kBlockSize;
        Int8Tile tile;
        tile.start(hn::LoadU(kI, bias), hn::LoadU(kI, bias + kLanes));
        tile.add<Int8Tile::UnsignedRows>(a + key * padded + begin, padded, b + begin / 4 * kBlockSize,
                                         (end - begin) / 4);
        tile.scale_into(of_queries->scale + i * kBlockSize, of_keys->scale + i * kBlockSize + key, 1,
                        i == 0 ? 0.0F : 1.0F, c + key * kBlockSize);
      }
    }
  }
  /// Whether a tile is one integer sum a pair: `run_shifted`.
  static bool shifted(const TileOperands& of) {
    return tail(of.keys, of.padded)->shifted && tail(of.queries, of.padded)->shifted &&
           __builtin_fabsf(of.logit_factor) <= kMostFactor && __builtin_fabsf(of.logit_factor) >= 1.0F / kMostFactor;
  }
  /// Logits t [32][32], and by lane the largest of them: the bits that `run` and `score_tile` give.
  static void run_shifted(const TileOperands& of, float* t, float* largest) {
    const auto* a = reinterpret_cast<const std::uint8_t*>(of.keys);
    const auto* b = reinterpret_cast<const std::uint32_t*>(of.queries);
    const Tail* of_keys = tail(of.keys, of.padded);
    const Tail* of_queries = tail(of.queries, of.padded);
    const VF factor = hn::Set(kF, of.logit_factor);
    const VF by_lane[2] = {hn::Mul(hn::LoadU(kF, of_queries->scale), factor),
                           hn::Mul(hn::LoadU(kF, of_queries->scale + kLanes), factor)};
    VF most[2] = {minus_infinity(), minus_infinity()};
    for (std::size_t key = 0; key < kBlockSize; key += Int8Tile::kRows) {
      Int8Tile tile;
      tile.start(hn::LoadU(kI, of_queries->whole_bias), hn::LoadU(kI, of_queries->whole_bias + kLanes));
      tile.add<Int8Tile::UnsignedRows>(a + key * of.padded, of.padded, b, of.dims / 4);
      tile.scale_to(by_lane, of_keys->scale + key, t + key * kBlockSize, most);
    }
    hn::StoreU(most[0], kF, largest);
    hn::StoreU(most[1], kF, largest + kLanes);
  }
  /// For pairs that FP32 cannot hold.
  static void scaled(const std::byte* from, std::size_t padded, float factor, std::byte* to) {
    for (std::size_t i = 0; i < bytes(padded); ++i) to[i] = from[i];
    Tail* t = tail(to, padded);
    for (std::size_t i = 0; i < t->blocks * kBlockSize; ++i) t->scale[i] *= factor;
  }

 private:
  /// Shifts the codes of every token to the least scale of its blocks, where all 32 tokens allow it: `factors`, by
  /// block and lane, make the bytes from codes.
  static void shift(const TokenBlock& block, Tail& t, float* factors) {
    t.shifted = true;
    float base[kBlockSize];
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) t.shifted &= find_base(block, t, lane, base + lane);
    for (std::size_t i = 0; i < t.blocks * kBlockSize; i += kLanes) {
      VF factor = hn::Set(kF, 2.0F);
      if (t.shifted) {
        const VF to = hn::LoadU(kF, base + i % kBlockSize);
        // Where all codes are zero, any scale will do.
        const VF up = hn::Div(hn::LoadU(kF, t.scale + i), to);
        factor = hn::Mul(factor, hn::Max(hn::Min(up, hn::Set(kF, 1 << kMostShift)), hn::Set(kF, 1.0F)));
        hn::StoreU(to, kF, t.scale + i);
      }
      hn::StoreU(factor, kF, factors + i);
    }
  }
  /// The least scale of the blocks that are not zero, by lane; whether it will do for all of a token's.
  static bool find_base(const TokenBlock& block, const Tail& t, std::size_t lane, float* base) {
    VI least = hn::Set(kI, kMostExponent);
    VI most = hn::Set(kI, -kMostExponent);
    VI mantissa = hn::Zero(kI);
    for (std::size_t i = 0; i < t.blocks; ++i) {
      VI any = hn::Zero(kI);
      for (std::size_t d = i * t.width; d < HWY_MIN((i + 1) * t.width, block.dims); ++d) {
        any = hn::Or(any, hn::BitCast(kI, hn::Abs(hn::Load(kF, block.x + d * kBlockSize + lane))));
      }
      const auto zero = hn::Eq(any, hn::Zero(kI));
      const VI bits = hn::BitCast(kI, hn::LoadU(kF, t.scale + i * kBlockSize + lane));
      const VI exponent = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(kI, 127));
      least = hn::IfThenElse(zero, least, hn::Min(least, exponent));
      most = hn::IfThenElse(zero, most, hn::Max(most, exponent));
      mantissa = hn::Or(mantissa, hn::IfThenZeroElse(zero, hn::And(bits, hn::Set(kI, 0x7FFFFF))));
    }
    hn::StoreU(pow2(least), kF, base);
    const auto far = hn::Or(hn::Lt(least, hn::Set(kI, -kMostExponent)), hn::Gt(most, hn::Set(kI, kMostExponent)));
    const auto apart = hn::Gt(hn::Sub(most, least), hn::Set(kI, kMostShift));
    return hn::AllFalse(kI, hn::Or(hn::Or(far, apart), hn::Gt(mantissa, hn::Zero(kI))));
  }
};

#endif  // HWY_AVX3

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
