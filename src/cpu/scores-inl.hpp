// How S = Q K^T and O = P V are multiplied on decoded values; int8-inl.hpp and int8_output-inl.hpp do
// on codes.
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

/// A block of keys, one of queries, and the factor from their product to logits.
struct TileOperands {
  const std::byte* keys = nullptr;
  const std::byte* queries = nullptr;
  std::size_t dims = 0;
  std::size_t padded = 0;
  float logit_factor = 1;
};

/// Tiles of S = K Q^T, one block of keys against one of queries.
template <class Multiply>
struct ValueScores {
  using Element = typename Multiply::Element;
  static constexpr bool kCodes = false;

  /// Of a block of keys, and of queries.
  static std::size_t bytes(std::size_t padded) { return padded * kBlockSize * sizeof(Element); }

  /// `block` as codes' values, exponents apart; `out` is where it will be put.
  static void quantize(const TokenOperand& operand, const RandomPlace& random, float strip, std::size_t /*padded*/,
                       TokenBlock& block, std::byte* /*out*/) {
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
  /// For pairs that FP32 cannot hold.
  static void scaled(const std::byte* from, std::size_t padded, float factor, std::byte* to) {
    Multiply::scaled(reinterpret_cast<const Element*>(from), padded * kBlockSize, factor,
                     reinterpret_cast<Element*>(to));
  }
};

/// O^T = V^T P^T of one block of queries over tiles [begin, end).
template <class Multiply>
struct ValueOutput {
  using Element = typename Multiply::Element;
  static constexpr std::size_t kGroup = 1;
  static constexpr std::size_t kTiles = 16384 / (kTileSize * sizeof(Element));

  static std::size_t value_bytes(std::size_t padded) { return padded * kBlockSize * sizeof(Element); }
  static std::size_t weight_bytes() { return kTileSize * sizeof(Element); }

  /// Quantizes `block`; a folding operand's exponents stay apart.
  static void put_values(const TokenOperand& operand, const RandomPlace& random, float strip, std::size_t padded,
                         TokenBlock& block, std::byte* out) {
    quantize_block(operand, random, strip, block);
    if (!operand.folds) apply_exponents(block);
    Multiply::lanes(block.x, block.dims, padded, reinterpret_cast<Element*>(out));
  }
  static void join_values(std::byte* /*blocks*/, std::size_t /*count*/, std::size_t /*padded*/) {}
  /// No tile is taken before the maxima of its rows are known.
  template <class Scores>
  static bool begin_early(const WeightRule& /*rule*/, const Tile& /*tile*/, const TileOperands& /*of*/,
                          std::byte* /*weights*/, Rows& /*rows*/) {
    return false;
  }
  static bool is_early(const std::byte* /*weights*/) { return false; }
  static bool end_early(const WeightRule& /*rule*/, std::byte* /*weights*/, Rows& /*rows*/) { return false; }
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
  /// Adds to c where `initial` is 1.
  static void run(const void* const* values, void* const* weights, std::size_t tiles, std::size_t padded, float initial,
                  float* c) {
    Product product;
    product.initial = initial;
    product.m = padded;
    product.n = product.k = kBlockSize;
    product.segments = tiles;
    product.a = values;
    product.b = weights;
    product.c = c;
    Multiply::run(product);
  }
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
