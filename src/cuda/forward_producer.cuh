// One warp that takes work, longest first, and keeps the copy engine ahead of the consumers.
#pragma once

#include "cuda/forward.cuh"

namespace mxflash::cuda {

template <class Traits>
class Producer {
 public:
  __device__ Producer(const ForwardParameters& parameters, ForwardShared<Traits>& block)
      : p(parameters), shared(block), lane(static_cast<int>(threadIdx.x)) {}

  __device__ void run() {
    for (;;) {
      shared.work_empty[slot.stage].wait(slot.phase ^ 1);
      const Work work = take();
      if (lane == 0) shared.work[slot.stage] = work;
      __syncwarp();
      if (lane == 0) shared.work_full[slot.stage].arrive();
      slot.advance<2>();
      if (work.head < 0) return;
      if (work.tiles.end > work.tiles.first) fetch(work);
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
    const std::int64_t first = work.item.first_position;
    const std::int64_t begin = max(first - p.band.left, std::int64_t{0});
    const std::int64_t end = min(first + work.item.queries + p.band.right, std::int64_t{work.item.keys});
    if (end > begin) {
      work.tiles = {static_cast<std::int32_t>(begin / Traits::kKeys),
                    static_cast<std::int32_t>((end + Traits::kKeys - 1) / Traits::kKeys)};
      summarize(work);
    }
    return work;
  }

  __device__ std::int64_t range_place(const Work& work, std::int32_t tile) const {
    return kv_head(work) * p.sizes.tile_slots() + work.item.first_tile + tile;
  }
  __device__ std::int64_t kv_head(const Work& work) const { return work.head / (p.sizes.heads / p.sizes.kv_heads); }

  /// The exponents over all tiles, and the reference of the row sum.
  __device__ void summarize(Work& work) {
    Range all{INFINITY, -INFINITY, 0, 0};
    for (std::int32_t tile = work.tiles.first + lane; tile < work.tiles.end; tile += 32) {
      const Range range = p.workspace.ranges[range_place(work, tile)];
      all.least = fminf(all.least, range.least);
      all.most = fmaxf(all.most, range.most);
      all.key_factor = fmaxf(all.key_factor, range.key_factor);
    }
    for (int half = 1; half < 32; half *= 2) {
      all.least = fminf(all.least, __shfl_xor_sync(0xFFFFFFFFU, all.least, half));
      all.most = fmaxf(all.most, __shfl_xor_sync(0xFFFFFFFFU, all.most, half));
      all.key_factor = fmaxf(all.key_factor, __shfl_xor_sync(0xFFFFFFFFU, all.key_factor, half));
    }
    work.range = all;
    const KeyScale first = p.workspace.key_scale[kv_head(work) * p.sizes.rows_k() + work.item.key_row];
    work.reference = first.value_exponent <= static_cast<float>(-kE8m0Bias) ? kUsualExponent : first.value_exponent;
  }

  __device__ void fetch(const Work& work) {
    shared.queries_empty.wait(queries_phase ^ 1);
    queries_phase ^= 1;
    if (lane != 0) {
      for (std::int32_t tile = work.tiles.first; tile < work.tiles.end; ++tile) place.template advance<Traits::kStages>();
      return;
    }
    shared.queries_full.arrive_and_expect_tx(sizeof shared.queries);
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      cute::SM90_TMA_LOAD_3D::copy(&p.query_map, mbar(shared.queries_full), kKeep,
                                   shared.queries.codes + chunk * kTileRows * Traits::kRowBytes,
                                   chunk * Traits::kRowBytes, work.item.query_row, work.head);
    }
    const auto head = static_cast<std::int32_t>(kv_head(work));
    Range next = p.workspace.ranges[range_place(work, work.tiles.end - 1)];
    for (std::int32_t tile = work.tiles.end - 1; tile >= work.tiles.first; --tile) {
      const Range range = next;
      if (tile > work.tiles.first) next = p.workspace.ranges[range_place(work, tile - 1)];
      fetch_keys(head, work.item.key_row + tile * Traits::kKeys, range);
      fetch_values(head * p.sizes.value_parts + work.part, work.item.key_row + tile * Traits::kKeys);
      place.template advance<Traits::kStages>();
    }
  }

  __device__ void fetch_keys(std::int32_t head, std::int32_t key, const Range& range) {
    Barrier& full = shared.keys_full[place.stage];
    shared.keys_empty[place.stage].wait(place.phase ^ 1);
    shared.ranges[place.stage] = range;
    full.arrive_and_expect_tx(sizeof shared.keys[0] + sizeof shared.scales[0].keys);
    const auto row = static_cast<std::int32_t>(head * p.sizes.rows_k() + key);
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&p.key_map, mbar(full), kKeep,
                                   shared.keys[place.stage].codes + chunk * Traits::kKeys * Traits::kRowBytes,
                                   chunk * Traits::kRowBytes, row, 0, 0, 0);
    }
    cute::SM90_TMA_LOAD_2D::copy(&p.scale_map, mbar(full), kKeep, shared.scales[place.stage].keys, 2 * key, head);
  }

  __device__ void fetch_values(std::int32_t plane, std::int32_t key) {
    Barrier& full = shared.values_full[place.stage];
    shared.values_empty[place.stage].wait(place.phase ^ 1);
    full.arrive_and_expect_tx((Traits::kValueDims + 1) * Traits::kKeys);
    cute::SM90_TMA_LOAD_3D::copy(&p.value_map, mbar(full), kKeep, shared.values[place.stage].codes, key, 0, plane);
  }

  static __device__ std::uint64_t* mbar(Barrier& barrier) { return reinterpret_cast<std::uint64_t*>(&barrier); }
  static constexpr auto kKeep = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

  const ForwardParameters& p;
  ForwardShared<Traits>& shared;
  int lane;
  Place slot;
  Place place;
  std::uint32_t queries_phase = 0;
};

}  // namespace mxflash::cuda
