// Two threads that add the tiles' dQ to the sums, in turns, while the consumers go on: in any order, or one key tile
// after the other. Two, since in order one sum is waited for until it is there, and the next until its turn.
#pragma once

#include "cuda/backward.cuh"

namespace mxflash::cuda {

template <class Traits>
class QueryAdder {
 public:
  /// The `of`-th.
  __device__ QueryAdder(const BackwardParameters& parameters, BackwardShared<Traits>& block, std::uint32_t of)
      : p(parameters.a), shared(block), own_(of) {}

  __device__ void run() {
    for (;;) {
      shared.keys_full[keys.stage()].wait(keys.phase());
      const KeyWork& work = shared.work[keys.stage()];
      if (work.kv_head < 0) return shared.keys_empty[keys.stage()].arrive();
#pragma unroll 1
      for (std::int32_t i = 0; i < work.item.tiles() * group(); ++i) {
        if (tile_++ % kAdders != own_) continue;
        const KeyItem::Meeting met = work.item.met(i, group());
        add(work, work.kv_head * group() + met.head, met.tile);
      }
      shared.keys_empty[keys.stage()].arrive();
      keys.template advance<Traits::kKeyStages>();
    }
  }

 private:
  using Element = typename Traits::Sums::Element;

  [[nodiscard]] __device__ std::int32_t group() const { return p.sizes.forward.heads / p.sizes.forward.kv_heads; }

  __device__ void add(const KeyWork& work, std::int32_t head, std::int32_t tile) {
    std::uint32_t* turn = nullptr;
    std::uint32_t before = 1;
    if (p.deterministic) {
      turn =
          p.workspace.turns + work.part + (head * p.sizes.query_slots() + work.item.query_slot + tile) * p.sizes.parts;
      before = static_cast<std::uint32_t>(tiles_before(work.item, tile, p.band));
      wait_turn(turn, before);
    }
    shared.dq_full[own_].wait((tile_ - 1) / kAdders % 2);
    give(work, {head, tile * kQueryTile, before == 0 ? Sum::first : Sum::further});
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    shared.dq_empty.arrive();
    if (p.deterministic) end_turn(turn);
  }

  /// Of all that add to the sums of a tile: before the first there is nothing yet.
  enum class Sum : std::uint8_t { first, further };
  struct Spot {
    std::int32_t head;
    std::int32_t first;  ///< Query.
    Sum sum;
  };

  __device__ void give(const KeyWork& work, const Spot& at) const {
    const std::int32_t rows = min(kQueryTile, work.item.queries - at.first);
    auto* to = static_cast<Element*>(p.workspace.dq_sums) + work.part * Traits::kOut +
               (at.head * p.sizes.forward.rows_q() + work.item.query_row + at.first) * Traits::kDims;
    if constexpr (Traits::kDims == Traits::kOut) {
      give(to, shared.dq, rows * Traits::kOut, at.sum);
    } else {
#pragma unroll 1
      for (std::int32_t row = 0; row < rows; ++row, to += Traits::kDims) {
        give(to, shared.dq + row * Traits::kOut, Traits::kOut, at.sum);
      }
    }
  }

  static __device__ void give(Element* to, const Element* from, std::int32_t count, Sum sum) {
    const std::uint32_t place = cute::cast_smem_ptr_to_uint(from);
    const auto bytes = count * static_cast<std::int32_t>(sizeof(Element));
    if (sum == Sum::first) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(place), "r"(bytes)
                   : "memory");
    } else {
      Traits::Sums::add(to, place, bytes);
    }
  }

  static __device__ void wait_turn(const std::uint32_t* turn, std::uint32_t before) {
    std::uint32_t now = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != before);
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  /// Once the sums are there.
  static __device__ void end_turn(std::uint32_t* turn) {
    asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
  }

  const BackwardArguments& p;
  BackwardShared<Traits>& shared;
  const std::uint32_t own_;
  std::uint32_t tile_ = 0;  // Of all that the block meets, the next.
  Place keys;
};

}  // namespace mxflash::cuda
