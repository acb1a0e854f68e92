// O = P V on the codes themselves, with the interface of scores-inl.hpp, and P of whole tiles in codes right away.
#if defined(MXFLASH_CPU_INT8_OUTPUT_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_INT8_OUTPUT_INL
#undef MXFLASH_CPU_INT8_OUTPUT_INL
#else
#define MXFLASH_CPU_INT8_OUTPUT_INL
#endif

#include "cpu/int8-inl.hpp"
#include "cpu/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3

/// A block of values: codes [dims][32] as bytes and scales [dims][2], for the halves of the block. P of a tile: codes
/// [8][32][4] and factors [32].
///
/// O adds up over groups of 128 keys: the tiles of one that lie one after another are added to each other, then their
/// sum to O. Where the scales of V and of P lie near each other that is one integer sum, and the FP32 sums are exact:
/// both have the same bits, so that a row does not show by which way it was added.
struct Int8Output {
  struct Weights {
    std::uint32_t codes[kBlockSize / 4 * kBlockSize];
    float factor[kBlockSize];
    float log2_divisor[kBlockSize];  ///< Of an early tile.
    std::int32_t sum[kBlockSize];    ///< Of an early tile: twice the sum of the codes.
    bool early;                      ///< Encoded before the maxima of its rows were known.
  };
  struct Tail {
    std::size_t place;  ///< In its group.
    bool shifted;       ///< Codes and scales are those of the group.
  };
  static constexpr std::size_t kGroup = 4;
  static constexpr std::size_t kTiles = 4 * kGroup;
  static constexpr std::int32_t kMostValueShift = 3;   // 12 2^3 is a signed byte,
  static constexpr std::int32_t kMostWeightShift = 4;  // 12 2^4 an unsigned one.
  /// Of scales of groups, so that no product of the FP32 sums is subnormal.
  static constexpr std::int32_t kLeastExponent = -60;

  static std::size_t value_bytes(std::size_t padded) {
    return padded * (kBlockSize + 2 * sizeof(float)) + HWY_MAX(sizeof(Tail), std::size_t{64});
  }
  static std::size_t weight_bytes() { return (sizeof(Weights) + 63) / 64 * 64; }
  static float* scales_of(std::byte* values, std::size_t padded) {
    return reinterpret_cast<float*>(values + padded * kBlockSize);
  }
  static const float* scales_of(const void* values, std::size_t padded) {
    return reinterpret_cast<const float*>(static_cast<const std::byte*>(values) + padded * kBlockSize);
  }
  static Tail* tail(std::byte* values, std::size_t padded) {
    return reinterpret_cast<Tail*>(scales_of(values, padded) + 2 * padded);
  }
  static const Tail* tail(const void* values, std::size_t padded) {
    return reinterpret_cast<const Tail*>(scales_of(values, padded) + 2 * padded);
  }

  /// Values are quantized to codes; where scales do not fold, they run along tokens: one for the block or one a half.
  static void put_values(const TokenOperand& operand, const RandomPlace& random, float strip, std::size_t padded,
                         TokenBlock& block, std::byte* out) {
    float decode[kLargestDims * kBlockSize];
    block.scale = operand.folds ? nullptr : decode;
    quantize_block(operand, random, strip, block);
    block.scale = nullptr;
    float* scales = scales_of(out, padded);
    *tail(out, padded) = {static_cast<std::size_t>(random.row) / kBlockSize % kGroup, false};
    const hn::Rebind<std::int8_t, I32> byte;
    for (std::size_t d = 0; d < padded; ++d) {
      auto* to = reinterpret_cast<std::int8_t*>(out) + d * kBlockSize;
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        const VF code = d < block.dims ? hn::Load(kF, block.x + d * kBlockSize + lane) : hn::Zero(kF);
        hn::StoreU(hn::DemoteTo(byte, hn::NearestInt(hn::Add(code, code))), byte, to + lane);
      }
      for (std::size_t half = 0; half < 2; ++half) {
        // A quarter, for twice P times twice V; the second level of a half is that of its first token.
        const bool scaled = !operand.folds && d < block.dims;
        const float scale = scaled ? decode[d * kBlockSize + half * kBlockSize / 2] : 1.0F;
        const float level = operand.folds ? 1.0F : hn::GetLane(pow2(hn::Set(kI, block.exponent[0])));
        scales[2 * d + half] = 0.25F * scale * level;
      }
    }
  }
  /// `blocks`: all that there are of one group, the last of them put just now.
  static void join_values(std::byte* blocks, std::size_t count, std::size_t padded) {
    bool joins = true;
    for (std::size_t d = 0; d < padded; ++d) joins = joins && find_base(blocks, count, padded, d).joins;
    for (std::size_t i = 0; i < count; ++i) tail(blocks + i * value_bytes(padded), padded)->shifted = joins;
    if (!joins) return;
    for (std::size_t d = 0; d < padded; ++d) {
      const std::int32_t base = find_base(blocks, count, padded, d).exponent;
      for (std::size_t i = 0; i < count; ++i) {
        std::byte* block = blocks + i * value_bytes(padded);
        float* scales = scales_of(block, padded) + 2 * d;
        auto* codes = reinterpret_cast<std::int8_t*>(block) + d * kBlockSize;
        for (std::int32_t e = base; !is_zero(codes) && e < exponent_of(scales[0]); ++e) {
          for (std::size_t lane = 0; lane < kBlockSize; ++lane) codes[lane] = static_cast<std::int8_t>(2 * codes[lane]);
        }
        scales[0] = scales[1] = hn::GetLane(pow2(hn::Set(kI, base)));
      }
    }
  }
  /// P of a tile whose keys are visible to all rows and do not fold: all of it that does not depend on the rows'
  /// maxima.
  static void encode(const WeightRule& rule, const float* t, const float* largest, Weights* out) {
    const VI ones = hn::Set(kI, 0x01010101);
    VI low[4];
    VI high[4];
    for (std::size_t i = 0; i < 4; ++i) {
      low[i] = hn::ShiftLeftSame(hn::LoadU(kI, E2m1Logarithm::kTwiceBelow), static_cast<int>(8 * i));
      high[i] = hn::ShiftLeftSame(hn::LoadU(kI, E2m1Logarithm::kTwiceAbove), static_cast<int>(8 * i));
    }
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VF divisor = group_exponent(rule, hn::LoadU(kF, largest + lane));
      VI sum = hn::Zero(kI);
      for (std::size_t quad = 0; quad < kBlockSize / 4; ++quad) {
        VI word = hn::Zero(kI);
        for (std::size_t i = 0; i < 4; ++i) {
          const VF of_key = hn::Load(kF, t + (4 * quad + i) * kBlockSize + lane);
          word = hn::Or(word, E2m1Logarithm::look_up(E2m1Logarithm::place(hn::Sub(of_key, divisor)), low[i], high[i]));
        }
        add_dot(sum.raw, word.raw, ones.raw);
        hn::StoreU(hn::BitCast(kU, word), kU, out->codes + quad * kBlockSize + lane);
      }
      hn::StoreU(divisor, kF, out->log2_divisor + lane);
      hn::StoreU(sum, kI, out->sum + lane);
    }
  }
  /// Takes a tile before the maxima of its rows are known; they are then raised. Otherwise it is done as any other.
  template <class Scores>
  static bool begin_early(const WeightRule& rule, const Tile& tile, const TileOperands& of, std::byte* weights,
                          Rows& rows) {
    auto* out = reinterpret_cast<Weights*>(weights);
    out->early = false;
    if constexpr (Scores::kCodes) {
      if (!rule.early || tile.masked || tile.folds != nullptr || !Scores::shifted(of)) return false;
      alignas(64) float t[kTileSize];
      float largest[kBlockSize];
      Scores::run_shifted(of, t, largest);
      encode(rule, t, largest, out);
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        const VF g = hn::LoadU(kF, largest + lane);
        hn::StoreU(hn::Max(hn::LoadU(kF, rows.largest_t + lane), g), kF, rows.largest_t + lane);
        hn::StoreU(hn::Max(hn::LoadU(kF, rows.largest_s + lane), g), kF, rows.largest_s + lane);
      }
      out->early = true;
    }
    return out->early;
  }
  static bool is_early(const std::byte* weights) { return reinterpret_cast<const Weights*>(weights)->early; }
  /// Its factors and its share of the row sums, as weigh_tile gives them. False where a row's scale would lie below
  /// that of the least weight: it is a tile like any other then.
  static bool end_early(const WeightRule& rule, std::byte* weights, Rows& rows) {
    auto* out = reinterpret_cast<Weights*>(weights);
    float counted[kBlockSize];
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const VF below = hn::Sub(hn::LoadU(kF, out->log2_divisor + lane), hn::LoadU(kF, rows.reference + lane));
      if (!hn::AllTrue(kF, hn::Ge(below, hn::Set(kF, -127.0F)))) {
        out->early = false;
        return false;
      }
      const VF factor = hn::Mul(pow2(hn::NearestInt(below)), hn::Set(kF, rule.unit));
      hn::StoreU(factor, kF, out->factor + lane);
      const VF sum = hn::Mul(hn::ConvertTo(kF, hn::LoadU(kI, out->sum + lane)), hn::Set(kF, 0.5F));
      hn::StoreU(hn::Mul(hn::Mul(sum, factor), pow2(hn::LoadU(kI, rows.shift + lane))), kF, counted + lane);
    }
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) rows.sum[lane] += static_cast<double>(counted[lane]);
    return true;
  }
  struct Sink {
    std::byte* tile;
    HWY_INLINE void begin(const TileScales& scales) const {
      auto* weights = reinterpret_cast<Weights*>(tile);
      weights->early = false;
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        hn::StoreU(hn::LoadU(kF, scales.factor + lane), kF, weights->factor + lane);
      }
    }
    HWY_INLINE void put(std::size_t pair, std::size_t lane, const WeighedPair& w) const {
      std::uint32_t* at = reinterpret_cast<Weights*>(tile)->codes + pair / 2 * kBlockSize + lane;
      const VU even = hn::BitCast(kU, hn::NearestInt(hn::Add(w.even_code, w.even_code)));
      const VU odd = hn::BitCast(kU, hn::NearestInt(hn::Add(w.odd_code, w.odd_code)));
      const VU both = hn::Or(even, hn::ShiftLeft<8>(odd));
      hn::StoreU(pair % 2 == 0 ? both : hn::Or(hn::LoadU(kU, at), hn::ShiftLeft<16>(both)), kU, at);
    }
  };
  static bool is_zero(const std::byte* tile, std::size_t key, std::size_t lane) {
    const std::uint32_t word = reinterpret_cast<const Weights*>(tile)->codes[key / 4 * kBlockSize + lane];
    return (word >> (8 * (key % 4)) & 0xFFU) == 0;
  }
  static void run(const void* const* values, void* const* weights, std::size_t tiles, std::size_t padded, float initial,
                  float* c) {
    if (initial == 0.0F) {
      for (std::size_t i = 0; i < padded * kBlockSize; i += kLanes) hn::Store(hn::Zero(kF), kF, c + i);
    }
    Group groups[kTiles];
    std::size_t count = 0;
    for (std::size_t first = 0; first < tiles; first += groups[count++].tiles) {
      groups[count] = find_group(values + first, weights + first, tiles - first, padded);
    }
    for (std::size_t d = 0; d < padded; d += Int8Tile::kRows) {
      for (std::size_t i = 0; i < count; ++i) {
        if (groups[i].whole) {
          add_whole(groups[i], d, padded, c + d * kBlockSize);
        } else {
          add_tiles(groups[i], d, padded, c + d * kBlockSize);
        }
      }
    }
  }

 private:
  using HalfTile = Int8Sums<Int8Tile::kRows / 2>;
  struct Base {
    std::int32_t exponent = 0;
    bool joins = true;
  };
  /// Tiles that are added up first.
  struct Group {
    const void* const* values = nullptr;
    void* const* weights = nullptr;
    std::size_t tiles = 0;
    bool whole = false;  ///< As one integer sum.
  };

  static std::int32_t exponent_of(float power) { return (__builtin_bit_cast(std::int32_t, power) >> 23) - 127; }
  static bool is_zero(const std::int8_t* codes) {
    std::int8_t any = 0;
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) any = static_cast<std::int8_t>(any | codes[lane]);
    return any == 0;
  }
  /// The least exponent of a dim's scales in a group, those of zero codes aside, and whether it will do for all.
  static Base find_base(const std::byte* blocks, std::size_t count, std::size_t padded, std::size_t d) {
    Base base;
    std::int32_t most = 0;
    bool any = false;
    for (std::size_t i = 0; i < count; ++i) {
      const std::byte* block = blocks + i * value_bytes(padded);
      if (is_zero(reinterpret_cast<const std::int8_t*>(block) + d * kBlockSize)) continue;
      const float* scales = scales_of(block, padded) + 2 * d;
      const bool power = (__builtin_bit_cast(std::uint32_t, scales[0]) & 0x7FFFFFU) == 0;
      base.joins = base.joins && power && scales[0] == scales[1];
      const std::int32_t exponent = exponent_of(scales[0]);
      base.exponent = any ? HWY_MIN(base.exponent, exponent) : exponent;
      most = any ? HWY_MAX(most, exponent) : exponent;
      any = true;
    }
    base.joins = base.joins && base.exponent >= kLeastExponent && most - base.exponent <= kMostValueShift;
    return base;
  }

  static Group find_group(const void* const* values, void* const* weights, std::size_t tiles, std::size_t padded) {
    Group group{values, weights, 1, false};
    const auto* first = static_cast<const std::byte*>(values[0]);
    const std::size_t most = HWY_MIN(tiles, kGroup - tail(values[0], padded)->place);
    // V of cut tiles lies elsewhere.
    while (group.tiles < most && values[group.tiles] == first + group.tiles * value_bytes(padded)) ++group.tiles;
    group.whole = group.tiles > 1 && tail(values[0], padded)->shifted && shift_weights(group);
    return group;
  }
  /// Shifts the codes of P to the least scale of a row in the group, where all rows allow it.
  static bool shift_weights(const Group& group) {
    VI exponents[kGroup][2];
    VI least[2] = {hn::Set(kI, 127), hn::Set(kI, 127)};
    auto bad = hn::Gt(hn::Zero(kI), hn::Zero(kI));
    for (std::size_t half = 0; half < 2; ++half) {
      VI most = hn::Set(kI, -127);
      for (std::size_t i = 0; i < group.tiles; ++i) {
        const auto* p = static_cast<const Weights*>(group.weights[i]);
        if (!p->early) return false;
        const VI bits = hn::BitCast(kI, hn::LoadU(kF, p->factor + half * kLanes));
        exponents[i][half] = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(kI, 127));
        least[half] = hn::Min(least[half], exponents[i][half]);
        most = hn::Max(most, exponents[i][half]);
      }
      const auto apart = hn::Gt(hn::Sub(most, least[half]), hn::Set(kI, kMostWeightShift));
      bad = hn::Or(bad, hn::Or(apart, hn::Lt(least[half], hn::Set(kI, kLeastExponent))));
    }
    // Nothing is changed before all rows have allowed it.
    if (!hn::AllFalse(kI, bad)) return false;
    for (std::size_t half = 0; half < 2; ++half) {
      hn::StoreU(pow2(least[half]), kF, static_cast<Weights*>(group.weights[0])->factor + half * kLanes);
    }
    for (std::size_t i = 0; i < group.tiles; ++i) {
      auto* p = static_cast<Weights*>(group.weights[i]);
      for (std::size_t quad = 0; quad < kBlockSize / 4; ++quad) {
        for (std::size_t half = 0; half < 2; ++half) {
          std::uint32_t* at = p->codes + quad * kBlockSize + half * kLanes;
          const VI shift = hn::Sub(exponents[i][half], least[half]);
          hn::StoreU(hn::Shl(hn::LoadU(kU, at), hn::BitCast(kU, shift)), kU, at);
        }
      }
    }
    return true;
  }

  static HWY_INLINE void add_whole(const Group& group, std::size_t d, std::size_t padded, float* c) {
    Int8Tile tile;
    tile.start(hn::Zero(kI), hn::Zero(kI));
    for (std::size_t i = 0; i < group.tiles; ++i) {
      tile.add<Int8Tile::UnsignedLanes>(static_cast<const std::uint8_t*>(group.values[i]) + d * kBlockSize, kBlockSize,
                                        static_cast<const Weights*>(group.weights[i])->codes, kBlockSize / 4);
    }
    tile.scale_into(static_cast<const Weights*>(group.weights[0])->factor, scales_of(group.values[0], padded) + 2 * d,
                    2, 1.0F, c);
  }
  /// Tile by tile, so few rows that their FP32 sums stay in registers as well.
  static HWY_INLINE void add_tiles(const Group& group, std::size_t d, std::size_t padded, float* c) {
    for (std::size_t row = 0; row < Int8Tile::kRows; row += HalfTile::kRows) {
      VF low[HalfTile::kRows];
      VF high[HalfTile::kRows];
      for (std::size_t r = 0; r < HalfTile::kRows; ++r) low[r] = high[r] = hn::Zero(kF);
      for (std::size_t i = 0; i < group.tiles; ++i) add_tile(group, i, d + row, padded, low, high);
      for (std::size_t r = 0; r < HalfTile::kRows; ++r) {
        float* at = c + (row + r) * kBlockSize;
        hn::Store(hn::Add(hn::Load(kF, at), low[r]), kF, at);
        hn::Store(hn::Add(hn::Load(kF, at + kLanes), high[r]), kF, at + kLanes);
      }
    }
  }
  static HWY_INLINE void add_tile(const Group& group, std::size_t i, std::size_t d, std::size_t padded, VF* low,
                                  VF* high) {
    const auto* values = static_cast<const std::uint8_t*>(group.values[i]);
    const auto* p = static_cast<const Weights*>(group.weights[i]);
    const float* scales = scales_of(group.values[i], padded) + 2 * d;
    bool halves = false;
    for (std::size_t r = 0; r < HalfTile::kRows; ++r) halves = halves || scales[2 * r] != scales[2 * r + 1];
    const std::size_t parts = halves ? 2 : 1;
    const std::size_t words = kBlockSize / 4 / parts;
    for (std::size_t part = 0; part < parts; ++part) {
      HalfTile tile;
      tile.start(hn::Zero(kI), hn::Zero(kI));
      tile.add<HalfTile::UnsignedLanes>(values + d * kBlockSize + part * kBlockSize / 2, kBlockSize,
                                        p->codes + part * words * kBlockSize, words);
      tile.add_scaled(p->factor, scales + part, 2, low, high);
    }
  }
};

#endif  // HWY_AVX3

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
