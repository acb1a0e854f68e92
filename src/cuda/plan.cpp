#include "cuda/plan.hpp"

#include <fmt/format.h>

#include <bit>
#include <numbers>

#include "arguments/rotation.hpp"
#include "cuda/arguments.hpp"
#include "cuda/embed_plan.hpp"
#include "cuda/runtime.hpp"

namespace mxflash::cuda {
namespace {

/// Of the kernels on E4M3 codes.
void take_codes(const Sizes& sizes, Planner& planner, Layout& layout) {
  const auto rows_q = static_cast<std::size_t>(sizes.rows_q() * sizes.heads);
  const auto rows_k = static_cast<std::size_t>(sizes.rows_k() * sizes.kv_heads);
  const auto columns = static_cast<std::size_t>(sizes.columns() * sizes.kv_heads);
  const auto dims = static_cast<std::size_t>(sizes.key_dims);
  layout.query_scale = planner.take(rows_q * sizeof(QueryScale));
  layout.key_scale = planner.take(columns * sizeof(KeyScale));
  layout.ranges = planner.take(static_cast<std::size_t>(sizes.tile_slots() * sizes.kv_heads) * sizeof(Range));
  layout.query_codes = planner.take(rows_q * dims);
  layout.key_codes = planner.take((rows_k + kTileRows) * dims);
  layout.value_codes = planner.take(columns * static_cast<std::size_t>(sizes.value_rows()));
}

/// Of the kernels on BF16 numbers.
void take_tables(const Sizes& sizes, const Recipe& recipe, Planner& planner, Layout& layout) {
  const auto queries = static_cast<std::size_t>(sizes.tokens_q) * static_cast<std::size_t>(sizes.heads);
  const auto keys = static_cast<std::size_t>(sizes.tokens_k) * static_cast<std::size_t>(sizes.kv_heads);
  const auto key_bytes = static_cast<std::size_t>(sizes.key_dims) * sizeof(std::uint16_t);
  const auto value_bytes = static_cast<std::size_t>(sizes.value_parts * sizes.value_dims) * sizeof(std::uint16_t);
  layout.embedded_queries = planner.take(queries * key_bytes);
  layout.embedded_query_factor = planner.take(queries * sizeof(TokenFactor));
  layout.embedded_keys = planner.take(keys * key_bytes);
  for (int kind = 0; kind < tile_kinds(recipe); ++kind) {
    layout.embedded_values[kind] = planner.take(keys * value_bytes);
    layout.embedded_about[kind] = planner.take(keys * sizeof(EmbeddedKey));
    layout.embedded_heights[kind] = planner.take(keys * sizeof(float));
  }
}

/// What the backward wants of the forward beside the codes.
void take_saved(const Sizes& sizes, DType dtype, Planner& planner, Layout& layout) {
  layout.rows = planner.take(static_cast<std::size_t>(sizes.rows_q() * sizes.heads) * sizeof(RowRecord));
  if (dtype == DType::f32) return;
  const auto outputs = static_cast<std::size_t>(std::int64_t{sizes.tokens_q} * sizes.heads * sizes.value_dim);
  layout.residual = planner.take(outputs * size_of(dtype));
}

}  // namespace

Workspace workspace_at(void* base, const Layout& layout) {
  const Placer place{static_cast<std::byte*>(base)};
  Workspace work;
  place(work.control, layout.control);
  place(work.items, layout.items);
  place(work.tiles, layout.tiles);
  place(work.costs, layout.costs);
  place(work.slots, layout.slots);
  place(work.costs_out, layout.costs_out);
  place(work.order, layout.order);
  work.sort = place.workspace + layout.sort;
  work.sort_bytes = layout.sort_bytes;
  place(work.query_scale, layout.query_scale);
  place(work.key_scale, layout.key_scale);
  place(work.ranges, layout.ranges);
  place(work.query_codes, layout.query_codes);
  place(work.key_codes, layout.key_codes);
  place(work.value_codes, layout.value_codes);
  if (layout.rows != 0) place(work.rows, layout.rows);
  if (layout.residual != 0) work.residual = place.workspace + layout.residual;
  return work;
}

Result<std::size_t> sort_bytes_of(std::int64_t slots) {
  const std::int64_t bytes = sort_scratch_bytes(slots);
  const auto code = static_cast<cudaError_t>(bytes < 0 ? -bytes : 0);
  if (Status status = status_of(code, "the size of the sort"); !status.ok()) return status.error();
  return static_cast<std::size_t>(bytes);
}

/// Rows of eight dims at a time need 16-byte loads; others are read by the element.
Source source_of(const TensorView& view, const Operand& operand) {
  Source source;
  source.data = view.data;
  source.dtype = view.dtype;
  source.token_stride = view.stride[0];
  source.head_stride = view.stride[1];
  source.dim_stride = view.stride[2];
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  const auto aligned = [](std::int64_t x) { return x % 16 == 0; };
  source.vectors = view.stride[2] == 1 &&
                   aligned(static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(view.data))) &&
                   aligned(view.stride[0] * bytes) && aligned(view.stride[1] * bytes);
  source.scale_tokens = operand.block.rows;
  return source;
}

Band band_of(const Mask& mask) {
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const auto bound = [](std::int64_t side) { return side >= Mask::unbounded ? kFar : side < -kFar ? -kFar : side; };
  return {bound(mask.left), bound(mask.right)};
}

Status check_workspace(const Execution& execution, std::size_t bytes) {
  if (execution.workspace_bytes < bytes) {
    return invalid(fmt::format("workspace_bytes: {} given, at least {} allowed", execution.workspace_bytes, bytes));
  }
  const auto address = std::bit_cast<std::uintptr_t>(execution.workspace);
  if (execution.workspace == nullptr || address % Planner::kAlignment != 0) {
    return invalid(fmt::format("workspace: address {:#x} given, a multiple of {} other than 0 allowed", address,
                               Planner::kAlignment));
  }
  return {};
}

Result<Layout> plan(const Sizes& sizes, const ForwardCall& call, const Recipe& recipe) {
  const auto slots = static_cast<std::size_t>(sizes.item_slots());
  const Result<std::size_t> sort_bytes = sort_bytes_of(sizes.item_slots());
  if (!sort_bytes.ok()) return sort_bytes.error();
  Planner planner;
  Layout layout;
  layout.control = planner.take(sizeof(Control));
  layout.items = planner.take(slots * sizeof(Item));
  layout.tiles = planner.take(static_cast<std::size_t>(sizes.tile_slots()) * sizeof(KeyTile));
  layout.costs = planner.take(slots * sizeof(std::uint64_t));
  layout.slots = planner.take(slots * sizeof(std::int32_t));
  layout.costs_out = planner.take(slots * sizeof(std::uint64_t));
  layout.order = planner.take(slots * sizeof(std::int32_t));
  layout.sort_bytes = *sort_bytes;
  layout.sort = planner.take(layout.sort_bytes);
  if (runs_on_codes(call, recipe)) {
    take_codes(sizes, planner, layout);
    if (call.training) take_saved(sizes, call.inputs.q.dtype, planner, layout);
  } else {
    take_tables(sizes, recipe, planner, layout);
  }
  layout.bytes = planner.end();
  return layout;
}

Result<Launches> prepare(const ForwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<Sizes> sizes = check_call(call, recipe);
  if (!sizes.ok()) return sizes.error();
  const Result<Layout> layout = plan(*sizes, call, recipe);
  if (!layout.ok()) return layout.error();
  if (Status status = check_workspace(execution, layout->bytes); !status.ok()) return status.error();
  const Workspace work = workspace_at(execution.workspace, *layout);
  const Offsets offsets{call.documents.cu_seqlens_q, call.documents.cu_seqlens_k};
  const Band band = band_of(call.documents.mask);
  const Rotation rotation = rotation_of(recipe, sizes->head_dim);
  const std::int32_t shift = rotation.on ? rotation.shift : -1;
  const auto scale =
      static_cast<float>(softmax_scale(call.documents.scale, rotation, sizes->head_dim) * std::numbers::log2e);
  Launches launches{{*sizes, offsets, band, work},
                    {*sizes, work, source_of(call.inputs.q, recipe.s.left), source_of(call.inputs.k, recipe.s.right),
                     source_of(call.inputs.v, recipe.o.tokens), shift},
                    {*sizes, band, work, scale, call.inputs.q.dtype, call.outputs.o, call.outputs.lse}};
  if (runs_on_codes(call, recipe)) return launches;
  const EmbeddedTables tables = embedded_tables(execution.workspace, *layout, recipe);
  launches.embedded = EmbedLaunches{embed_quantize_arguments(launches.quantize, recipe, tables),
                                    {*sizes, band, work, tables, recipe.exponential, recipe.row_sum, scale,
                                     call.inputs.q.dtype, call.outputs.o, call.outputs.lse}};
  return launches;
}

}  // namespace mxflash::cuda
