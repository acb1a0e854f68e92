// Two warps ahead of the consumers: one takes work, longest first, and says what it is; one keeps the copy engine busy.
#pragma once

#include "cuda/forward.cuh"
#include "cuda/range.cuh"

namespace mxflash::cuda {

template <class Traits>
class Taker {
 public:
  __device__ Taker(const ForwardParameters& parameters, ForwardShared<Traits>& block)
      : p(parameters), shared(block), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    for (;;) {
      const Work work = take();
      QueryScale scales[kTileRows / 32];
      if (work.head >= 0) load_scales(work, scales);  // Here nobody waits for them; the consumers would.
      shared.work_empty[slot.stage()].wait(slot.phase() ^ 1);
      if (work.head >= 0) {
#pragma unroll
        for (int i = 0; i < kTileRows / 32; ++i) {
          const int query = lane + 32 * i;
          shared.rows[slot.stage()][query] = row_of(work, query, scales[i]);
        }
      }
      if (lane == 0) shared.work[slot.stage()] = work;
      shared.work_full[slot.stage()].arrive();  // Every lane, for what it wrote itself: racecheck follows no other.
      __syncwarp();
      slot.template advance<kWorkStages>();
      if (work.head < 0) return;
    }
  }

 private:
  __device__ Work take() {
    Work work{};
    work.head = -1;
    std::uint32_t index = 0;
    if (lane == 0) index = atomicAdd(&p.workspace.control->next, 1U);
    index = __shfl_sync(0xFFFFFFFFU, index, 0);
    const auto slots = static_cast<std::uint32_t>(p.sizes.item_slots());
    const auto per_item = static_cast<std::uint32_t>(p.sizes.heads * p.sizes.value_parts);
    const std::uint32_t place = index / per_item;
    // Slots without an item are last.
    if (place >= slots || p.workspace.costs_out[place] == 0) return work;
    work.item = p.workspace.items[p.workspace.order[place]];
    work.head = static_cast<std::int32_t>(index % per_item) / p.sizes.value_parts;
    work.part = static_cast<std::int32_t>(index % per_item) % p.sizes.value_parts;
    work.tiles = tiles_of(work.item, 0, work.item.queries);
    for (int group = 0; group < 2; ++group) {
      work.own[group] = tiles_of(work.item, group * 64, min(work.item.queries, group * 64 + 64));
    }
    if (work.tiles.end > work.tiles.first) summarize(work);
    return work;
  }

  /// That one of the item's queries [first, last) sees.
  __device__ TileSpan tiles_of(const Item& item, std::int32_t first, std::int32_t last) const {
    const std::int64_t begin = max(item.first_position + std::int64_t{first} - p.band.left, std::int64_t{0});
    const std::int64_t end = min(item.first_position + last + p.band.right, std::int64_t{item.keys});
    if (last <= first || end <= begin) return {0, 0};
    return {static_cast<std::int32_t>(begin / Traits::kKeys),
            static_cast<std::int32_t>((end + Traits::kKeys - 1) / Traits::kKeys)};
  }

  /// Of the item's queries; beyond them zeros.
  __device__ void load_scales(const Work& work, QueryScale (&scales)[kTileRows / 32]) const {
    const QueryScale* of_item = p.workspace.query_scale + work.head * p.sizes.rows_q() + work.item.query_row;
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i) {
      const int query = lane + 32 * i;
      scales[i] = query < work.item.queries ? of_item[query] : QueryScale{};
    }
  }

  /// Beyond the item's queries one that sees no key.
  __device__ QueryRow row_of(const Work& work, int query, const QueryScale& scale) const {
    const float reach =
        fabsf(p.logit_scale) * scale.norm * work.range.key_norm + fabsf(work.range.most) + kLightOctaves;
    QueryRow row{scale.factor * p.logit_scale, reach, 0, 0};
    if (query >= work.item.queries) return row;
    const KeySpan seen = visible_keys(work.item.first_position + std::int64_t{query}, work.item.keys, p.band);
    row.begin = static_cast<std::int32_t>(seen.begin);
    row.end = static_cast<std::int32_t>(seen.end);
    return row;
  }

  /// The exponents over all tiles, and the reference of the row sum.
  __device__ void summarize(Work& work) {
    Range all = empty_range();
    const Range* ranges = ranges_of(p, work);
    for (std::int32_t tile = work.tiles.first + lane; tile < work.tiles.end; tile += 32) {
      all = join(all, ranges[tile]);
    }
    work.range = join_lanes(all);
    const KeyScale first = p.workspace.key_scale[kv_head_of(p, work) * p.sizes.columns() + work.item.first_column];
    work.reference = sum_reference(first.value_exponent);
  }

  const ForwardParameters& p;
  ForwardShared<Traits>& shared;
  int lane;
  Place slot;
};

template <class Traits>
class Fetcher {
 public:
  __device__ Fetcher(const ForwardParameters& parameters, ForwardShared<Traits>& block)
      : p(parameters), shared(block) {}

  /// One thread works; its warp waits for it.
  __device__ void run() {
    if (threadIdx.x == 0) {
      while (next()) {
      }
    }
    __syncwarp();
  }

 private:
  __device__ bool next() {
    shared.work_full[slot.stage()].wait(slot.phase());
    const Work work = shared.work[slot.stage()];
    shared.work_empty[slot.stage()].arrive();
    slot.template advance<kWorkStages>();
    if (work.head < 0) return false;
    if (work.tiles.end > work.tiles.first) fetch(work);
    return true;
  }

  __device__ void fetch(const Work& work) {
    Barrier& full = shared.queries_full[queries.stage()];
    shared.queries_empty[queries.stage()].wait(queries.phase() ^ 1);
    full.arrive_and_expect_tx(sizeof shared.queries[0]);
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      cute::SM90_TMA_LOAD_3D::copy(&p.query_map, mbar(full), kKeep,
                                   shared.queries[queries.stage()].codes + chunk * kTileRows * Traits::kRowBytes,
                                   chunk * Traits::kRowBytes, work.item.query_row, work.head);
    }
    queries.template advance<Traits::kQueryStages>();
    const auto head = static_cast<std::int32_t>(kv_head_of(p, work));
    const Range* ranges = ranges_of(p, work);
    Range coming = ranges[work.tiles.end - 1];
    for (std::int32_t tile = work.tiles.end - 1; tile >= work.tiles.first; --tile) {
      const Range range = coming;
      if (tile > work.tiles.first) coming = ranges[tile - 1];
      fetch_keys(work, head, tile * Traits::kKeys, range);
      fetch_values(head * p.sizes.value_parts + work.part, work.item.first_column + tile * Traits::kKeys);
      place.template advance<Traits::kStages>();
    }
  }

  __device__ void fetch_keys(const Work& work, std::int32_t head, std::int32_t key, const Range& range) {
    Barrier& full = shared.keys_full[place.stage()];
    shared.keys_empty[place.stage()].wait(place.phase() ^ 1);
    shared.ranges[place.stage()] = range;
    full.arrive_and_expect_tx(sizeof shared.keys[0] + sizeof shared.scales[0].keys);
    const auto row = static_cast<std::int32_t>(head * p.sizes.rows_k() + work.item.key_row + key);
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&p.key_map, mbar(full), kKeep,
                                   shared.keys[place.stage()].codes + chunk * Traits::kKeys * Traits::kRowBytes,
                                   chunk * Traits::kRowBytes, row, 0, 0, 0);
    }
    cute::SM90_TMA_LOAD_2D::copy(&p.scale_map, mbar(full), kKeep, shared.scales[place.stage()].keys,
                                 2 * (work.item.first_column + key), head);
  }

  __device__ void fetch_values(std::int32_t plane, std::int32_t column) {
    Barrier& full = shared.values_full[place.stage()];
    shared.values_empty[place.stage()].wait(place.phase() ^ 1);
    full.arrive_and_expect_tx((Traits::kValueDims + 1) * Traits::kKeys);
    cute::SM90_TMA_LOAD_3D::copy(&p.value_map, mbar(full), kKeep, shared.values[place.stage()].codes, column, 0, plane);
  }

  static __device__ std::uint64_t* mbar(Barrier& barrier) { return reinterpret_cast<std::uint64_t*>(&barrier); }
  static constexpr auto kKeep = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

  const ForwardParameters& p;
  ForwardShared<Traits>& shared;
  Place slot;
  Place queries;
  Place place;
};

}  // namespace mxflash::cuda
