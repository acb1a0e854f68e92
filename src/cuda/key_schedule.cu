// The backward's work list: one thread a slot of the forward's key tiles finds the queries that see it.
#include <algorithm>
#include <limits>

#include "cuda/backward.hpp"
#include "cuda/documents.cuh"
#include "cuda/sort.hpp"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;

/// The same for all tiles of a document, so that they stay together and in order: the queries that see its first tile,
/// or as many as a later one can have in that band.
__device__ std::uint64_t cost_of(const KeyItem& item, const Band& band) {
  const std::int64_t first = max(-item.offset() - band.right, std::int64_t{0});
  const std::int64_t most = max(kTileRows + band.left + band.right, std::int64_t{0});
  return 1 + static_cast<std::uint64_t>(max(min(item.queries - first, most), std::int64_t{0}));
}

__device__ KeyItem item_of(const KeyScheduleArguments& a, std::int32_t slot, const KeyTile& tile) {
  KeyItem item;
  item.key_row = tile.row;
  item.keys = tile.keys;
  item.column = tile.column;
  item.first_key = tile.row - tile.first_row;
  item.document = document_of_slot(a.offsets.k, a.sizes.forward.documents, slot);
  item.tile_slot = slot;
  item.tile_slots = static_cast<std::int32_t>(a.sizes.forward.tile_slots());
  item.query_row = a.offsets.q[item.document];
  item.queries = a.offsets.q[item.document + 1] - item.query_row;
  item.keys_of_document = a.offsets.k[item.document + 1] - tile.first_row;
  item.query_column = first_column(a.offsets.q, item.document);
  item.query_slot = item.query_row / kQueryTile + item.document;
  const QueryTiles tiles = tiles_that_see(item, a.band);
  item.first_tile = tiles.first;
  item.end_tile = tiles.end;
  return item;
}

__global__ void key_items_kernel(const KeyScheduleArguments a) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const Sizes& sizes = a.sizes.forward;
  const BackwardWorkspace& work = a.workspace;
  const std::uint32_t status = a.saved.control->status;
  if (index == 0) *work.control = {status, 0};
  if (index < std::int64_t{sizes.heads} * sizes.documents) {
    work.dout_base[index] = std::numeric_limits<std::int32_t>::min();
  }
  if (index >= sizes.tile_slots()) return;
  const auto slot = static_cast<std::int32_t>(index);
  work.slots[slot] = slot;
  work.costs[slot] = 0;
  if (status != 0 || a.saved.tiles[slot].keys == 0) return;
  const KeyItem item = item_of(a, slot, a.saved.tiles[slot]);
  work.items[slot] = item;
  work.costs[slot] = cost_of(item, a.band);
}

cudaError_t clear(const KeyScheduleArguments& a, cudaStream_t stream) {
  const Sizes& sizes = a.sizes.forward;
  const auto tiles = static_cast<std::size_t>(a.sizes.query_slots() * sizes.heads * a.sizes.parts);
  const auto sums = static_cast<std::size_t>(sizes.rows_q() * sizes.heads * a.sizes.dims);
  if (const cudaError_t error = cudaMemsetAsync(a.workspace.turns, 0, tiles * sizeof(std::uint32_t), stream);
      error != cudaSuccess) {
    return error;
  }
  // In order, the first sum of a tile is stored, not added.
  if (a.deterministic) return cudaSuccess;
  return cudaMemsetAsync(a.workspace.dq_sums, 0, sums * a.sizes.dq_bytes(), stream);
}

}  // namespace

int launch_key_schedule(const KeyScheduleArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const Sizes& sizes = arguments.sizes.forward;
  const BackwardWorkspace& work = arguments.workspace;
  const std::int64_t slots = sizes.tile_slots();
  const std::int64_t threads = std::max({slots, std::int64_t{sizes.heads} * sizes.documents, std::int64_t{1}});
  if (const cudaError_t error = clear(arguments, on); error != cudaSuccess) return error;
  key_items_kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, on>>>(arguments);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (slots == 0) return cudaSuccess;
  return sort_falling({work.costs, work.costs_out, work.slots, work.order, slots, work.sort, work.sort_bytes},
                      static_cast<std::uint64_t>(sizes.tokens_q) + 1, stream);
}

}  // namespace mxflash::cuda
