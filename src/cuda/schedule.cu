// The work list, made on the device: one thread a slot finds its block of queries, the sort puts the longest first.
#include <algorithm>

#include "cuda/documents.cuh"
#include "cuda/kernels.hpp"
#include "cuda/sort.hpp"

namespace mxflash::cuda {
namespace {

constexpr int kThreads = 256;

/// Malformed offsets: everything after this kernel reads `status` before it follows them.
__device__ std::uint32_t broken_rules(const ScheduleArguments& a, std::int32_t document) {
  std::uint32_t broken = 0;
  const std::int32_t* q = a.offsets.q;
  const std::int32_t* k = a.offsets.k;
  if (q[document + 1] < q[document]) broken |= kQOrder;
  if (k[document + 1] < k[document]) broken |= kKOrder;
  if (document == 0 && q[0] != 0) broken |= kQStart;
  if (document == 0 && k[0] != 0) broken |= kKStart;
  if (document == a.sizes.documents - 1) {
    if (q[document + 1] != a.sizes.tokens_q) broken |= kQEnd;
    if (k[document + 1] != a.sizes.tokens_k) broken |= kKEnd;
  }
  return broken;
}

__device__ std::uint64_t visible_pairs(const Item& item, const Band& band) {
  std::int64_t pairs = 0;
  for (std::int32_t query = 0; query < item.queries; ++query) {
    const KeySpan span = visible_keys(item.first_position + std::int64_t{query}, item.keys, band);
    pairs += span.end - span.begin;
  }
  return static_cast<std::uint64_t>(pairs);
}

__device__ Item item_of(const ScheduleArguments& a, std::int32_t document, std::int32_t block) {
  Item item;
  item.document = document;
  const std::int32_t query_begin = block * kTileRows;
  const std::int32_t q_begin = a.offsets.q[document];
  const std::int32_t q_length = a.offsets.q[document + 1] - q_begin;
  item.query_row = q_begin + query_begin;
  item.queries = min(kTileRows, q_length - query_begin);
  item.key_row = a.offsets.k[document];
  item.keys = a.offsets.k[document + 1] - item.key_row;
  item.first_position = query_begin + item.keys - q_length;
  item.first_tile = first_slot(a.offsets.k, document);
  item.first_column = first_column(a.offsets.k, document);
  return item;
}

__device__ KeyTile tile_of(const ScheduleArguments& a, std::int32_t slot) {
  const std::int32_t document = document_of_slot(a.offsets.k, a.sizes.documents, slot);
  const std::int32_t begin = (slot - first_slot(a.offsets.k, document)) * kTileRows;
  const std::int32_t end = a.offsets.k[document + 1];
  KeyTile tile;
  tile.first_row = a.offsets.k[document];
  tile.row = tile.first_row + begin;
  if (begin < 0 || tile.row >= end) return {};
  tile.keys = min(kTileRows, end - tile.row);
  tile.column = first_column(a.offsets.k, document) + begin;
  tile.columns = kTileRows;
  if (end > tile.row + kTileRows) return tile;
  tile.columns = columns_to_fill({a.offsets.k, a.sizes.documents, a.sizes.tokens_k}, end, tile.column, kTileRows);
  return tile;
}

__global__ void items_kernel(const ScheduleArguments a) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < a.sizes.documents) {
    const std::uint32_t broken = broken_rules(a, static_cast<std::int32_t>(index));
    if (broken != 0) atomicOr(&a.workspace.control->status, broken);
  }
  const auto slot = static_cast<std::int32_t>(index);
  if (index < a.sizes.tile_slots()) a.workspace.tiles[slot] = tile_of(a, slot);
  if (index >= a.sizes.item_slots()) return;
  const std::int32_t document = document_of_slot(a.offsets.q, a.sizes.documents, slot);
  const std::int32_t block = slot - first_slot(a.offsets.q, document);
  const std::int32_t length = a.offsets.q[document + 1] - a.offsets.q[document];
  const bool used = block >= 0 && std::int64_t{block} * kTileRows < length;
  std::uint64_t cost = 0;
  if (used) {
    const Item item = item_of(a, document, block);
    a.workspace.items[slot] = item;
    cost = visible_pairs(item, a.band) + 1;
  }
  a.workspace.costs[slot] = cost;
  a.workspace.slots[slot] = slot;
}

}  // namespace

int launch_schedule(const ScheduleArguments& arguments, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const Workspace& work = arguments.workspace;
  const std::int64_t slots = arguments.sizes.item_slots();
  const std::int64_t threads = std::max(slots, arguments.sizes.tile_slots());
  if (const cudaError_t error = cudaMemsetAsync(work.control, 0, sizeof(Control), on); error != cudaSuccess)
    return error;
  if (threads == 0) return cudaSuccess;
  items_kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, on>>>(arguments);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const auto most_cost = static_cast<std::uint64_t>(arguments.sizes.tokens_k) * kTileRows + 1;
  return sort_falling({work.costs, work.costs_out, work.slots, work.order, slots, work.sort, work.sort_bytes},
                      most_cost, stream);
}

}  // namespace mxflash::cuda
