// 128 queries against 128 keys of one document and head, both counted from the document's first, so that whatever
// shares a scale of P or dS lies inside. A block has sixteen warps, each a square of 32 x 32: there the warp
// multiplies, quantizes and rounds alone. Its numbers lie in shared memory, so that it takes them as fragments of a
// product, or a lane a row or a column of them.
#pragma once

#include "cuda/embed_backward.hpp"
#include "cuda/embed_codes.cuh"
#include "cuda/embed_logits.cuh"
#include "cuda/embed_mma.cuh"

namespace mxflash::cuda {

inline constexpr int kPairThreads = 512;
inline constexpr int kSquares = 4;       // Along a side.
inline constexpr int kChunkDims = 64;    // Of operands in shared memory.
inline constexpr int kChunkBytes = 128;  // Of a row.
inline constexpr int kWeightBytes = 256;
inline constexpr int kPitch = 40;  // Floats between a square's rows: eight lanes' pairs lie in different banks.
inline constexpr std::int32_t kUnseen = -1;

/// What is multiplied: queries of an item against up to 128 keys of its document.
struct Pair {
  Item item;
  std::int32_t head = 0;
  std::int32_t kv_head = 0;
  std::int32_t first_query = 0;  ///< Their places in the document.
  std::int32_t first_key = 0;

  /// Keys of the document from the first on; those beyond 128 are not meant.
  [[nodiscard]] __device__ std::int32_t keys() const { return item.keys - first_key; }
};

struct PairShared {
  alignas(1024) std::uint16_t stage[2][2][kTileRows * kChunkDims];
  std::uint16_t weights[kTileRows * kTileRows];
  float square[kSquares * kSquares][kGroup * kPitch];
  // By query.
  KeyRange32 visible[kTileRows];  // Of the document.
  float query_factor[kTileRows];  // Multiplies scores, after the key's.
  float dout_factor[kTileRows];
  float dout_fold[kTileRows];
  float query_fold[kTileRows];
  GradientRow row[kTileRows];
  // By key.
  alignas(16) EmbeddedKey about[kTileKinds][kTileRows];
  float value_factor[kTileRows];
  float key_fold[kTileKinds][kTileRows];
  // Of squares: kUnseen where no query sees a key.
  std::int32_t kind[kSquares * kSquares];
  std::uint32_t most[kTileRows];  // Bits of maxima that a second level follows from.
  float partial[3][kSquares][kTileRows];
  Pair pair;  // In one place: registers are short.
};

static_assert(sizeof(PairShared) <= 227 * 1024);

/// Rows of a table, zeros after `count`.
struct TableRows {
  const std::uint16_t* first = nullptr;
  std::int32_t dims = 0;
  std::int32_t count = 0;
};

__device__ inline TableRows rows_of(const std::uint16_t* values, std::int64_t row, std::int32_t dims,
                                    std::int32_t count) {
  return {values + row * dims, dims, min(count, kTileRows)};
}

/// 64 dims of 128 rows: a thread has a piece of two rows, which lie alike among the swizzled ones.
__device__ inline void copy_rows(std::uint16_t* to, const TableRows& rows, int chunk) {
  constexpr int kPieces = kChunkBytes / 16;
  constexpr int kStep = kPairThreads / kPieces;
  static_assert(kTileRows == 2 * kStep && kStep % kPieces == 0);
  const int row = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const std::uint32_t place = shared_address(to) + swizzled<kChunkBytes>(row, piece);
  const std::uint16_t* from = rows.first + row * rows.dims + chunk * kChunkDims + piece * 8;
  const bool both = row + kStep < rows.count;
  copy_chunk(place, row < rows.count ? from : rows.first, row < rows.count);
  copy_chunk(place + kStep * kChunkBytes, both ? from + kStep * rows.dims : rows.first, both);
}

/// A thread's place.
struct Lane {
  int lane = static_cast<int>(threadIdx.x % 32);
  int warp = static_cast<int>(threadIdx.x / 32);

  [[nodiscard]] __device__ int query() const { return warp / kSquares * kGroup; }  ///< First of the square.
  [[nodiscard]] __device__ int key() const { return warp % kSquares * kGroup; }
  /// Row and chunk of a lane's address where matrices 0 and 1 are rows 0 to 15 of one chunk, and where they are two
  /// chunks of rows 0 to 7.
  [[nodiscard]] __device__ int row_16() const { return lane % 16; }
  [[nodiscard]] __device__ int chunk_16() const { return lane / 16; }
  [[nodiscard]] __device__ int row_8() const { return lane / 16 * 8 + lane % 8; }
  [[nodiscard]] __device__ int chunk_8() const { return lane / 8 % 2; }
};

using SquareSums = float[2][4][4];

class PairTile {
 public:
  __device__ PairTile(const EmbedBackwardArguments& arguments, PairShared& shared) : a(arguments), s(shared) {}

  /// The next pair: one thread's `set` changes what is multiplied; then everything that tokens have beside their
  /// numbers.
  template <class Set>
  __device__ void enter(const Set& set) {
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();  // All are done with the one before.
    if (thread == 0) set(s.pair);
    __syncthreads();
    if (thread < kTileRows) {
      read_query(s.pair, thread);
    } else if (thread < 2 * kTileRows) {
      read_key(s.pair, thread - kTileRows);
    }
    __syncthreads();
    if (at.warp < kSquares) find_kinds(s.pair, at.warp);
    __syncthreads();
  }

  [[nodiscard]] __device__ bool seen() const { return s.kind[at.warp] != kUnseen; }
  /// Of the warp's square, where a product has `kinds` of operands.
  [[nodiscard]] __device__ int kind(int kinds) const { return kinds == 1 ? 0 : s.kind[at.warp]; }
  [[nodiscard]] __device__ float* square() const { return s.square[at.warp]; }
  /// Columns of the square that a row of it sees.
  [[nodiscard]] __device__ KeyRange32 columns(int row) const {
    const KeyRange32 keys = s.visible[at.query() + row];
    const std::int32_t first = s.pair.first_key + at.key();
    return {keys.begin - first, keys.end - first};
  }

  /// Q K^T to the square.
  __device__ void multiply_scores() {
    SquareSums sums;
    multiply_over_dims(query_rows(a.forward.queries, a.sizes.key_dims), key_rows(a.forward.keys, a.sizes.key_dims),
                       sums);
    if (!seen()) return;
    each_fragment([&](int row, int column, int m, int n, int j) { square()[row * kPitch + column] = sums[m][n][j]; });
    __syncwarp();
  }

  /// `take(x, dP, row)` of every visible pair in place of the square's number x; 0 of the others.
  template <class Take>
  __device__ void multiply_gradients(const Take& take) {
    const int dims = a.sizes.value_parts * a.sizes.value_dims;
    SquareSums sums;
    multiply_over_dims(query_rows(a.tables.dout_rows.values, dims), key_rows(a.tables.value_rows.values, dims), sums);
    if (!seen()) return;
    each_fragment([&](int row, int column, int m, int n, int j) {
      const KeyRange32 keys = columns(row);
      float& x = square()[row * kPitch + column];
      if (column < keys.begin || column >= keys.end) {
        x = 0;
        return;
      }
      const float dp = sums[m][n][j] * s.value_factor[at.key() + column] * s.dout_factor[at.query() + row];
      x = take(x, held(dp, kFarLogit), row);
    });
    __syncwarp();
  }

  /// Logits to weights relative to s; a lane has a row. `take(counted, plain)` gives what the square then holds: a
  /// key's code without V's exponent, or its weight before rounding where that would be lost; and the weight before
  /// rounding.
  template <class Take>
  __device__ void weigh(const Take& take) const {
    const TileKind& rule = a.forward.kind[kind(a.forward.kinds)];
    const EmbeddedKey* about = s.about[kind(a.forward.kinds)] + at.key();
    const GradientRow of = s.row[at.query() + at.lane];
    const KeyRange32 keys = columns(at.lane);
    const float factor = s.query_factor[at.query() + at.lane];
    float top = -INFINITY;
    each_column([&](float& x, int column) {
      if (column < keys.begin || column >= keys.end) return;
      x = held(logit(x, about[column], factor), kFarLogit);
      top = fmaxf(top, x);
    });
    const float divisor = log2_divisor(rule.rule, top, of.t);
    each_column([&](float& x, int column) {
      if (column < keys.begin || column >= keys.end) {
        x = 0;
        return;
      }
      const float fold = about[column].fold;
      const float code = rounded_to(rule.rule.to, exp2_fast(x - divisor));
      const float plain = exp2_fast(x - fold - of.s);
      const bool light = rule.folds != 0 && fold <= of.light && code < rule.rule.smallest_normal;
      x = take(light ? plain : code * held_pow2(divisor - of.s - fold), plain);
    });
    __syncwarp();
  }

  /// `take(x, column)` of the lane's row; lanes begin at different columns, which lie in different banks.
  template <class Take>
  __device__ void each_column(const Take& take) const {
#pragma unroll 2
    for (int i = 0; i < kGroup; ++i) {
      const int column = (i + at.lane) % kGroup;
      take(square()[at.lane * kPitch + column], column);
    }
  }

  const EmbedBackwardArguments& a;
  PairShared& s;
  const Lane at;

 private:
  __device__ void read_query(const Pair& pair, int query) const {
    const KeySpan span = visible_keys(pair.item.first_position + std::int64_t{query}, pair.item.keys, a.band);
    const bool there = query < pair.item.queries;
    const std::int64_t place = std::int64_t{pair.head} * a.sizes.tokens_q + pair.item.query_row + query;
    KeyRange32 keys;
    if (there) keys = {static_cast<std::int32_t>(span.begin), static_cast<std::int32_t>(span.end)};
    s.visible[query] = keys;
    s.query_factor[query] = there ? held(a.forward.query_factor[place] * a.logit_scale, kFarLogit) : 0.0F;
    s.dout_factor[query] = there ? a.tables.dout_rows.about[place] : 0.0F;
    s.dout_fold[query] = there ? a.tables.dout.about[place] : 0.0F;
    s.query_fold[query] = there ? a.tables.queries.about[place] : 0.0F;
    s.row[query] = there ? a.tables.rows[place] : GradientRow{};
  }

  /// A key beyond the document counts as poisoned: it takes no part in what folds.
  __device__ void read_key(const Pair& pair, int key) const {
    const bool there = key < pair.keys();
    const std::int64_t place = std::int64_t{pair.kv_head} * a.sizes.tokens_k + pair.item.key_row + pair.first_key + key;
    for (int kind = 0; kind < a.forward.kinds; ++kind) {
      s.about[kind][key] = there ? a.forward.kind[kind].keys[place] : EmbeddedKey{};
    }
    for (int kind = 0; kind < a.dq_weights.kinds; ++kind) {
      s.key_fold[kind][key] = there ? a.tables.keys[kind].about[place] : detail::float_of(detail::kNanBits);
    }
    s.value_factor[key] = there ? a.tables.value_rows.about[place] : 0.0F;
  }

  /// Of the four squares of 32 queries. Their ranges of keys rise by one a row: what any of them sees is one range.
  __device__ void find_kinds(const Pair& pair, int group) const {
    const KeyRange32 keys = s.visible[group * kGroup + at.lane];
    const auto begin = __reduce_min_sync(0xFFFFFFFFU, keys.empty() ? INT32_MAX : keys.begin);
    const auto end = __reduce_max_sync(0xFFFFFFFFU, keys.empty() ? 0 : keys.end);
    if (at.lane >= kSquares) return;
    const std::int32_t first = pair.first_key + at.lane * kGroup;
    const bool some = first < end && first + kGroup > begin;
    const WholeTiles whole = whole_tiles(pair.item, a.band, group);
    s.kind[group * kSquares + at.lane] = !some ? kUnseen : whole.holds(first) ? kWholeTiles : kCutTiles;
  }

  [[nodiscard]] __device__ TableRows query_rows(const std::uint16_t* values, std::int32_t dims) const {
    const std::int64_t row = std::int64_t{s.pair.head} * a.sizes.tokens_q + s.pair.item.query_row;
    return rows_of(values, row, dims, s.pair.item.queries);
  }
  [[nodiscard]] __device__ TableRows key_rows(const std::uint16_t* values, std::int32_t dims) const {
    const std::int64_t row = std::int64_t{s.pair.kv_head} * a.sizes.tokens_k + s.pair.item.key_row + s.pair.first_key;
    return rows_of(values, row, dims, s.pair.keys());
  }

  /// `take(row, column, m, n, j)` of the sums that a thread has.
  template <class Take>
  __device__ void each_fragment(const Take& take) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) take(16 * m + at.lane / 4 + j / 2 * 8, 8 * n + at.lane % 4 * 2 + j % 2, m, n, j);
      }
    }
  }

  /// Of the warp's square, with copies of all warps.
  __device__ void multiply_over_dims(const TableRows& left, const TableRows& right, SquareSums& sums) const {
    each_fragment([&](int, int, int m, int n, int j) { sums[m][n][j] = 0; });
    const int chunks = left.dims / kChunkDims;
    const auto copy = [&](int chunk) {
      copy_rows(s.stage[chunk % 2][0], left, chunk);
      copy_rows(s.stage[chunk % 2][1], right, chunk);
    };
    copy(0);
    commit_copies();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (chunk + 1 < chunks) copy(chunk + 1);
      commit_copies();
      wait_copies<1>();
      __syncthreads();
      if (seen()) multiply_chunk(s.stage[chunk % 2], sums);
      __syncthreads();
    }
  }

  __device__ void multiply_chunk(const std::uint16_t (&stage)[2][kTileRows * kChunkDims], SquareSums& sums) const {
    const std::uint32_t query = shared_address(stage[0]);
    const std::uint32_t key = shared_address(stage[1]);
#pragma unroll
    for (int k = 0; k < kChunkDims / 16; ++k) {
      std::uint32_t left[2][4];
      std::uint32_t right[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices(left[half],
                      query + swizzled<kChunkBytes>(at.query() + 16 * half + at.row_16(), 2 * k + at.chunk_16()));
        load_matrices(right[half],
                      key + swizzled<kChunkBytes>(at.key() + 16 * half + at.row_8(), 2 * k + at.chunk_8()));
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
          multiply_bf16(sums[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

}  // namespace mxflash::cuda
