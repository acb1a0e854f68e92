// One thread ahead of the consumers: takes key tiles, of long documents first, and keeps the copy engine busy.
#pragma once

#include "cuda/backward.cuh"

namespace mxflash::cuda {

template <class Traits>
class KeyProducer {
 public:
  __device__ KeyProducer(const BackwardParameters& parameters, BackwardShared<Traits>& block)
      : p(parameters), sizes(parameters.a.sizes.forward), shared(block) {}

  __device__ void run() {
    for (;;) {
      // Not in registers: it stays there until its last queries have been met.
      const KeyWork& work = shared.work[keys.stage()];
      fetch_keys();
      if (work.kv_head < 0) return;
      const std::int32_t group = sizes.heads / sizes.kv_heads;
#pragma unroll 1
      for (std::int32_t i = 0; i < work.item.tiles() * group; ++i) {
        const KeyItem::Meeting met = work.item.met(i, group);
        fetch_queries(work, work.kv_head * group + met.head, met.tile);
      }
    }
  }

 private:
  __device__ void take(KeyWork& work) const {
    work.kv_head = -1;
    const BackwardWorkspace& made = p.a.workspace;
    // All in 32 bits, as the host has seen to.
    const auto planes = static_cast<std::uint32_t>(sizes.kv_heads * p.a.sizes.parts);
    const std::uint32_t index = atomicAdd(&made.control->next, 1U);
    std::uint32_t place = index / planes;
    // Slots without an item are last.
    if (place >= static_cast<std::uint32_t>(sizes.tile_slots()) || made.costs_out[place] == 0) return;
    const KeyItem& any = made.items[made.order[place]];  // Of the same document.
    place -= static_cast<std::uint32_t>(any.first_key / kTileRows);
    const auto tiles = static_cast<std::uint32_t>((any.keys_of_document + kTileRows - 1) / kTileRows);
    const Piece piece = piece_of(index - place * planes, tiles, planes);
    copy_item(made.items[made.order[place + piece.tile]], work.item);
    work.kv_head = static_cast<std::int32_t>(piece.plane) / p.a.sizes.parts;
    work.part = static_cast<std::int32_t>(piece.plane) % p.a.sizes.parts;
    work.rows_q = static_cast<std::int32_t>(sizes.rows_q());
  }

  /// A piece at a time: registers are short.
  static __device__ void copy_item(const KeyItem& from, KeyItem& to) {
    constexpr int kPieces = sizeof(KeyItem) / sizeof(int4);
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) reinterpret_cast<int4*>(&to)[i] = reinterpret_cast<const int4*>(&from)[i];
  }

  __device__ void fetch_keys() {
    const std::uint32_t stage = keys.stage();
    Barrier& full = shared.keys_full[stage];
    shared.keys_empty[stage].wait(keys.phase() ^ 1);
    cutlass::arch::fence_view_async_shared();  // Rows of dK and dV went through the keys' place.
    KeyWork& work = shared.work[stage];
    take(work);
    keys.template advance<Traits::kKeyStages>();
    if (work.kv_head < 0 || work.item.end_tile <= work.item.first_tile) {
      full.arrive();
      return;
    }
    const std::int32_t head = work.kv_head * (sizes.heads / sizes.kv_heads);
    const std::int32_t base = p.a.workspace.dout_base[head * sizes.documents + work.item.document];
    work.dout_base = base_ = base == kSameBase ? 0 : base;  // Not there: no dO.
    work.range = p.a.saved.ranges[work.kv_head * work.item.tile_slots + work.item.tile_slot];
    auto& to = shared.keys[stage];
    full.arrive_and_expect_tx(sizeof to + sizeof shared.key_scales[0]);
    const std::int32_t row = work.kv_head * static_cast<std::int32_t>(sizes.rows_k()) + work.item.key_row;
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const int offset = chunk * kTileRows * Traits::kRowBytes;
      cute::SM90_TMA_LOAD_4D::copy(&p.key_map, mbar(full), kKeep, to.keys + offset, chunk * Traits::kRowBytes, 0, row,
                                   0);
      cute::SM90_TMA_LOAD_4D::copy(&p.value_map, mbar(full), kKeep, to.values + offset, chunk * Traits::kRowBytes, 0,
                                   row, 0);
    }
    cute::SM90_TMA_LOAD_3D::copy(&p.key_columns_map, mbar(full), kKeep, to.columns, work.item.column,
                                 work.part * Traits::kOut, work.kv_head);
    copy_bytes(p.a.saved.key_scale + work.kv_head * sizes.columns() + work.item.column, full, shared.key_scales[stage]);
  }

  __device__ void fetch_queries(const KeyWork& work, std::int32_t head, std::int32_t tile) {
    const std::uint32_t stage = queries.stage();
    Barrier& full = shared.queries_full[stage];
    shared.queries_empty[stage].wait(queries.phase() ^ 1);
    auto& to = shared.queries[stage];
    shared.bases[stage] = next_base(work, head);
    full.arrive_and_expect_tx(sizeof to + sizeof shared.tiles[0]);
    const std::int32_t row = head * work.rows_q + work.item.query_row + tile * kQueryTile;
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const int offset = chunk * kQueryTile * Traits::kRowBytes;
      cute::SM90_TMA_LOAD_5D::copy(&p.query_map, mbar(full), kKeep, to.queries + offset, chunk * Traits::kRowBytes, row,
                                   0, 0, 0);
      cute::SM90_TMA_LOAD_5D::copy(&p.dout_map, mbar(full), kKeep, to.dout + offset, chunk * Traits::kRowBytes, row, 0,
                                   0, 0);
    }
    const std::int32_t column = work.item.query_column + tile * kQueryTile;
    cute::SM90_TMA_LOAD_3D::copy(&p.query_columns_map, mbar(full), kKeep, to.query_columns, column,
                                 work.part * Traits::kOut, head);
    cute::SM90_TMA_LOAD_3D::copy(&p.dout_columns_map, mbar(full), kKeep, to.dout_columns, column,
                                 work.part * Traits::kOut, head);
    copy_bytes(p.a.workspace.query_tiles + head * p.a.sizes.query_slots() + work.item.query_slot + tile, full,
               shared.tiles[stage]);
    queries.template advance<Traits::kQueryStages>();
  }

  /// As BackwardShared::bases. A head without any dO takes what there is.
  [[nodiscard]] __device__ std::int32_t next_base(const KeyWork& work, std::int32_t head) {
    if (sizes.heads == sizes.kv_heads) return kSameBase;
    const std::int32_t base = p.a.workspace.dout_base[head * sizes.documents + work.item.document];
    if (base == base_) return kSameBase;
    if (base != kSameBase) base_ = base;
    return base;
  }

  template <class From, class To>
  static __device__ void copy_bytes(const From* from, Barrier& full, To& to) {
    cute::SM90_BULK_COPY_G2S::copy(from, mbar(full), &to, static_cast<std::int32_t>(sizeof to));
  }

  static __device__ std::uint64_t* mbar(Barrier& barrier) { return reinterpret_cast<std::uint64_t*>(&barrier); }
  static constexpr auto kKeep = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

  const BackwardParameters& p;
  const Sizes& sizes;
  BackwardShared<Traits>& shared;
  Place keys;
  Place queries;
  std::int32_t base_ = 0;  // Of the last tile.
};

}  // namespace mxflash::cuda
