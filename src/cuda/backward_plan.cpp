#include "cuda/backward_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numbers>

#include "arguments/rotation.hpp"
#include "cuda/arguments.hpp"
#include "cuda/embed_backward_plan.hpp"
#include "cuda/embed_plan.hpp"
#include "cuda/runtime.hpp"

namespace mxflash::cuda {
namespace {

BackwardWorkspace backward_workspace_at(void* base, const BackwardLayout& layout) {
  const Placer place{static_cast<std::byte*>(base)};
  BackwardWorkspace work;
  place(work.control, layout.control);
  place(work.items, layout.items);
  place(work.costs, layout.costs);
  place(work.slots, layout.slots);
  place(work.costs_out, layout.costs_out);
  place(work.order, layout.order);
  work.sort = place.workspace + layout.sort;
  work.sort_bytes = layout.sort_bytes;
  place(work.turns, layout.turns);
  place(work.dout_base, layout.dout_base);
  place(work.dout_records, layout.dout_records);
  place(work.query_tiles, layout.query_tiles);
  place(work.dout_codes, layout.dout_codes);
  place(work.dout_columns, layout.dout_columns);
  place(work.query_columns, layout.query_columns);
  place(work.key_columns, layout.key_columns);
  place(work.value_rows, layout.value_rows);
  work.dq_sums = place.workspace + layout.dq_sums;
  place(work.dk_sums, layout.dk_sums);
  place(work.scratch, layout.scratch);
  place(work.prescale, layout.prescale);
  place(work.key_most, layout.key_most);
  place(work.tile_most, layout.tile_most);
  return work;
}

/// The work list of key tiles.
void take_items(const BackwardSizes& sizes, std::size_t sort_bytes, Planner& planner, BackwardLayout& layout) {
  const auto slots = static_cast<std::size_t>(sizes.forward.tile_slots());
  layout.control = planner.take(sizeof(Control));
  layout.items = planner.take(slots * sizeof(KeyItem));
  layout.costs = planner.take(slots * sizeof(std::uint64_t));
  layout.slots = planner.take(slots * sizeof(std::int32_t));
  layout.costs_out = planner.take(slots * sizeof(std::uint64_t));
  layout.order = planner.take(slots * sizeof(std::int32_t));
  layout.sort_bytes = sort_bytes;
  layout.sort = planner.take(sort_bytes);
}

void take_operands(const BackwardSizes& sizes, Planner& planner, BackwardLayout& layout) {
  const Sizes& of = sizes.forward;
  const auto heads = static_cast<std::size_t>(of.heads);
  const auto kv_heads = static_cast<std::size_t>(of.kv_heads);
  const auto dims = static_cast<std::size_t>(sizes.dims);
  const auto rows_q = static_cast<std::size_t>(of.rows_q());
  const auto rows_k = static_cast<std::size_t>(of.rows_k());
  const auto query_slots = static_cast<std::size_t>(sizes.query_slots());
  const auto query_columns = static_cast<std::size_t>(sizes.query_columns());
  layout.turns = planner.take(heads * query_slots * static_cast<std::size_t>(sizes.parts) * sizeof(std::uint32_t));
  layout.dout_base = planner.take(heads * static_cast<std::size_t>(of.documents) * sizeof(std::int32_t));
  layout.dout_records = planner.take(heads * rows_q * sizeof(DoutRecord));
  layout.query_tiles = planner.take(heads * query_slots * sizeof(QueryTile));
  layout.dout_codes = planner.take((heads * rows_q + kTileRows) * dims);
  layout.dout_columns = planner.take(heads * dims * query_columns);
  layout.query_columns = planner.take(heads * dims * query_columns);
  layout.key_columns = planner.take(kv_heads * dims * static_cast<std::size_t>(of.columns()));
  layout.value_rows = planner.take((kv_heads * rows_k + kTileRows) * dims);
  layout.dq_sums = planner.take(heads * rows_q * dims * sizes.dq_bytes());
  layout.dk_sums = planner.take(sizes.parts > 1 ? kv_heads * rows_k * dims * sizeof(float) : 0);
}

void take_prescale(const BackwardSizes& sizes, Planner& planner, BackwardLayout& layout) {
  const auto tiles = static_cast<std::size_t>(sizes.most_tiles());
  layout.prescale = planner.take(static_cast<std::size_t>(sizes.prescale_rows()) * sizeof(std::int32_t));
  layout.key_most = planner.take(tiles * kTileRows * sizeof(KeyMost));
  layout.tile_most = planner.take(tiles * sizeof(KeyMost));
}

Result<std::int64_t> processor_count() {
  int device = 0;
  int processors = 0;
  if (Status status = status_of(cudaGetDevice(&device), "the current device"); !status.ok()) return status.error();
  const cudaError_t code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (Status status = status_of(code, "the number of processors"); !status.ok()) return status.error();
  return processors;
}

/// What both kinds of kernels are told.
struct Common {
  Offsets offsets;
  Band band;
  std::int32_t rotation_shift = -1;
  float logit_scale = 0;
  float scale = 0;
};

Common common_of(const BackwardCall& call, const Recipe& recipe, const Sizes& sizes) {
  const DeviceDocuments& documents = call.forward.documents;
  const Rotation rotation = rotation_of(recipe, sizes.head_dim);
  const double scale = softmax_scale(documents.scale, rotation, sizes.head_dim);
  return {{documents.cu_seqlens_q, documents.cu_seqlens_k},
          band_of(documents.mask),
          rotation.on ? rotation.shift : -1,
          static_cast<float>(scale * std::numbers::log2e),
          static_cast<float>(scale)};
}

/// Both passes share the records of a workspace, which have no const; the backward writes nothing through these.
void* saved_base(const BackwardCall& call) { return std::bit_cast<void*>(call.saved); }

EmbedBackwardLaunches embedded_launches(const BackwardCall& call, const Recipe& recipe, const Sizes& sizes,
                                        const Layout& saved_layout, void* workspace) {
  const Inputs& inputs = call.forward.inputs;
  const TensorView dlse = inputs.dlse.value_or(TensorView{});
  const Common common = common_of(call, recipe, sizes);
  EmbedBackwardArguments of;
  of.sizes = sizes;
  of.offsets = common.offsets;
  of.band = common.band;
  of.saved = workspace_at(saved_base(call), saved_layout);
  of.forward = embedded_tables(saved_base(call), saved_layout, recipe);
  of.seed = call.seed;
  of.logit_scale = common.logit_scale;
  of.scale = common.scale;
  of.rotation_shift = common.rotation_shift;
  of.dlse = reinterpret_cast<const float*>(dlse.data);
  of.dlse_token_stride = dlse.stride[0];
  of.dlse_head_stride = dlse.stride[1];
  of.dtype = inputs.dout->dtype;
  of.dq = call.gradients.dq;
  of.dk = call.gradients.dk;
  of.dv = call.gradients.dv;
  // Which operand it is matters to the kernels on codes alone.
  const GradientSources sources{source_of(inputs.q, {}), source_of(inputs.k, {}), source_of(inputs.v, {}),
                                source_of(*inputs.dout, {})};
  return embed_backward_launches(of, sources, recipe, workspace);
}

/// Whether it can be the workspace of such a forward, and stays as it is.
Status check_saved(const BackwardCall& call, std::size_t bytes, const Execution& execution) {
  if (call.saved_bytes < bytes) {
    return invalid(fmt::format("saved_bytes: {} given, at least {} allowed, what a forward with training needs",
                               call.saved_bytes, bytes));
  }
  const auto saved = std::bit_cast<std::uintptr_t>(call.saved);
  const auto workspace = std::bit_cast<std::uintptr_t>(execution.workspace);
  if (workspace < saved + call.saved_bytes && saved < workspace + execution.workspace_bytes) {
    return invalid(fmt::format("workspace: address {:#x} given, memory apart from saved allowed", workspace));
  }
  return {};
}

}  // namespace

BackwardSizes backward_sizes(const Sizes& forward, DqAccumulation dq_accumulation) {
  const std::int32_t most = std::max(forward.head_dim, forward.value_dim);
  const std::int32_t dims = most <= 64 ? 64 : most <= 128 ? 128 : 256;
  return {forward, dims, dims <= 128 ? 1 : 2, dq_accumulation};
}

Result<BackwardLayout> plan_backward(const BackwardSizes& sizes, std::int64_t processors) {
  const Result<std::size_t> sort_bytes = sort_bytes_of(sizes.forward.tile_slots());
  if (!sort_bytes.ok()) return sort_bytes.error();
  Planner planner;
  BackwardLayout layout;
  take_items(sizes, *sort_bytes, planner, layout);
  take_operands(sizes, planner, layout);
  layout.scratch = planner.take(static_cast<std::size_t>(processors) * scratch_bytes(sizes));
  take_prescale(sizes, planner, layout);
  layout.bytes = planner.end();
  return layout;
}

Result<std::size_t> backward_bytes(const Sizes& forward, const Recipe& recipe) {
  if (!multiplies_codes_backward(recipe)) return plan_gradients(forward, recipe).bytes;
  const Result<std::int64_t> processors = processor_count();
  if (!processors.ok()) return processors.error();
  const Result<BackwardLayout> layout = plan_backward(backward_sizes(forward, recipe.dq_accumulation), *processors);
  if (!layout.ok()) return layout.error();
  return layout->bytes;
}

Result<BackwardLaunches> prepare_backward(const BackwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<Sizes> forward = check_backward_call(call, recipe);
  if (!forward.ok()) return forward.error();
  const Result<std::size_t> bytes = backward_bytes(*forward, recipe);
  if (!bytes.ok()) return bytes.error();
  if (Status status = check_workspace(execution, *bytes); !status.ok()) return status.error();
  const Result<Layout> saved_layout = plan(*forward, call.forward, recipe);
  if (!saved_layout.ok()) return saved_layout.error();
  if (Status status = check_saved(call, saved_layout->bytes, execution); !status.ok()) return status.error();
  BackwardLaunches launches{};
  if (!multiplies_codes_backward(recipe)) {
    launches.embedded = embedded_launches(call, recipe, *forward, *saved_layout, execution.workspace);
    return launches;
  }
  const Result<std::int64_t> processors = processor_count();
  if (!processors.ok()) return processors.error();
  const BackwardSizes sizes = backward_sizes(*forward, recipe.dq_accumulation);
  const Result<BackwardLayout> layout = plan_backward(sizes, *processors);
  if (!layout.ok()) return layout.error();

  const Workspace saved = workspace_at(saved_base(call), *saved_layout);
  const BackwardWorkspace work = backward_workspace_at(execution.workspace, *layout);
  const Common common = common_of(call, recipe, *forward);
  const TensorView& dout = *call.forward.inputs.dout;
  const TensorView dlse = call.forward.inputs.dlse.value_or(TensorView{});
  const ScoreScale ds_scale = recipe.dq.weights.block == Block::square32() ? ScoreScale::square : ScoreScale::query;
  const Gradients& out = call.gradients;
  launches.schedule = {sizes, common.offsets, common.band, saved, work, call.deterministic};
  launches.prepare = {sizes,
                      common.offsets,
                      saved,
                      work,
                      source_of(dout, recipe.dp.left),
                      call.forward.outputs.o,
                      reinterpret_cast<const float*>(dlse.data),
                      dlse.stride[0],
                      dlse.stride[1],
                      common.scale};
  launches.prescale = {sizes,
                       common.offsets,
                       common.band,
                       saved,
                       work,
                       launches.prepare.dlse,
                       launches.prepare.dlse_token_stride,
                       launches.prepare.dlse_head_stride,
                       common.scale};
  launches.backward = {sizes,
                       common.band,
                       saved,
                       work,
                       common.logit_scale,
                       common.scale,
                       static_cast<std::int32_t>(*processors),
                       call.deterministic,
                       ds_scale,
                       dout.dtype,
                       out.dv,
                       out.dk,
                       common.rotation_shift};
  launches.finish = {sizes, saved, work, common.rotation_shift, dout.dtype, out.dq, out.dk, out.dv};
  return launches;
}

}  // namespace mxflash::cuda
