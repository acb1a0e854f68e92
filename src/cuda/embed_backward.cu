// Backward of the recipes that BF16 holds: three kernels that each make logits and weights again from the same tables.
// The first finds what a row's weights and dS are relative to, the second makes dQ by blocks of queries, the third dK
// and dV by blocks of keys. No sum has two writers, so results do not depend on the order of blocks.
#include "cuda/embed_gradients.cuh"
#include "cuda/embed_prescale.cuh"
#include "cuda/embed_products.cuh"
#include "cuda/outputs.cuh"

namespace mxflash::cuda {
namespace {

/// Tiles of 128 keys, or queries, of a document.
struct Tiles {
  std::int32_t first = 0;
  std::int32_t end = 0;
};

__device__ Tiles tiles_of(std::int64_t begin, std::int64_t end, std::int64_t count) {
  begin = max(begin, std::int64_t{0});
  end = min(end, count);
  if (end <= begin) return {};
  return {static_cast<std::int32_t>(begin / kTileRows), static_cast<std::int32_t>((end + kTileRows - 1) / kTileRows)};
}

/// The block's queries, for all threads; false: there are none.
__device__ bool find_queries(const EmbedBackwardArguments& a, Pair& pair) {
  const auto place = static_cast<std::uint32_t>(blockIdx.x / a.sizes.heads);  // Longest first.
  if (a.saved.costs_out[place] == 0) return false;
  if (threadIdx.x == 0) {
    pair.item = a.saved.items[a.saved.order[place]];
    pair.head = static_cast<std::int32_t>(blockIdx.x % a.sizes.heads);
    pair.kv_head = pair.head / (a.sizes.heads / a.sizes.kv_heads);
    pair.first_query = pair.item.query_row - a.offsets.q[pair.item.document];
  }
  __syncthreads();
  return true;
}

/// `take` for every tile of keys that one of the pair's queries sees.
template <class Take>
__device__ void each_tile_of_keys(PairTile& tile, const Take& take) {
  const Item& item = tile.s.pair.item;
  const std::int64_t first = item.first_position;
  const Tiles tiles = tiles_of(first - tile.a.band.left, first + item.queries + tile.a.band.right, item.keys);
  for (std::int32_t t = tiles.first; t < tiles.end; ++t) {
    tile.enter([t](Pair& pair) { pair.first_key = t * kTileRows; });
    take();
  }
}

/// The warps' `x`, one for each row of their squares, to shared memory; then to each of 128 threads those of its row.
template <class Join>
__device__ float join_rows(float (&partial)[kSquares][kTileRows], float x, const Join& join) {
  const Lane at;
  partial[at.warp % kSquares][at.query() + at.lane] = x;
  __syncthreads();
  float all = 0;
  if (threadIdx.x < kTileRows) {
    all = partial[0][threadIdx.x];
    for (int i = 1; i < kSquares; ++i) all = join(all, partial[i][threadIdx.x]);
  }
  return all;
}

/// What the first pass makes of a lane's row.
struct LargestLogits {
  float t = -INFINITY;
  float s = -INFINITY;
  float fold = -kE8m0Bias;  ///< Where V folds.
};

__device__ void look(const PairTile& tile, LargestLogits& most) {
  const TileKind& rule = tile.a.forward.kind[tile.kind(tile.a.forward.kinds)];
  const EmbeddedKey* about = tile.s.about[tile.kind(tile.a.forward.kinds)] + tile.at.key();
  const KeyRange32 keys = tile.columns(tile.at.lane);
  const float factor = tile.s.query_factor[tile.at.query() + tile.at.lane];
  tile.each_column([&](float x, int column) {
    if (column < keys.begin || column >= keys.end) return;
    const EmbeddedKey key = about[column];
    most.t = fmaxf(most.t, logit(x, key, factor));
    most.s = fmaxf(most.s, logit(x, {key.factor, 0.0F}, factor));
    if (rule.folds != 0) most.fold = fmaxf(most.fold, key.fold);
  });
}

/// References of 128 rows: the reference engine's, since their keys are met before any weight is made.
__device__ GradientRow find_references(PairTile& tile) {
  LargestLogits most;
  each_tile_of_keys(tile, [&] {
    tile.multiply_scores();
    if (tile.seen()) look(tile, most);
  });
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  GradientRow row;
  row.t = reference_above(join_rows(tile.s.partial[0], most.t, larger));
  row.s = reference_above(join_rows(tile.s.partial[1], most.s, larger));
  row.light = fmaxf(join_rows(tile.s.partial[2], most.fold, larger) - kLightOctaves, static_cast<float>(-kE8m0Bias));
  return row;
}

struct RowSums {
  float weights = 0;
  float delta = 0;  ///< D
};

__device__ RowSums add_up(PairTile& tile) {
  float sum = 0;
  float delta = 0;
  each_tile_of_keys(tile, [&] {
    tile.multiply_scores();
    float own = 0;
    if (tile.seen()) {
      tile.weigh([&](float counted, float plain) {
        own += tile.a.row_sum == RowSum::quantized ? counted : plain;
        return counted;
      });
    }
    sum += own;
    tile.multiply_gradients([](float x, float dp, int) { return x * dp; });
    if (!tile.seen()) return;
    own = 0;
    tile.each_column([&](float x, int) { own += x; });
    delta += own;
  });
  const auto add = [](float x, float y) { return x + y; };
  const float weights = join_rows(tile.s.partial[0], sum, add);
  return {weights, join_rows(tile.s.partial[1], delta, add) / weights};
}

/// What FP16 sums of dQ are relative to. The first blocks have a document and key/value head each, the others queries.
__global__ void __launch_bounds__(kBoundThreads) embed_bounds_kernel(const __grid_constant__ EmbedBackwardArguments a) {
  if (a.saved.control->status != 0) return;
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  const std::int64_t documents = std::int64_t{a.sizes.documents} * a.sizes.kv_heads;
  if (blockIdx.x >= documents) {
    const std::int64_t row = (blockIdx.x - documents) * kBoundWarps + warp;
    if (row >= std::int64_t{a.sizes.tokens_q} * a.sizes.heads) return;
    bound_query(a, row / a.sizes.heads, static_cast<std::int32_t>(row % a.sizes.heads));
    return;
  }
  const auto document = static_cast<std::int32_t>(blockIdx.x / a.sizes.kv_heads);
  const std::int64_t head = blockIdx.x % a.sizes.kv_heads;
  const std::int64_t first = head * a.sizes.tokens_k + a.offsets.k[document];
  const std::int32_t keys = a.offsets.k[document + 1] - a.offsets.k[document];
  for (std::int32_t key = warp; key < keys; key += kBoundWarps) {
    const KeyBound bound = bound_key(a, first + key);
    if (threadIdx.x % 32 == 0) a.tables.key_bounds[first + key] = bound;
  }
  __syncthreads();
  if (warp == 0) run_maxima(a.tables.key_bounds + first, keys);
}

__global__ void __launch_bounds__(kPairThreads, 1) embed_rows_kernel(const __grid_constant__ EmbedBackwardArguments a) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  if (a.saved.control->status != 0) return;
  PairTile tile(a, *reinterpret_cast<PairShared*>(memory));
  const Pair& pair = tile.s.pair;
  if (!find_queries(a, tile.s.pair)) return;
  const auto query = static_cast<std::int32_t>(threadIdx.x);
  const GradientRow found = find_references(tile);
  GradientRow* row = a.tables.rows + std::int64_t{pair.head} * a.sizes.tokens_q + pair.item.query_row + query;
  if (query < pair.item.queries) *row = found;  // Where the second pass looks for it.
  const RowSums sums = add_up(tile);
  if (query >= pair.item.queries) return;
  row->sum = sums.weights;
  row->delta = sums.delta;
  row->dlse = dlse_of(a, std::int64_t{pair.item.query_row} + query, pair.head);
  if (a.dq_accumulation == DqAccumulation::f32) return;
  const KeySpan keys = visible_keys(pair.item.first_position + std::int64_t{query}, pair.item.keys, a.band);
  row->prescale = prescale_of(a, pair, query, static_cast<std::int32_t>(keys.end));
}

/// Weights w to the square.
__device__ void find_weights(PairTile& tile) {
  tile.multiply_scores();
  if (!tile.seen()) return;
  const float sum = tile.s.row[tile.at.query() + tile.at.lane].sum;
  tile.weigh([&](float counted, float /*plain*/) { return counted / sum; });
}

/// From w to dS. The only key of a row has D = dP, of which a product with its weight and a division by it leave the
/// rounding: that would be all of dP - D.
__device__ void find_score_gradients(PairTile& tile) {
  tile.multiply_gradients([&](float w, float dp, int row) {
    const int query = tile.at.query() + row;
    const KeyRange32 keys = tile.s.visible[query];
    const GradientRow& of = tile.s.row[query];
    const float delta = keys.end - keys.begin == 1 && w == 1.0F ? dp : of.delta;
    return held(w * (dp - delta + of.dlse) * tile.a.scale, kFarLogit);
  });
}

/// What a block leaves: its rows of sums, rotated back where `shift` is not -1, to `out` with `heads` heads.
struct Gradient {
  SumRows sums;
  const GradientRow* halves = nullptr;  ///< Joining::halves.
  std::int32_t dims = 0;
  std::int32_t shift = -1;
  void* out = nullptr;
  std::int64_t first_row = 0;
  std::int32_t heads = 0;
  std::int32_t head = 0;
};

__device__ void finish(const PairTile& tile, const Gradient& of) {
  __syncthreads();  // All sums are there, and squares are free.
  float* row = tile.square();
  for (int r = tile.at.warp; r < of.sums.count; r += kPairThreads / 32) {
    const int prescale = of.halves == nullptr ? 0 : static_cast<int>(of.halves[r].prescale);
    for (int d = tile.at.lane; d < of.dims; d += 32) {
      row[d] = scalbnf(of.sums.first[std::int64_t{r} * of.sums.dims + d], -prescale);
    }
    __syncwarp();
    if (of.shift >= 0) butterflies(row, of.dims);
    const float factor = of.shift >= 0 ? detail::pow2(-of.shift) : 1.0F;
    const std::int64_t to = ((of.first_row + r) * of.heads + of.head) * of.dims;
    for (int d = tile.at.lane; d < of.dims; d += 32) put(tile.a.dtype, of.out, to + d, row[d] * factor);
    __syncwarp();
  }
}

/// dQ of 128 queries of a head.
__global__ void __launch_bounds__(kPairThreads, 1)
    embed_queries_kernel(const __grid_constant__ EmbedBackwardArguments a) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  if (a.saved.control->status != 0) return;
  PairTile tile(a, *reinterpret_cast<PairShared*>(memory));
  const Pair& pair = tile.s.pair;
  if (!find_queries(a, tile.s.pair)) return;
  const std::int64_t row = std::int64_t{pair.head} * a.sizes.tokens_q + pair.item.query_row;
  const SumRows sums{a.tables.dq + row * a.sizes.key_dims, a.sizes.key_dims, pair.item.queries};
  sums.clear();
  const GradientRow* halves = a.dq_accumulation == DqAccumulation::f32 ? nullptr : tile.s.row;
  each_tile_of_keys(tile, [&] {
    find_weights(tile);
    find_score_gradients(tile);
    const int own = max(tile.kind(a.dq_weights.kinds), 0);
    const float* folds = tile.s.key_fold[own] + tile.at.key();
    if (a.shared_codes == 0) {
      write_weights(tile, a.dq_weights, {nullptr, folds, 0});
    } else if (tile.seen()) {
      SquareWeights(tile, a.dq_weights.rule[0], a.dq_weights.stream).write_for_keys(folds);
    }
    const std::int64_t key = std::int64_t{pair.kv_head} * a.sizes.tokens_k + pair.item.key_row + pair.first_key;
    const auto rows = [&](int kind) { return rows_of(a.tables.keys[kind].values, key, a.sizes.key_dims, pair.keys()); };
    const std::uint16_t* cut = a.dq_weights.kinds == 1 ? nullptr : rows(kCutTiles).first;
    add_product<OverKeys>(tile.s, {rows(kWholeTiles), cut}, sums, {1, halves});
  });
  finish(tile, {sums, halves, a.sizes.head_dim, a.rotation_shift, a.dq, pair.item.query_row, a.sizes.heads, pair.head});
}

/// A tile of keys and its document.
struct KeysWork {
  KeyTile tile;
  std::int32_t document = 0;
  std::int32_t first_key = 0;
  Tiles queries;  ///< Of the document, those that may see a key.
};

__device__ KeysWork keys_work(const EmbedBackwardArguments& a, std::int32_t slot) {
  KeysWork work;
  work.tile = a.saved.tiles[slot];
  if (work.tile.keys == 0) return work;
  work.document = document_of_slot(a.offsets.k, a.sizes.documents, slot);
  work.first_key = work.tile.row - work.tile.first_row;
  const std::int64_t queries = a.offsets.q[work.document + 1] - a.offsets.q[work.document];
  const std::int64_t keys = a.offsets.k[work.document + 1] - a.offsets.k[work.document];
  // A query at `place` is at position place + keys - queries.
  const std::int64_t first = work.first_key - (keys - queries);
  work.queries = tiles_of(first - a.band.right, first + work.tile.keys + a.band.left, queries);
  return work;
}

/// One pair's part of dK and dV.
__device__ void add_key_gradients(const EmbedBackwardArguments& a, PairTile& tile, const SumRows& dk,
                                  const SumRows& dv) {
  const Pair& pair = tile.s.pair;
  const std::int64_t query = std::int64_t{pair.head} * a.sizes.tokens_q + pair.item.query_row;
  const std::uint32_t largest = a.tables.dout_largest[std::int64_t{pair.head} * a.sizes.documents + pair.item.document];
  const int base = largest == 0 ? 0 : static_cast<int>(largest) - kE8m0Bias - 1;
  find_weights(tile);
  write_weights(tile, a.dv_weights, {tile.s.dout_fold + tile.at.query(), nullptr, static_cast<float>(base)});
  add_product<OverQueries>(tile.s, {rows_of(a.tables.dout.values, query, dv.dims, pair.item.queries)}, dv,
                           {detail::pow2(base)});
  find_score_gradients(tile);
  const float* folds = tile.s.query_fold + tile.at.query();
  if (a.shared_codes == 0) {
    write_weights(tile, a.dk_weights, {folds, nullptr, 0});
  } else if (tile.seen()) {
    SquareWeights(tile, a.dk_weights.rule[0], a.dk_weights.stream).write_for_queries(folds);
  }
  add_product<OverQueries>(tile.s, {rows_of(a.tables.queries.values, query, dk.dims, pair.item.queries)}, dk, {});
}

/// dK and dV of 128 keys of a key/value head: query heads of the group in rising order, queries likewise.
__global__ void __launch_bounds__(kPairThreads, 1) embed_keys_kernel(const __grid_constant__ EmbedBackwardArguments a) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  if (a.saved.control->status != 0) {
    write_nan_gradients(a, a.sizes);
    return;
  }
  PairTile tile(a, *reinterpret_cast<PairShared*>(memory));
  const KeysWork work = keys_work(a, static_cast<std::int32_t>(blockIdx.x / a.sizes.kv_heads));
  if (work.tile.keys == 0) return;
  const auto kv_head = static_cast<std::int32_t>(blockIdx.x % a.sizes.kv_heads);
  const std::int64_t row = std::int64_t{kv_head} * a.sizes.tokens_k + work.tile.row;
  const std::int32_t value_dims = a.sizes.value_parts * a.sizes.value_dims;
  const SumRows dk{a.tables.dk + row * a.sizes.key_dims, a.sizes.key_dims, work.tile.keys};
  const SumRows dv{a.tables.dv + row * value_dims, value_dims, work.tile.keys};
  dk.clear();
  dv.clear();
  const std::int32_t group = a.sizes.heads / a.sizes.kv_heads;
  for (std::int32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (std::int32_t t = work.queries.first; t < work.queries.end; ++t) {
      tile.enter([&](Pair& pair) {
        const Item& item = a.saved.items[first_slot(a.offsets.q, work.document) + t];
        pair = {item, head, kv_head, t * kTileRows, work.first_key};
      });
      add_key_gradients(a, tile, dk, dv);
    }
  }
  finish(tile, {dk, nullptr, a.sizes.head_dim, a.rotation_shift, a.dk, work.tile.row, a.sizes.kv_heads, kv_head});
  finish(tile, {dv, nullptr, a.sizes.value_dim, -1, a.dv, work.tile.row, a.sizes.kv_heads, kv_head});
}

template <class Kernel>
cudaError_t launch(const Kernel& kernel, std::int64_t blocks, const EmbedBackwardArguments& a, cudaStream_t stream) {
  constexpr auto kBytes = static_cast<int>(sizeof(PairShared));
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kPairThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t launch_bounds(const EmbedBackwardArguments& a, cudaStream_t stream) {
  const Sizes& sizes = a.sizes;
  const auto heads = static_cast<std::size_t>(sizes.heads) * static_cast<std::size_t>(sizes.documents);
  const cudaError_t error = cudaMemsetAsync(a.tables.document_bounds, 0, heads * sizeof(QueryBounds), stream);
  if (error != cudaSuccess) return error;
  const std::int64_t rows = std::int64_t{sizes.tokens_q} * sizes.heads;
  const std::int64_t blocks = std::int64_t{sizes.documents} * sizes.kv_heads + (rows + kBoundWarps - 1) / kBoundWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  embed_bounds_kernel<<<static_cast<unsigned>(blocks), kBoundThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

int launch_embed_backward(const EmbedBackwardLaunches& launches, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const EmbedBackwardArguments& a = launches.backward;
  const Sizes& sizes = a.sizes;
  cudaError_t error = cudaMemcpyAsync(a.control, a.saved.control, sizeof(Control), cudaMemcpyDeviceToDevice, on);
  if (error != cudaSuccess) return error;
  const std::size_t bytes = static_cast<std::size_t>(sizes.heads) * static_cast<std::size_t>(sizes.documents);
  error = cudaMemsetAsync(a.tables.dout_largest, 0, bytes * sizeof(std::uint32_t), on);
  if (error != cudaSuccess) return error;
  const std::int64_t items = sizes.tokens_q == 0 ? 0 : sizes.item_slots() * sizes.heads;
  if (items != 0) {
    if (const int code = launch_embed_quantize(launches.quantize, stream); code != 0) return code;
  }
  if (items != 0 && a.dq_accumulation != DqAccumulation::f32) {
    error = launch_bounds(a, on);
    if (error != cudaSuccess) return error;
  }
  error = launch(embed_rows_kernel, items, a, on);
  if (error != cudaSuccess) return error;
  error = launch(embed_queries_kernel, items, a, on);
  if (error != cudaSuccess) return error;
  return launch(embed_keys_kernel, sizes.tile_slots() * sizes.kv_heads, a, on);
}

}  // namespace mxflash::cuda
