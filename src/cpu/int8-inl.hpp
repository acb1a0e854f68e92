// S = Q K^T and O = P V on the codes themselves, with the interface of scores-inl.hpp. Twice an E2M1 value is a small
// integer, so 4-bit blocks multiply exactly in int8 (VNNI), their scales join in FP32.
#if defined(MXFLASH_CPU_INT8_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_INT8_INL
#undef MXFLASH_CPU_INT8_INL
#else
#define MXFLASH_CPU_INT8_INL
#endif

#include "cpu/softmax-inl.hpp"
#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3

#define MXFLASH_VNNI __attribute__((target("avx512vnni")))

/// Twice the codes, as bytes: word [d / 4][lane] holds four dims, each plus `bias`.
HWY_INLINE void pack_quads(const float* x, std::size_t dims, std::int32_t bias, std::uint32_t* out) {
  const VI byte = hn::Set(kI, 0xFF);
  for (std::size_t quad = 0; quad < dims / 4; ++quad) {
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      VI word = hn::Zero(kI);
      for (std::size_t i = 4; i-- > 0;) {
        const VF value = hn::Load(kF, x + (4 * quad + i) * kBlockSize + lane);
        const VI twice = hn::Add(hn::NearestInt(hn::Add(value, value)), hn::Set(kI, bias));
        word = hn::Or(hn::ShiftLeft<8>(word), hn::And(twice, byte));
      }
      hn::StoreU(hn::BitCast(kU, word), kU, out + quad * kBlockSize + lane);
    }
  }
}

/// 8 rows of A against 32 lanes of B in int32: word by word, one unsigned byte by one signed.
class Int8Tile {
 public:
  static constexpr std::size_t kRows = 8;

  HWY_INLINE void start(VI low, VI high) {
    for (std::size_t r = 0; r < kRows; ++r) {
      low_[r] = low;
      high_[r] = high;
    }
  }
  /// Which of the two is unsigned: A's rows or B's lanes.
  struct UnsignedRows {
    MXFLASH_VNNI static HWY_INLINE __m512i dot(__m512i sum, __m512i row, __m512i lanes) {
      return _mm512_dpbusd_epi32(sum, row, lanes);
    }
  };
  struct UnsignedLanes {
    MXFLASH_VNNI static HWY_INLINE __m512i dot(__m512i sum, __m512i row, __m512i lanes) {
      return _mm512_dpbusd_epi32(sum, lanes, row);
    }
  };
  template <class Signs>
  MXFLASH_VNNI HWY_INLINE void add(const std::uint8_t* a, std::size_t a_stride, const std::uint32_t* b,
                                   std::size_t words) {
    for (std::size_t w = 0; w < words; ++w) {
      const auto* lanes = reinterpret_cast<const std::int32_t*>(b) + w * kBlockSize;
      const __m512i b_low = hn::LoadU(kI, lanes).raw;
      const __m512i b_high = hn::LoadU(kI, lanes + kLanes).raw;
      for (std::size_t r = 0; r < kRows; ++r) {
        const __m512i row = word_of(a + r * a_stride + 4 * w);
        low_[r].raw = Signs::dot(low_[r].raw, row, b_low);
        high_[r].raw = Signs::dot(high_[r].raw, row, b_high);
      }
    }
  }
  /// c [8][32] = `initial` c + sums times `lanes` [32] times `rows`.
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

/// A block of keys: codes [32][padded dims] as bytes, biased to be unsigned, and scales [blocks][32]. A block of
/// queries: codes [dims / 4][32][4], a quarter of the scales, and what the keys' bias adds, negative, [blocks][32].
struct Int8Scores {
  static constexpr std::int32_t kBias = 12;
  static constexpr std::size_t kMostBlocks = kLargestDims / 16;
  /// After the codes.
  struct Tail {
    float scale[kMostBlocks * kBlockSize];
    std::int32_t bias[kMostBlocks * kBlockSize];
    std::size_t width;
    std::size_t blocks;
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
    pack_quads(block.x, block.dims, kBias, words);
    for (std::size_t i = block.dims / 4 * kBlockSize; i < padded / 4 * kBlockSize; ++i) words[i] = 0;
    transpose(words, kBlockSize, padded / 4, kBlockSize, reinterpret_cast<std::uint32_t*>(out), padded / 4);
  }
  static void put_queries(const TokenBlock& block, std::size_t padded, std::byte* out) {
    pack_quads(block.x, block.dims, 0, reinterpret_cast<std::uint32_t*>(out));
    Tail* t = tail(out, padded);
    for (std::size_t i = 0; i < t->blocks; ++i) {
      const std::size_t end = HWY_MIN((i + 1) * t->width, block.dims);
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        VF sum = hn::Zero(kF);
        for (std::size_t d = i * t->width; d < end; ++d) {
          sum = hn::Add(sum, hn::Load(kF, block.x + d * kBlockSize + lane));
        }
        float* scale = t->scale + i * kBlockSize + lane;
        hn::StoreU(hn::Mul(hn::LoadU(kF, scale), hn::Set(kF, 0.25F)), kF, scale);
        hn::StoreU(hn::NearestInt(hn::Mul(sum, hn::Set(kF, -2.0F * kBias))), kI, t->bias + i * kBlockSize + lane);
      }
    }
  }
  MXFLASH_VNNI static void run(const std::byte* keys, const std::byte* queries, std::size_t dims, std::size_t padded,
                               float* c) {
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
  /// For pairs that FP32 cannot hold.
  static void scaled(const std::byte* from, std::size_t padded, float factor, std::byte* to) {
    for (std::size_t i = 0; i < bytes(padded); ++i) to[i] = from[i];
    Tail* t = tail(to, padded);
    for (std::size_t i = 0; i < t->blocks * kBlockSize; ++i) t->scale[i] *= factor;
  }
};

/// A block of values: codes [dims][32] as bytes and scales [dims][2], for the halves of the block. P of a tile: codes
/// [8][32][4] and factors [32].
struct Int8Output {
  struct Weights {
    std::uint32_t codes[kBlockSize / 4 * kBlockSize];
    float factor[kBlockSize];
  };
  static constexpr std::size_t kTiles = 16;
  static std::size_t value_bytes(std::size_t padded) { return padded * (kBlockSize + 2 * sizeof(float)); }
  static std::size_t weight_bytes() { return sizeof(Weights); }

  /// Values are quantized to codes; where scales do not fold, they run along tokens: one for the block or one a half.
  static void put_values(const TokenOperand& operand, const RandomPlace& random, float strip, std::size_t padded,
                         TokenBlock& block, std::byte* out) {
    float decode[kLargestDims * kBlockSize];
    block.scale = operand.folds ? nullptr : decode;
    quantize_block(operand, random, strip, block);
    block.scale = nullptr;
    auto* scales = reinterpret_cast<float*>(out + padded * kBlockSize);
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
  struct Sink {
    std::byte* tile;
    HWY_INLINE void begin(const TileScales& scales) const {
      auto* weights = reinterpret_cast<Weights*>(tile);
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
  MXFLASH_VNNI static void run(const void* const* values, const void* const* weights, std::size_t tiles,
                               std::size_t padded, float initial, float* c) {
    if (initial == 0.0F) {
      for (std::size_t i = 0; i < padded * kBlockSize; i += kLanes) hn::Store(hn::Zero(kF), kF, c + i);
    }
    for (std::size_t d = 0; d < padded; d += Int8Tile::kRows) {
      for (std::size_t tile = 0; tile < tiles; ++tile) {
        multiply_tile(static_cast<const std::uint8_t*>(values[tile]), static_cast<const Weights*>(weights[tile]), d,
                      padded, c + d * kBlockSize);
      }
    }
  }

 private:
  MXFLASH_VNNI static HWY_INLINE void multiply_tile(const std::uint8_t* values, const Weights* p, std::size_t d,
                                                    std::size_t padded, float* c) {
    const auto* scales = reinterpret_cast<const float*>(values + padded * kBlockSize) + 2 * d;
    bool halves = false;
    for (std::size_t r = 0; r < Int8Tile::kRows; ++r) halves = halves || scales[2 * r] != scales[2 * r + 1];
    const std::size_t parts = halves ? 2 : 1;
    const std::size_t words = kBlockSize / 4 / parts;
    for (std::size_t part = 0; part < parts; ++part) {
      Int8Tile tile;
      tile.start(hn::Zero(kI), hn::Zero(kI));
      tile.add<Int8Tile::UnsignedLanes>(values + d * kBlockSize + part * kBlockSize / 2, kBlockSize,
                                        p->codes + part * words * kBlockSize, words);
      tile.scale_into(p->factor, scales + part, 2, 1.0F, c);
    }
  }
};

#endif  // HWY_AVX3

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
