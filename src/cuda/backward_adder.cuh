// Two threads that add the tiles' dQ to the sums, in turns, while the consumers go on: in any order, or from the last
// keys to the first. Two, since in order one sum is waited for until it is there, and the next until its turn.
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
    for (std::int32_t tile = work.item.first_tile; tile < work.item.end_tile; ++tile) {
      const std::uint32_t now = tile_++;
      if (now % kAdders != own_) continue;
      std::uint32_t* turn = nullptr;
      std::uint32_t before = 1;
      if (p.deterministic) {
        turn = p.workspace.turns + work.part +
               (head * p.sizes.query_slots() + work.item.query_slot + tile) * p.sizes.parts;
        before = tiles_before(work.item, tile * kQueryTile);
        wait_turn(turn, before);
      }
      shared.dq_full[own_].wait(now / kAdders % 2);
      give(work, {head, tile * kQueryTile, before == 0 ? Sum::first : Sum::further});
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      shared.dq_empty.arrive();
      if (p.deterministic) end_turn(turn);
    }
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
    float* to = p.workspace.dq_sums + work.part * Traits::kOut +
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

  static __device__ void give(float* to, const float* from, std::int32_t count, Sum sum) {
    const std::uint32_t place = cute::cast_smem_ptr_to_uint(from);
    const auto bytes = count * static_cast<std::int32_t>(sizeof(float));
    if (sum == Sum::first) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(place), "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(place),
                   "r"(bytes)
                   : "memory");
    }
  }

  /// Key tiles that see the same queries come one after the other, from the last of these. They were all taken before
  /// this one: none waits for ever. Under a causal mask each begins two tiles of queries before the one after it, and
  /// so comes to what that has left behind: none waits long.
  [[nodiscard]] __device__ std::uint32_t tiles_before(const KeyItem& item, std::int32_t first) const {
    const std::int32_t last = min(first + kQueryTile, item.queries) - 1;
    const std::int64_t most = min(last + item.offset() + p.band.right, std::int64_t{item.keys_of_document} - 1);
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(most / kTileRows) - item.first_key / kTileRows);
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
  std::uint32_t tile_ = 0;  // Of all that the block meets.
  Place keys;
};

}  // namespace mxflash::cuda
