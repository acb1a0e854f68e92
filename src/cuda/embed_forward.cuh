// The embedded forward's parts: what a block shares, which tiles of keys it meets in which order, 16 queries of a warp.
#pragma once

#include <cuda_fp16.h>

#include <numbers>

#include "cuda/documents.cuh"
#include "cuda/embed.hpp"
#include "cuda/embed_exponential.cuh"
#include "cuda/embed_logits.cuh"
#include "cuda/embed_mma.cuh"
#include "cuda/outputs.cuh"

namespace mxflash::cuda {

inline constexpr int kEmbedWarps = 8;
inline constexpr int kEmbedThreads = kEmbedWarps * 32;
/// A tile is read while the next is on its way.
inline constexpr int kEmbedStages = 3;
inline constexpr int kWarpQueries = 16;

template <int kKeyDimsOf, int kValueDimsOf, int kBlocksOf>
struct EmbedTraits {
  static constexpr int kKeyDims = kKeyDimsOf;
  static constexpr int kValueDims = kValueDimsOf;
  static constexpr int kBlocks = kBlocksOf;           ///< Of an SM, which leaves registers for so many.
  static constexpr int kKeyBytes = 2 * kKeyDims;      // Of a row.
  static constexpr int kValueBytes = 2 * kValueDims;  // The same.
};

/// A block's work: 128 queries of one document and head, one part of the dims of V.
struct EmbedWork {
  Item item;
  std::int32_t head;
  std::int32_t kv_head;
  std::int32_t part;
  std::uint32_t first_tile;  ///< Of 32 keys of the document, those that a query sees.
  std::uint32_t end_tile;
  WholeTiles some;  ///< No tile outside is whole for any query.
  WholeTiles all;   ///< Every tile inside is whole for all.
};

/// Keys of the document that the 16 queries of a warp see.
struct WarpKeys {
  KeyRange32 some;   ///< At least one of them.
  KeyRange32 every;  ///< All of them.
  WholeTiles whole;
};

/// What the second pass knows of a row.
struct alignas(16) RowReference {
  float t = 0;       ///< m: the integer above all logits with V's exponents.
  float s = 0;       ///< The same without them: what the row sum is relative to.
  float light = 0;   ///< Keys whose V has an exponent up to this may be light.
  float height = 0;  ///< log2 of what P is held down by. Inf: the row sees a poisoned V.
};

template <class Traits>
struct EmbedShared {
  /// Tables begin at multiples of their rows' bytes (row_address).
  struct alignas(Traits::kKeyBytes) Stage {
    std::uint16_t keys[kGroup * Traits::kKeyDims];
    std::uint16_t values[kGroup * Traits::kValueDims];
    EmbeddedKey about[kGroup];
    float heights[kGroup];
  };
  std::uint16_t queries[kTileRows * Traits::kKeyDims];
  Stage stage[kEmbedStages];
  EmbedWork work;
  KeyRange32 visible[kTileRows];
  RowReference row[kTileRows];
  float factor[kTileRows];  // Multiplies scores, after the key's.
  WarpKeys warp[kEmbedWarps];

  static_assert(Traits::kKeyBytes >= Traits::kValueBytes && sizeof(Stage) % Traits::kKeyBytes == 0);
};

/// The keys of every query and warp, and the queries' factors, in shared memory: registers are short.
template <class Traits>
__device__ void find_keys(const EmbedForwardArguments& a, EmbedShared<Traits>& s) {
  const EmbedWork& work = s.work;
  const int query = static_cast<int>(threadIdx.x);
  if (query >= kTileRows) return;
  const KeySpan span = visible_keys(work.item.first_position + std::int64_t{query}, work.item.keys, a.band);
  KeyRange32 keys;
  if (query < work.item.queries) keys = {static_cast<std::int32_t>(span.begin), static_cast<std::int32_t>(span.end)};
  s.visible[query] = keys;
  const std::int64_t place = std::int64_t{work.head} * a.sizes.tokens_q + work.item.query_row + query;
  s.factor[query] = query < work.item.queries ? held(a.tables.query_factor[place] * a.logit_scale, kFarLogit) : 0.0F;
  WarpKeys all;
  // Halves of a warp of threads are the queries of two warps.
  for (int half = 0; half < 2; ++half) {
    const bool mine = query % 32 / kWarpQueries == half;
    const bool some = mine && !keys.empty();
    all.some = {__reduce_min_sync(0xFFFFFFFFU, some ? keys.begin : INT32_MAX),
                __reduce_max_sync(0xFFFFFFFFU, some ? keys.end : 0)};
    all.every = {__reduce_max_sync(0xFFFFFFFFU, mine ? keys.begin : 0),
                 __reduce_min_sync(0xFFFFFFFFU, mine ? keys.end : INT32_MAX)};
    all.whole = whole_tiles(work.item, a.band, query / kGroup);
    if (query % 32 == 0) s.warp[query / kWarpQueries + half] = all;
  }
}

/// The block meets every tile twice: for the largest logits of its rows, then for the weights. Tiles of the second kind
/// come after all of the first.
struct Step {
  std::uint32_t tile : 28;  ///< Of 2^31 keys there are 2^26. In one register with the rest: they are short.
  std::uint32_t phase : 4;

  [[nodiscard]] __device__ std::int32_t pass() const { return static_cast<std::int32_t>(phase) / kTileKinds; }
  [[nodiscard]] __device__ std::int32_t kind() const { return static_cast<std::int32_t>(phase) % kTileKinds; }
  /// Its first key in the document.
  [[nodiscard]] __device__ std::int32_t key() const { return static_cast<std::int32_t>(tile) * kGroup; }
};
inline constexpr std::int32_t kMaxima = 0;
inline constexpr std::int32_t kWeights = 1;
inline constexpr std::int32_t kPasses = 2;

class Steps {
 public:
  __device__ Steps(const EmbedForwardArguments& arguments, const EmbedWork& work) : a_(arguments), work_(work) {}

  /// The first, or one whose pass is kPasses: there is none.
  [[nodiscard]] __device__ Step first() const {
    Step step{work_.first_tile, 0};
    if (work_.end_tile <= work_.first_tile) step.phase = kPasses * kTileKinds;
    if (step.pass() < kPasses && !meets(step)) advance(step);
    return step;
  }
  /// To the next one, likewise.
  __device__ void advance(Step& step) const {
    do {
      step.tile = step.tile + 1;
      if (step.tile < work_.end_tile) continue;
      step.tile = work_.first_tile;
      step.phase = step.phase + (a_.tables.kinds == 1 ? kTileKinds : 1);
    } while (step.pass() < kPasses && !meets(step));
  }

 private:
  /// Whether the tile may be of the kind for some of the queries.
  [[nodiscard]] __device__ bool meets(const Step& step) const {
    if (a_.tables.kinds == 1) return true;
    const std::int32_t key = step.key();
    return step.kind() == kWholeTiles ? work_.some.holds(key) : !work_.all.holds(key);
  }

  const EmbedForwardArguments& a_;
  const EmbedWork& work_;
};

/// Asynchronous copies of a block.
template <class Traits>
class Copies {
 public:
  __device__ Copies(const EmbedForwardArguments& arguments, const EmbedWork& work, EmbedShared<Traits>& shared)
      : a_(arguments), work_(work), s_(shared) {}

  __device__ void queries() const {
    const std::int64_t row = std::int64_t{work_.head} * a_.sizes.tokens_q + work_.item.query_row;
    rows<Traits::kKeyBytes>(s_.queries, a_.tables.queries + row * Traits::kKeyDims, Traits::kKeyDims, kTileRows,
                            work_.item.queries);
  }

  __device__ void tile(const Step& step, int stage) const {
    typename EmbedShared<Traits>::Stage& to = s_.stage[stage];
    const TileKind& kind = a_.tables.kind[step.kind()];
    const std::int32_t first = step.key();
    const std::int32_t count = work_.item.keys - first;  // Or more; beyond are zeros.
    const std::int64_t row = std::int64_t{work_.kv_head} * a_.sizes.tokens_k + work_.item.key_row + first;
    rows<Traits::kKeyBytes>(to.keys, a_.tables.keys + row * Traits::kKeyDims, Traits::kKeyDims, kGroup, count);
    const int key = static_cast<int>(threadIdx.x);
    const bool there = key < count;
    const std::int64_t at = row + (there ? key : 0);
    if (key < kGroup) {
      copy_small(to.about + key, kind.keys + at, there);
      if (step.pass() == kMaxima) copy_small(to.heights + key, kind.heights + at, there);
    }
    if (step.pass() == kMaxima) return;
    const std::int64_t length = std::int64_t{a_.sizes.value_parts} * a_.sizes.value_dims;
    rows<Traits::kValueBytes>(to.values, kind.values + row * length + work_.part * Traits::kValueDims, length, kGroup,
                              count);
  }

 private:
  /// `most` rows to shared memory, of which `count` are there.
  template <int kRowBytes>
  static __device__ void rows(std::uint16_t* to, const std::uint16_t* from, std::int64_t length, int most, int count) {
    constexpr int kChunks = kRowBytes / 16;
    const std::uint32_t base = shared_address(to);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < most * kChunks; i += kEmbedThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const bool there = row < count;
      copy_chunk(base + swizzled<kRowBytes>(row, chunk), from + (there ? row : 0) * length + chunk * 8, there);
    }
  }

  const EmbedForwardArguments& a_;
  const EmbedWork& work_;
  EmbedShared<Traits>& s_;
};

}  // namespace mxflash::cuda

#include "cuda/embed_rows.cuh"
