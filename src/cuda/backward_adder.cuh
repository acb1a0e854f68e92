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
    for (;;) {
      shared.keys_full[keys.stage()].wait(keys.phase());
      const KeyWork& work = shared.work[keys.stage()];
      if (work.kv_head < 0) return shared.keys_empty[keys.stage()].arrive();
      std::int32_t head = work.kv_head * group();
      do {
        walk(work, head++);
      } while (head % group() != 0);
      shared.keys_empty[keys.stage()].arrive();
      keys.template advance<Traits::kKeyStages>();
    }
  }

 private:
  [[nodiscard]] __device__ std::int32_t group() const { return p.sizes.forward.heads / p.sizes.forward.kv_heads; }

  __device__ void walk(const KeyWork& work, std::int32_t head) {
    for (std::int32_t tile = work.item.end_tile - 1; tile >= work.item.first_tile; --tile) {
      std::uint32_t* turn = nullptr;
      if (p.deterministic) {
        turn = p.workspace.turns + work.part +
               (head * p.sizes.query_slots() + work.item.query_slot + tile) * p.sizes.parts;
        wait_turn(turn, work.item, tile * kQueryTile);
      }
      shared.dq_full.wait(full.phase());
      full.template advance<1>();
      reduce(work, head, tile * kQueryTile);
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      shared.dq_empty.arrive();
      if (p.deterministic) end_turn(turn);
    }
  }

  __device__ void reduce(const KeyWork& work, std::int32_t head, std::int32_t first) const {
    const std::int32_t rows = min(kQueryTile, work.item.queries - first);
    float* to = p.workspace.dq_sums + work.part * Traits::kOut +
                (head * p.sizes.forward.rows_q() + work.item.query_row + first) * Traits::kDims;
    if constexpr (Traits::kDims == Traits::kOut) {
      reduce(to, shared.dq, rows * Traits::kOut);
    } else {
      for (std::int32_t row = 0; row < rows; ++row, to += Traits::kDims) {
        reduce(to, shared.dq + row * Traits::kOut, Traits::kOut);
      }
    }
  }

  static __device__ void reduce(float* to, const float* from, std::int32_t count) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(cute::cast_smem_ptr_to_uint(from)), "r"(count * static_cast<std::int32_t>(sizeof(float)))
                 : "memory");
  }

  /// Key tiles that see the same queries come one after the other, from the first of these. They were all taken before
  /// this one: none waits for ever.
  __device__ void wait_turn(const std::uint32_t* turn, const KeyItem& item, std::int32_t first) const {
    const std::int64_t least = max(first + item.offset() - p.band.left, std::int64_t{0});
    const auto before =
        static_cast<std::uint32_t>(item.first_key / kTileRows - static_cast<std::int32_t>(least / kTileRows));
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
