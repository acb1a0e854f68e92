// How S = Q K^T and O = P V are multiplied: by the engine's multiply on decoded values, or on the codes themselves. Twice
// an E2M1 value is a small integer, so 4-bit blocks multiply exactly in int8 (VNNI), their scales join in FP32.
#if defined(MXFLASH_CPU_SCORES_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_SCORES_INL
#undef MXFLASH_CPU_SCORES_INL
#else
#define MXFLASH_CPU_SCORES_INL
#endif

#include "cpu/multiply-inl.hpp"
#include "cpu/softmax-inl.hpp"
#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Tiles of S = K Q^T, one block of keys against one of queries.
template <class Multiply>
struct ValueScores {
  using Element = typename Multiply::Element;

  /// Of a block of keys, and of queries.
  static std::size_t bytes(std::size_t padded) { return padded * kBlockSize * sizeof(Element); }

  static void quantize(const TokenOperand& operand, const RandomPlace& random, float strip, TokenBlock& block) {
    quantize_block(operand, random, strip, block);
  }
  static void put_keys(TokenBlock& block, std::size_t padded, std::byte* staging, std::byte* out) {
    apply_exponents(block);
    Multiply::rows(block.x, block.dims, padded, reinterpret_cast<Element*>(out), reinterpret_cast<Element*>(staging));
  }
  static void put_queries(TokenBlock& block, std::size_t padded, std::byte* out) {
    apply_exponents(block);
    Multiply::columns(block.x, block.dims, padded, reinterpret_cast<Element*>(out));
  }
  static void run(const std::byte* keys, const std::byte* queries, std::size_t /*dims*/, std::size_t padded, float* c) {
    const void* a = keys;
    const void* b = queries;
    Product product;
    product.m = product.n = kBlockSize;
    product.k = padded;
    product.a = &a;
    product.b = &b;
    product.c = c;
    Multiply::run(product);
  }
};

/// O^T = V^T P^T of one block of queries over tiles [begin, end).
template <class Multiply>
struct ValueOutput {
  using Element = typename Multiply::Element;

  static std::size_t value_bytes(std::size_t padded) { return padded * kBlockSize * sizeof(Element); }
  static std::size_t weight_bytes() { return kTileSize * sizeof(Element); }

  static void quantize(const TokenOperand& operand, const RandomPlace& random, float strip, TokenBlock& block) {
    quantize_block(operand, random, strip, block);
    if (!operand.folds) apply_exponents(block);
  }
  static void put_values(const TokenBlock& block, std::size_t padded, std::byte* out) {
    Multiply::lanes(block.x, block.dims, padded, reinterpret_cast<Element*>(out));
  }
  /// Where P of a tile goes.
  struct Sink {
    std::byte* tile;
    HWY_INLINE void begin(const TileScales& /*scales*/) const {}
    HWY_INLINE void put(std::size_t pair, std::size_t lane, const WeighedPair& w) const {
      Multiply::put_pair(reinterpret_cast<Element*>(tile), pair, lane, w.even, w.odd);
    }
  };
  static bool is_zero(const std::byte* tile, std::size_t key, std::size_t lane) {
    return Multiply::is_zero(reinterpret_cast<const Element*>(tile), key, lane);
  }
  static void run(const void* const* values, const void* const* weights, std::size_t tiles, std::size_t padded,
                  float* c) {
    Product product;
    product.m = padded;
    product.n = product.k = kBlockSize;
    product.segments = tiles;
    product.a = values;
    product.b = weights;
    product.c = c;
    Multiply::run(product);
  }
};

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

/// Of keys: codes [32][dims] as bytes, biased to be unsigned, then scales [scales][32]. Of queries: codes
/// [dims / 4][32][4], scales a quarter, then what the keys' bias adds, negative, [scales][32].
struct Int8Scores {
  static constexpr std::int32_t kBias = 12;
  static constexpr std::size_t kMostScales = kLargestDims / 16;

  static std::size_t bytes(std::size_t padded) {
    return padded * kBlockSize + 2 * kMostScales * kBlockSize * sizeof(float);
  }
  static void quantize(const TokenOperand& operand, const RandomPlace& random, float strip, TokenBlock& block) {
    quantize_codes(operand, random, strip, block);
  }
  static void put_keys(TokenBlock& block, std::size_t padded, std::byte* staging, std::byte* out) {
    auto* words = reinterpret_cast<std::uint32_t*>(staging);
    pack_quads(block.x, block.dims, kBias, words);
    transpose(words, kBlockSize, block.dims / 4, kBlockSize, reinterpret_cast<std::uint32_t*>(out), block.dims / 4);
    auto* scales = reinterpret_cast<float*>(out + padded * kBlockSize);
    for (std::size_t i = 0; i < block.scales * kBlockSize; ++i) scales[i] = block.scale[i];
    header(out, padded)[0] = static_cast<std::int32_t>(block.width);
  }
  static void put_queries(TokenBlock& block, std::size_t padded, std::byte* out) {
    auto* words = reinterpret_cast<std::uint32_t*>(out);
    pack_quads(block.x, block.dims, 0, words);
    auto* scales = reinterpret_cast<float*>(out + padded * kBlockSize);
    auto* biases = reinterpret_cast<std::int32_t*>(scales + kMostScales * kBlockSize);
    for (std::size_t i = 0; i < block.scales; ++i) {
      for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
        VF sum = hn::Zero(kF);
        const std::size_t end = HWY_MIN((i + 1) * block.width, block.dims);
        for (std::size_t d = i * block.width; d < end; ++d) {
          sum = hn::Add(sum, hn::Load(kF, block.x + d * kBlockSize + lane));
        }
        const VF scale = hn::Mul(hn::LoadU(kF, block.scale + i * kBlockSize + lane), hn::Set(kF, 0.25F));
        hn::StoreU(scale, kF, scales + i * kBlockSize + lane);
        const VI bias = hn::NearestInt(hn::Mul(sum, hn::Set(kF, -2.0F * kBias)));
        hn::StoreU(bias, kI, biases + i * kBlockSize + lane);
      }
    }
    width_of(biases) = static_cast<std::int32_t>(block.width);
  }
};

#endif  // HWY_AVX3

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
