// include/mxflash/cuda.hpp on a device: checks, the plan of the workspace, the launches.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string>

#include "cuda/arguments.hpp"
#include "cuda/kernels.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {
namespace {

constexpr std::size_t kAlignment = 1024;

Error failed(std::string_view what, int code) {
  const auto error = static_cast<cudaError_t>(code);
  return internal(fmt::format("cuda: {}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

class Planner {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t place = end_;
    end_ = (end_ + bytes + kAlignment - 1) / kAlignment * kAlignment;
    return place;
  }
  [[nodiscard]] std::size_t end() const { return end_; }

 private:
  std::size_t end_ = 0;
};

Result<Layout> plan(const Sizes& sizes) {
  const auto slots = static_cast<std::size_t>(sizes.item_slots());
  const auto rows_q = static_cast<std::size_t>(sizes.rows_q() * sizes.heads);
  const auto rows_k = static_cast<std::size_t>(sizes.rows_k() * sizes.kv_heads);
  const auto dims = static_cast<std::size_t>(sizes.key_dims);
  const std::int64_t sort_bytes = sort_scratch_bytes(sizes.item_slots());
  if (sort_bytes < 0) return failed("size of the sort", static_cast<int>(-sort_bytes));
  Planner planner;
  Layout layout;
  layout.control = planner.take(sizeof(Control));
  layout.items = planner.take(slots * sizeof(Item));
  layout.costs = planner.take(slots * sizeof(std::uint64_t));
  layout.slots = planner.take(slots * sizeof(std::int32_t));
  layout.costs_out = planner.take(slots * sizeof(std::uint64_t));
  layout.order = planner.take(slots * sizeof(std::int32_t));
  layout.sort_bytes = static_cast<std::size_t>(sort_bytes);
  layout.sort = planner.take(layout.sort_bytes);
  layout.query_factor = planner.take(rows_q * sizeof(float));
  layout.key_scale = planner.take(rows_k * sizeof(KeyScale));
  layout.ranges = planner.take(static_cast<std::size_t>(sizes.tile_slots() * sizes.kv_heads) * sizeof(Range));
  layout.query_codes = planner.take(rows_q * dims);
  layout.key_codes = planner.take((rows_k + kTileRows) * dims);
  layout.value_codes = planner.take(rows_k * static_cast<std::size_t>(sizes.value_rows()));
  layout.bytes = planner.end();
  return layout;
}

Workspace at(void* base, const Layout& layout) {
  auto* bytes = static_cast<std::byte*>(base);
  const auto place = [bytes]<class T>(T*& pointer, std::size_t offset) {
    pointer = reinterpret_cast<T*>(bytes + offset);
  };
  Workspace work;
  place(work.control, layout.control);
  place(work.items, layout.items);
  place(work.costs, layout.costs);
  place(work.slots, layout.slots);
  place(work.costs_out, layout.costs_out);
  place(work.order, layout.order);
  work.sort = bytes + layout.sort;
  work.sort_bytes = layout.sort_bytes;
  place(work.query_factor, layout.query_factor);
  place(work.key_scale, layout.key_scale);
  place(work.ranges, layout.ranges);
  place(work.query_codes, layout.query_codes);
  place(work.key_codes, layout.key_codes);
  place(work.value_codes, layout.value_codes);
  return work;
}

/// Rows of eight dims at a time need 16-byte loads; others are read by the element.
Source source_of(const TensorView& view) {
  Source source;
  source.data = view.data;
  source.dtype = view.dtype;
  source.token_stride = view.stride[0];
  source.head_stride = view.stride[1];
  source.dim_stride = view.stride[2];
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  const auto aligned = [](std::int64_t x) { return x % 16 == 0; };
  source.vectors = view.stride[2] == 1 && aligned(static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(view.data))) &&
                   aligned(view.stride[0] * bytes) && aligned(view.stride[1] * bytes);
  return source;
}

bool rotates(const Recipe& recipe, const Sizes& sizes) {
  return recipe.hadamard == Hadamard::required || (recipe.hadamard == Hadamard::at_128 && sizes.head_dim == 128);
}

float logit_scale(const DeviceDocuments& documents, const Sizes& sizes, std::int32_t rotation_shift) {
  const auto dims = static_cast<double>(sizes.head_dim);
  double scale = documents.scale ? static_cast<double>(*documents.scale) : 1.0 / std::sqrt(dims);
  if (rotation_shift >= 0) scale *= std::ldexp(1.0, 2 * rotation_shift) / dims;
  return static_cast<float>(scale * std::numbers::log2e);
}

Band band_of(const Mask& mask) {
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const auto bound = [](std::int64_t side) {
    return side >= Mask::unbounded ? kFar : side < -kFar ? -kFar : side;
  };
  return {bound(mask.left), bound(mask.right)};
}

Status check_execution(const Execution& execution, std::size_t bytes) {
  if (execution.workspace_bytes < bytes) {
    return invalid(fmt::format("workspace_bytes: {} given, at least {} allowed", execution.workspace_bytes, bytes));
  }
  const auto address = std::bit_cast<std::uintptr_t>(execution.workspace);
  if (execution.workspace == nullptr || address % kAlignment != 0) {
    return invalid(fmt::format("workspace: address {:#x} given, a multiple of {} other than 0 allowed", address, kAlignment));
  }
  return {};
}

std::string_view rule_of(std::uint32_t status) {
  if ((status & kQStart) != 0) return "cu_seqlens_q: starts elsewhere than at 0, 0 allowed";
  if ((status & kQOrder) != 0) return "cu_seqlens_q: decreases, offsets that never decrease allowed";
  if ((status & kQEnd) != 0) return "cu_seqlens_q: ends elsewhere than at the rows of q, that number allowed";
  if ((status & kKStart) != 0) return "cu_seqlens_k: starts elsewhere than at 0, 0 allowed";
  if ((status & kKOrder) != 0) return "cu_seqlens_k: decreases, offsets that never decrease allowed";
  return "cu_seqlens_k: ends elsewhere than at the rows of k, that number allowed";
}

}  // namespace

Status available() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return unsupported(fmt::format("cuda needs an NVIDIA driver and device ({})",
                                   error == cudaSuccess ? "no device" : cudaGetErrorString(error)));
  }
  int device = 0;
  int major = 0;
  int minor = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return failed("current device", error);
  for (const auto& [attribute, value] : {std::pair{cudaDevAttrComputeCapabilityMajor, &major},
                                         std::pair{cudaDevAttrComputeCapabilityMinor, &minor}}) {
    if (const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device); error != cudaSuccess) {
      return failed("compute capability", error);
    }
  }
  if (major == 9 && minor == 0) return {};
  return unsupported(fmt::format("cuda needs a device of compute capability 9.0 (Hopper), this one has {}.{}", major, minor));
}

Result<std::size_t> workspace_bytes(const ForwardCall& call, const Recipe& recipe) {
  const Result<Sizes> sizes = check_call(call, recipe);
  if (!sizes.ok()) return sizes.error();
  const Result<Layout> layout = plan(*sizes);
  if (!layout.ok()) return layout.error();
  return layout->bytes;
}

Status forward(const ForwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<Sizes> sizes = check_call(call, recipe);
  if (!sizes.ok()) return sizes.error();
  if (Status status = available(); !status.ok()) return status;
  const Result<Layout> layout = plan(*sizes);
  if (!layout.ok()) return layout.error();
  if (Status status = check_execution(execution, layout->bytes); !status.ok()) return status;

  const Workspace work = at(execution.workspace, *layout);
  const Offsets offsets{call.documents.cu_seqlens_q, call.documents.cu_seqlens_k};
  const Band band = band_of(call.documents.mask);
  if (const int code = launch_schedule({*sizes, offsets, band, work}, execution.stream); code != cudaSuccess) {
    return failed("schedule", code);
  }
  const std::int32_t shift =
      rotates(recipe, *sizes) ? (std::countr_zero(static_cast<std::uint32_t>(sizes->head_dim)) + 1) / 2 : -1;
  const QuantizeArguments quantize{*sizes, offsets, work, source_of(call.inputs.q), source_of(call.inputs.k),
                                   source_of(call.inputs.v), shift};
  if (const int code = launch_quantize(quantize, execution.stream); code != cudaSuccess) return failed("quantize", code);
  const ForwardArguments forward{*sizes,
                                 band,
                                 work,
                                 logit_scale(call.documents, *sizes, shift),
                                 call.inputs.q.dtype,
                                 call.outputs.o,
                                 call.outputs.lse};
  if (const int code = launch_forward(forward, execution.stream); code != cudaSuccess) return failed("forward", code);
  return {};
}

Status check(const Execution& execution) {
  Control control;
  auto* stream = static_cast<cudaStream_t>(execution.stream);
  cudaError_t error = cudaMemcpyAsync(&control, execution.workspace, sizeof control, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return failed("call", error);
  if (control.status != 0) return invalid(std::string(rule_of(control.status)));
  return {};
}

}  // namespace mxflash::cuda
