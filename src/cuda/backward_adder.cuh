// One thread that adds a tile's dQ to the sums, while the consumers go on: in any order, or in that of the keys.
#pragma once

#include "cuda/backward.cuh"

namespace mxflash::cuda {

template <class Traits>
class QueryAdder {
 public:
  __device__ QueryAdder(const BackwardParameters& parameters, BackwardShared<Traits>& block)
      : p(parameters.a), shared(block) {}

  __device__ void run() {
    const std::int32_t group = p.sizes.forward.heads / p.sizes.forward.kv_heads;
    for (;;) {
      shared.keys_full[keys.stage()].wait(keys.phase());
      const KeyWork& work = shared.work[keys.stage()];
      const bool last = work.kv_head < 0;
      if (!last) {
        for (std::int32_t head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) walk(work, head);
      }
      shared.keys_empty[keys.stage()].arrive();
      keys.template advance<Traits::kKeyStages>();
      if (last) return;
    }
  }

 private:
  __device__ void walk(const KeyWork& work, std::int32_t head) {
    const KeyItem& item = work.item;
    std::int32_t first = item.end_tile * kQueryTile;
    float* to = p.workspace.dq_sums + work.part * Traits::kOut +
                (head * p.sizes.forward.rows_q() + item.query_row + first) * p.sizes.dims;
    std::uint32_t* turn = p.workspace.turns + work.part +
                          (head * p.sizes.query_slots() + item.query_slot + item.end_tile) * p.sizes.parts;
    while (first > item.first_tile * kQueryTile) {
      first -= kQueryTile;
      to -= kQueryTile * p.sizes.dims;
      turn -= p.sizes.parts;
      if (p.deterministic) wait_turn(turn, item, first);
      shared.dq_full.wait(full.phase());
      full.template advance<1>();
      reduce(to, min(kQueryTile, item.queries - first));
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      shared.dq_empty.arrive();
      if (p.deterministic) end_turn(turn);
    }
  }

  __device__ void reduce(float* to, std::int32_t rows) const {
    const std::uint32_t from = cute::cast_smem_ptr_to_uint(shared.dq);
    constexpr std::int32_t kBytes = Traits::kOut * sizeof(float);
    const std::int32_t at_once = p.sizes.dims == Traits::kOut ? rows : 1;
    for (std::int32_t row = 0; row < rows; row += at_once) {
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                       to + std::int64_t{row} * p.sizes.dims),
                   "r"(from + row * kBytes), "r"(at_once * kBytes)
                   : "memory");
    }
  }

  /// Key tiles that see the same queries come one after the other, from the first of these. They were all taken before
  /// this one: none waits for ever.
  __device__ void wait_turn(const std::uint32_t* turn, const KeyItem& item, std::int32_t first) const {
    const std::int64_t least = max(first + item.offset() - p.band.left, std::int64_t{0});
    const auto before = static_cast<std::uint32_t>(item.first_key / kTileRows - static_cast<std::int32_t>(least / kTileRows));
    std::uint32_t now = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != before);
    asm volatile("fence.proxy.async;" ::: "memory");
  }

  /// Once the sums are there.
  static __device__ void end_turn(std::uint32_t* turn) {
    asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
  }

  const BackwardArguments& p;
  BackwardShared<Traits>& shared;
  Place keys;
  Place full;
};

}  // namespace mxflash::cuda
