// Forward of the recipes that BF16 holds: warp-level products of numbers that are codes times scales. Every block of
// 128 queries meets its keys twice, so that the references of its rows are the reference engine's: first for the
// largest logits, then for the weights, whose codes are then its codes wherever a logit's last bit does not decide.
#include <cstdint>

#include "cuda/embed_forward.cuh"

namespace mxflash::cuda {
namespace {

__device__ EmbedWork work_of(const EmbedForwardArguments& a, std::uint32_t place, std::int32_t index) {
  EmbedWork work;
  work.item = a.workspace.items[a.workspace.order[place]];
  work.head = index / a.sizes.value_parts;
  work.kv_head = work.head / (a.sizes.heads / a.sizes.kv_heads);
  work.part = index % a.sizes.value_parts;
  const std::int64_t first = work.item.first_position;
  const std::int64_t begin = max(first - a.band.left, std::int64_t{0});
  const std::int64_t end = min(first + work.item.queries + a.band.right, std::int64_t{work.item.keys});
  const bool any = end > begin;
  work.first_tile = any ? static_cast<std::uint32_t>(begin / kGroup) : 0;
  work.end_tile = any ? static_cast<std::uint32_t>((end + kGroup - 1) / kGroup) : 0;
  work.some = work.all = whole_tiles(work.item, a.band, 0);
  for (int group = 1; group * kGroup < work.item.queries; ++group) {
    const WholeTiles next = whole_tiles(work.item, a.band, group);
    work.some = {min(work.some.first, next.first), max(work.some.last, next.last)};
    work.all = {max(work.all.first, next.first), min(work.all.last, next.last)};
  }
  return work;
}

/// The steps of a block, copies ahead of them.
template <class Traits>
class Walk {
 public:
  __device__ Walk(const EmbedForwardArguments& arguments, EmbedShared<Traits>& shared)
      : copies_(arguments, shared.work, shared), steps_(arguments, shared.work), step_(steps_.first()) {
    if (step_.pass() < kPasses) copies_.queries();
    Step ahead = step_;
    for (int stage = 0; stage + 1 < kEmbedStages; ++stage) {
      copy(ahead, stage);
      if (ahead.pass() < kPasses) steps_.advance(ahead);
    }
  }

  [[nodiscard]] __device__ bool in(std::int32_t pass) const { return step_.pass() == pass; }

  template <class Take>
  __device__ void take(const Take& take) {
    wait_copies<kEmbedStages - 2>();
    __syncthreads();  // All have this tile, and are done with the one before, which the next copy overwrites.
    copy_ahead();
    take(step_, stage_);
    steps_.advance(step_);
    stage_ = stage_ + 1 == kEmbedStages ? 0 : stage_ + 1;
  }

 private:
  /// What comes is counted anew each time: kept, it would take registers that the rows need.
  __device__ void copy_ahead() const {
    Step ahead = step_;
    for (int i = 0; i + 1 < kEmbedStages; ++i) {
      if (ahead.pass() < kPasses) steps_.advance(ahead);
    }
    copy(ahead, stage_ == 0 ? kEmbedStages - 1 : stage_ - 1);
  }
  __device__ void copy(const Step& step, int stage) const {
    if (step.pass() < kPasses) copies_.tile(step, stage);
    commit_copies();
  }

  Copies<Traits> copies_;
  Steps steps_;
  Step step_;
  int stage_ = 0;
};

template <class Traits, class Exp>
__global__ void __launch_bounds__(kEmbedThreads, Traits::kBlocks)
    embed_forward_kernel(const __grid_constant__ EmbedForwardArguments a) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<EmbedShared<Traits>*>(memory);
  if (a.workspace.control->status != 0) {
    write_nan(a);
    return;
  }
  // Longest first; slots without an item are last.
  const auto per_item = static_cast<std::uint32_t>(a.sizes.heads * a.sizes.value_parts);
  const std::uint32_t place = blockIdx.x / per_item;
  if (a.workspace.costs_out[place] == 0) return;
  if (threadIdx.x == 0) shared.work = work_of(a, place, static_cast<std::int32_t>(blockIdx.x % per_item));
  __syncthreads();
  find_keys(a, shared);
  __syncthreads();
  Walk<Traits> walk(a, shared);
  EmbedRows<Traits, Exp> rows(a, shared.work, shared);
  RowMaxima most;
  while (walk.in(kMaxima)) walk.take([&](const Step& step, int stage) { rows.look(step, stage, most); });
  rows.refer(most);
  while (walk.in(kWeights)) walk.take([&](const Step& step, int stage) { rows.weigh(step, stage); });
  rows.store();
}

template <class Traits, class Exp>
int launch(const EmbedForwardArguments& a, cudaStream_t stream) {
  constexpr auto kBytes = static_cast<int>(sizeof(EmbedShared<Traits>));
  if (const cudaError_t error =
          cudaFuncSetAttribute(embed_forward_kernel<Traits, Exp>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const std::int64_t blocks = a.sizes.item_slots() * a.sizes.heads * a.sizes.value_parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  embed_forward_kernel<Traits, Exp><<<static_cast<unsigned>(blocks), kEmbedThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <class Traits>
int launch(const EmbedForwardArguments& a, cudaStream_t stream) {
  switch (a.exponential) {
    case Exponential::mitchell: return launch<Traits, MitchellExponential>(a, stream);
    case Exponential::schraudolph: return launch<Traits, SchraudolphExponential>(a, stream);
    default: return launch<Traits, ExactExponential>(a, stream);
  }
}

}  // namespace

int launch_embed_forward(const EmbedForwardArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (arguments.sizes.key_dims) {
    case 64: return launch<EmbedTraits<64, 64, 2>>(arguments, on);
    case 128: return launch<EmbedTraits<128, 128, 2>>(arguments, on);
    default: return launch<EmbedTraits<256, 128, 1>>(arguments, on);
  }
}

}  // namespace mxflash::cuda
