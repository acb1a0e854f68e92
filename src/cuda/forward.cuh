// The forward kernel's parts: what a block shares, the producer, the consumers.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/documents.cuh"
#include "cuda/kernels.hpp"
#include "cuda/outputs.cuh"
#include "cuda/sm90.cuh"

namespace mxflash::cuda {

inline constexpr int kForwardThreads = 3 * kWarpgroup;
inline constexpr int kConsumerWarps = 8;
/// Tiles after which sums move from the tensor cores' accumulators into FP32: those drop the low bits of every product,
/// and of 2,048 keys that made 1.6 % of O (docs/kernels/sm90-forward.md).
inline constexpr int kTilesBetweenSums = 4;
/// Of a warp's rows of o, what the copy engine takes at a time.
inline constexpr int kOutputRows = 16;
inline constexpr int kOutputBytes = 128;
/// Pieces of work between the warp that takes them and those that do them.
inline constexpr int kWorkStages = 3;

template <int kKeyDimsOf, int kValueDimsOf, int kStagesOf, int kQueryStagesOf, class PvAtomOf>
struct Traits {
  static constexpr int kKeyDims = kKeyDimsOf;
  static constexpr int kValueDims = kValueDimsOf;
  static constexpr int kStages = kStagesOf;
  static constexpr int kQueryStages = kQueryStagesOf;
  static constexpr int kKeys = 128;
  static constexpr int kRowBytes = kKeyDims < 128 ? kKeyDims : 128;
  static constexpr int kChunks = kKeyDims / kRowBytes;
  static constexpr int kOutputs = kValueDims / 2;    // Registers of a thread.
  static constexpr int kSums = kOutputs + 4;         // With the row sum.
  static constexpr int kValueRows = kValueDims + 8;  // What the MMA reads; the copy fills one of the last eight.
  using QkAtom = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
  using PvAtom = PvAtomOf;
};

using Traits64 = Traits<64, 64, 6, 2, cute::SM90::GMMA::MMA_64x72x32_F32E4M3E4M3_RS_TN<>>;
using Traits128 = Traits<128, 128, 3, 2, cute::SM90::GMMA::MMA_64x136x32_F32E4M3E4M3_RS_TN<>>;
using Traits256 = Traits<256, 128, 2, 1, cute::SM90::GMMA::MMA_64x136x32_F32E4M3E4M3_RS_TN<>>;

struct ForwardParameters {
  Sizes sizes;
  Band band;
  Workspace workspace;
  float logit_scale;
  DType dtype;
  void* o;
  float* lse;
  CUtensorMap query_map;
  CUtensorMap key_map;
  CUtensorMap value_map;
  CUtensorMap scale_map;
  // Of o and of what rounding takes from it, by 16 rows of a head; of 16-bit types alone.
  CUtensorMap o_map;
  CUtensorMap residual_map;
};

/// Tiles [first, end) of the document, from its first key on; those that a query of the block sees.
struct TileSpan {
  std::int32_t first;
  std::int32_t end;
};

/// What the warp that takes a piece of work tells the others about it.
struct Work {
  Item item;
  std::int32_t head;  // -1: no more.
  std::int32_t part;
  TileSpan tiles;
  TileSpan own[2];  // Of these, what each group of 64 queries sees.
  Range range;      // Over the tiles.
  float reference;  // Of the row sum.
};

/// And about one of its queries.
struct alignas(16) QueryRow {
  float factor;        ///< Multiplies scores, before the key's.
  float reach;         ///< Bound of the logits' magnitude.
  std::int32_t begin;  ///< Keys [begin, end) of the document are seen.
  std::int32_t end;
};

/// What a thread of the consumers keeps of a row in shared memory, because it is seldom used and registers are short.
enum class Kept : std::uint8_t {
  // Of an item with irregular tiles alone:
  most,      ///< Largest exponent of V that the row sees.
  extra,     ///< Of the row sum: what the multipliers do not count, in units of 2^height.
  height,    ///< An integer, or -inf.
  poisoned,  ///< Not 0: the row sees a poisoned V.
  // Of all:
  total,  ///< Row sum that has been moved out of the accumulators.
  moved,  ///< Scale of the outputs that have been moved.
  scale,  ///< Of the sums, by the last tile that raised the reference: 2^(m before - m).
  count,
};

template <class Traits>
struct ForwardShared {
  struct alignas(1024) Keys {
    std::uint8_t codes[Traits::kKeys * Traits::kKeyDims];
  };
  struct alignas(1024) Values {
    std::uint8_t codes[Traits::kValueRows * Traits::kKeys];
  };
  struct alignas(1024) Queries {
    std::uint8_t codes[kTileRows * Traits::kKeyDims];
  };
  struct alignas(128) Scales {
    KeyScale keys[Traits::kKeys];
  };
  Queries queries[Traits::kQueryStages];
  Keys keys[Traits::kStages];
  Values values[Traits::kStages];
  Scales scales[Traits::kStages];
  alignas(1024) float4 sums[kConsumerWarps][Traits::kOutputs / 4][32];  // Of the consumers' lanes, in FP32.
  float kept[2][2 * static_cast<int>(Kept::count)][kWarpgroup];
  Range ranges[Traits::kStages];
  Work work[kWorkStages];
  QueryRow rows[kWorkStages][kTileRows];
  alignas(8) Barrier queries_full[Traits::kQueryStages];
  Barrier queries_empty[Traits::kQueryStages];
  Barrier keys_full[Traits::kStages];
  Barrier keys_empty[Traits::kStages];
  Barrier values_full[Traits::kStages];
  Barrier values_empty[Traits::kStages];
  Barrier work_full[kWorkStages];
  Barrier work_empty[kWorkStages];

  __device__ void initialize() {
    for (int s = 0; s < Traits::kQueryStages; ++s) {
      queries_full[s].init(1);
      queries_empty[s].init(kConsumerWarps);
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      keys_full[s].init(1);
      keys_empty[s].init(kConsumerWarps);
      values_full[s].init(1);
      values_empty[s].init(kConsumerWarps);
    }
    for (int s = 0; s < kWorkStages; ++s) {
      work_full[s].init(32);                        // The lanes of the warp that takes work.
      work_empty[s].init(kConsumerWarps * 32 + 1);  // And the thread that fetches.
    }
    cutlass::arch::fence_barrier_init();
  }
};

__device__ inline std::int64_t kv_head_of(const ForwardParameters& p, const Work& work) {
  return work.head / (p.sizes.heads / p.sizes.kv_heads);
}

/// Where the ranges of a document's tiles begin.
__device__ inline const Range* ranges_of(const ForwardParameters& p, const Work& work) {
  return p.workspace.ranges + kv_head_of(p, work) * p.sizes.tile_slots() + work.item.first_tile;
}

}  // namespace mxflash::cuda

#include "cuda/forward_consumer.cuh"
#include "cuda/forward_producers.cuh"
