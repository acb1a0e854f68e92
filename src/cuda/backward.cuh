// The backward kernel's parts: what a block shares, the producer, the adder, the consumers.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/backward.hpp"
#include "cuda/backward_sums.cuh"
#include "cuda/documents.cuh"
#include "cuda/range.cuh"
#include "cuda/sm90.cuh"

namespace mxflash::cuda {

inline constexpr int kBackwardThreads = 3 * kWarpgroup;
inline constexpr int kConsumerThreads = 2 * kWarpgroup;
inline constexpr int kBackwardWarps = 8;  // Of consumers.
inline constexpr int kAdders = 2;         // Threads that add dQ up.
/// Tiles of queries, of all heads of a group, after which sums of dK and dV move from the tensor cores' accumulators
/// into FP32; as kTilesBetweenSums of the forward.
inline constexpr int kQueryTilesBetweenSums = 32;

template <int kDimsOf, int kKeyStagesOf, int kQueryStagesOf, class OutAtomOf, class DqAtomOf, class SumsOf>
struct BackwardTraits {
  static constexpr int kDims = kDimsOf;                   // Of S and dP.
  static constexpr int kOut = kDims < 128 ? kDims : 128;  // Of dK, dV and dQ.
  static constexpr int kKeyStages = kKeyStagesOf;
  static constexpr int kQueryStages = kQueryStagesOf;
  // Together 3 x 168, which a block is launched with: for more than that it would wait for ever.
  static constexpr int kProducerRegisters = kDims < 128 ? 40 : 24;
  static constexpr int kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kRowBytes = kOut;
  static constexpr int kChunks = kDims / kRowBytes;
  static constexpr std::size_t kSums = kOut / 2;    // Registers of a thread, of dK and of dV.
  static constexpr std::size_t kDqSums = kOut / 4;  // Of dQ.
  static constexpr int kScores = kQueryTile / 2;
  using ScoreAtom = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>;
  using OutAtom = OutAtomOf;
  using DqAtom = DqAtomOf;
  using Sums = SumsOf;  // Of dQ.
};

template <class Sums>
using BackwardTraits64 = BackwardTraits<64, 2, 4, cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>,
                                        cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_SS_TN<>, Sums>;
template <class Sums>
using BackwardTraits128 = BackwardTraits<128, 2, 2, cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>,
                                         cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>, Sums>;
template <class Sums>
using BackwardTraits256 = BackwardTraits<256, 1, 1, cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>,
                                         cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>, Sums>;

struct BackwardParameters {
  BackwardArguments a;
  CUtensorMap query_map;
  CUtensorMap dout_map;
  CUtensorMap query_columns_map;
  CUtensorMap dout_columns_map;
  CUtensorMap key_map;
  CUtensorMap value_map;
  CUtensorMap key_columns_map;
};

inline constexpr std::int32_t kSameBase = INT32_MIN;

/// A key tile, and whose.
struct KeyWork {
  KeyItem item;
  std::int32_t kv_head;  // -1: no more.
  std::int32_t part;
  std::int32_t rows_q;     // Of a head in the tables.
  std::int32_t dout_base;  // Of the first head: there nobody waits for it.
  Range range;
};

/// Two numbers that are exact in BF16, in one register.
class BfloatPair {
 public:
  __device__ void set(float low, float high) {
    bits_ = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
  [[nodiscard]] __device__ float low() const { return __uint_as_float(bits_ << 16); }
  [[nodiscard]] __device__ float high() const { return __uint_as_float(bits_ & 0xFFFF0000U); }

 private:
  std::uint32_t bits_ = 0;
};

/// Of a thread's two keys. Without value: factor 0, exponent 0.
struct KeyPair {
  BfloatPair factor;    ///< 2^(exponent of K); NaN: poisoned
  BfloatPair exponent;  ///< Of V.
};

/// Which queries see a thread's two keys. Without value: none.
struct alignas(16) KeyRows {
  std::int32_t begin[2];  ///< Of the document, the first query that sees the key,
  std::int32_t end[2];    ///< and the one after the last.

  [[nodiscard]] __device__ bool seen(int r, std::int32_t query) const { return begin[r] <= query && query < end[r]; }
};

/// What a warp knows of its sums and its keys.
struct KeySums {
  std::int32_t raised;       ///< Unit of dK's sums, see KeyConsumer::raised_of.
  std::int32_t base;         ///< Unit of dV's sums: the largest exponent of the head's dO.
  std::int32_t moved;        ///< Not 0: sums wait in global memory.
  float key_most;            ///< Largest factor of K.
  float weight;              ///< 256 2^-base / scale: with 2^-exponent makes of a code times a slope a code of dV.
  float most_below;          ///< A tile of queries with QueryTile::most and
  float norm_below;          ///< QueryTile::norm below these goes the short way.
  std::int32_t whole_begin;  ///< Queries [whole_begin, whole_end) see all of the warp's keys.
  std::int32_t whole_end;
};

template <class Traits>
struct BackwardShared {
  /// Rows 16 a + 8 c + g are keys 16 a + 2 g + c: a thread has neighbours, whose codes of dS lie side by side.
  struct alignas(1024) Keys {
    std::uint8_t keys[kTileRows * Traits::kDims];
    std::uint8_t values[kTileRows * Traits::kDims];
    std::uint8_t columns[Traits::kOut * kTileRows];  // Keys in their order.
  };
  /// Rows 16 a + 8 c + 2 u + b are queries 16 a + 4 u + 2 c + b, as in the forward the keys.
  struct alignas(1024) Queries {
    std::uint8_t queries[kQueryTile * Traits::kDims];
    std::uint8_t dout[kQueryTile * Traits::kDims];
    std::uint8_t query_columns[Traits::kOut * kQueryTile];
    std::uint8_t dout_columns[Traits::kOut * kQueryTile];
  };
  struct alignas(1024) ScoreGradients {
    std::uint8_t codes[kQueryTile * kTileRows];  // Rows of queries.
  };
  Keys keys[Traits::kKeyStages];
  Queries queries[Traits::kQueryStages];
  ScoreGradients ds;
  alignas(128) QueryTile tiles[Traits::kQueryStages];
  std::int32_t bases[Traits::kQueryStages];  // Of dO, where it is another than the tile's before; else kSameBase.
  alignas(128) KeyScale key_scales[Traits::kKeyStages][kTileRows];
  alignas(1024) typename Traits::Sums::Element dq[kQueryTile * Traits::kOut];  // Rows of the sums, see place_of.
  KeyRows rows[2 * kWarpgroup];
  KeySums sums[kBackwardWarps];
  KeyWork work[Traits::kKeyStages];
  alignas(16) float most[2][kBackwardWarps];               // Of |dS| times K's factors, by 32 queries and warp.
  alignas(16) std::uint32_t most_of_query[2][kQueryTile];  ///< The same by query, as bits.
  alignas(8) Barrier keys_full[Traits::kKeyStages];
  Barrier keys_empty[Traits::kKeyStages];
  Barrier queries_full[Traits::kQueryStages];
  Barrier queries_empty[Traits::kQueryStages];
  Barrier most_full;
  Barrier ds_full;
  Barrier dq_full[kAdders];
  Barrier dq_empty;

  __device__ void initialize() {
    for (auto& turn : most_of_query) {
      for (std::uint32_t& most_of : turn) most_of = 0;
    }
    for (int s = 0; s < Traits::kKeyStages; ++s) {
      keys_full[s].init(1);
      keys_empty[s].init(kConsumerThreads + kAdders);
    }
    for (int s = 0; s < Traits::kQueryStages; ++s) {
      queries_full[s].init(1);
      queries_empty[s].init(kConsumerThreads);
    }
    most_full.init(kConsumerThreads);
    ds_full.init(kConsumerThreads);
    for (Barrier& full : dq_full) full.init(kConsumerThreads);
    dq_empty.init(1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace mxflash::cuda

#include "cuda/backward_adder.cuh"
#include "cuda/backward_consumer.cuh"
#include "cuda/backward_producer.cuh"
