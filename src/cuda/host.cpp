#include "cuda/host.hpp"

#include <fmt/format.h>

#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/memory.hpp"
#include "cuda/runtime.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {
namespace {

std::array<std::int64_t, 3> contiguous_strides(const TensorView& view) {
  return {view.heads() * view.dims(), view.dims(), 1};
}

/// A stride along which there is one element is never taken.
bool is_contiguous(const TensorView& view) {
  const std::array<std::int64_t, 3> strides = contiguous_strides(view);
  for (std::size_t i = 0; i < 3; ++i) {
    if (view.shape[i] > 1 && view.stride[i] != strides[i]) return false;
  }
  return true;
}

Bytes packed(const TensorView& view, std::size_t bytes) {
  Bytes data(bytes);
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t run = view.stride[2] == 1 ? view.dims() : 1;  // Elements that lie side by side.
  std::byte* to = data.data();
  for (std::int64_t token = 0; token < view.tokens(); ++token) {
    for (std::int64_t head = 0; head < view.heads(); ++head) {
      for (std::int64_t dim = 0; dim < view.dims(); dim += run) {
        const std::int64_t from = token * view.stride[0] + head * view.stride[1] + dim * view.stride[2];
        std::memcpy(to, view.data + from * width, static_cast<std::size_t>(run * width));
        to += run * width;
      }
    }
  }
  return data;
}

/// A view of device memory and what owns it.
struct Operand {
  DeviceMemory memory;
  TensorView view;
};

Result<Operand> upload_view(const TensorView& view, std::string_view name) {
  const std::size_t bytes = static_cast<std::size_t>(view.tokens() * view.heads() * view.dims()) * size_of(view.dtype);
  Result<DeviceMemory> memory =
      is_contiguous(view) ? upload(std::span(view.data, bytes), name) : upload(packed(view, bytes), name);
  if (!memory.ok()) return memory.error();
  const TensorView device{memory->get(), view.dtype, view.shape, contiguous_strides(view)};
  return Operand{*std::move(memory), device};
}

/// cu_seqlens of one side: the documents' `begin`, and the end of the last.
Result<DeviceMemory> upload_offsets(const Packing& packing, std::int64_t Document::* begin, std::int64_t tokens,
                                    std::string_view name) {
  if (tokens > std::numeric_limits<std::int32_t>::max()) {
    return invalid(fmt::format("{}: {} tokens given, at most {} allowed on the device", name, tokens,
                               std::numeric_limits<std::int32_t>::max()));
  }
  std::vector<std::int32_t> offsets;
  for (const Document& document : packing.documents()) offsets.push_back(static_cast<std::int32_t>(document.*begin));
  offsets.push_back(static_cast<std::int32_t>(tokens));
  return upload(std::as_bytes(std::span(offsets)), name);
}

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

/// An event that has been recorded on the default stream.
Result<Event> record_event() {
  cudaEvent_t event = nullptr;
  if (Status status = status_of(cudaEventCreate(&event), "making an event"); !status.ok()) return status.error();
  Event owner(event);
  if (Status status = status_of(cudaEventRecord(event), "recording an event"); !status.ok()) return status.error();
  return owner;
}

/// The milliseconds between the events; everything before `stop` has ended.
Result<double> compute(const ForwardCall& call, const Recipe& recipe) {
  const Result<std::size_t> bytes = workspace_bytes(call, recipe);
  if (!bytes.ok()) return bytes.error();
  constexpr std::size_t kAlignment = 256;
  const Result<DeviceMemory> workspace = allocate(*bytes + kAlignment, "the workspace");
  if (!workspace.ok()) return workspace.error();
  void* aligned = workspace->get();
  std::size_t space = *bytes + kAlignment;
  const Execution execution{std::align(kAlignment, *bytes, aligned, space), *bytes, nullptr};

  const Result<Event> start = record_event();
  if (!start.ok()) return start.error();
  if (Status status = forward(call, recipe, execution); !status.ok()) return status.error();
  const Result<Event> stop = record_event();
  if (!stop.ok()) return stop.error();
  if (Status status = check(execution); !status.ok()) return status.error();
  float milliseconds = 0;
  const cudaError_t code = cudaEventElapsedTime(&milliseconds, start->get(), stop->get());
  if (Status status = status_of(code, "the time between two events"); !status.ok()) return status.error();
  return static_cast<double>(milliseconds);
}

}  // namespace

Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs) {
  const Packing& packing = problem.packing;
  const Result<DeviceMemory> offsets_q =
      upload_offsets(packing, &Document::q_begin, packing.tokens_q(), "cu_seqlens_q");
  if (!offsets_q.ok()) return offsets_q.error();
  const Result<DeviceMemory> offsets_k =
      upload_offsets(packing, &Document::k_begin, packing.tokens_k(), "cu_seqlens_k");
  if (!offsets_k.ok()) return offsets_k.error();
  const Result<Operand> q = upload_view(inputs.q, "q");
  if (!q.ok()) return q.error();
  const Result<Operand> k = upload_view(inputs.k, "k");
  if (!k.ok()) return k.error();
  const Result<Operand> v = upload_view(inputs.v, "v");
  if (!v.ok()) return v.error();

  ForwardResult result;
  result.o = Tensor::uninitialized(inputs.q.dtype, {inputs.q.tokens(), inputs.q.heads(), inputs.v.dims()});
  result.lse = Tensor::uninitialized(DType::f32, {inputs.q.tokens(), inputs.q.heads()});
  const Result<DeviceMemory> o = allocate(result.o.data.size(), "o");
  if (!o.ok()) return o.error();
  const Result<DeviceMemory> lse = allocate(result.lse.data.size(), "lse");
  if (!lse.ok()) return lse.error();

  const ForwardCall call{
      {reinterpret_cast<const std::int32_t*>(offsets_q->get()), reinterpret_cast<const std::int32_t*>(offsets_k->get()),
       static_cast<std::int64_t>(packing.documents().size()), problem.mask, problem.scale},
      {q->view, k->view, v->view, std::nullopt},
      {o->get(), reinterpret_cast<float*>(lse->get())}};
  // Copies are not in it; quantization is, and cannot be told from the rest.
  const Result<double> milliseconds = compute(call, recipe);
  if (!milliseconds.ok()) return milliseconds.error();
  result.timing.compute_ms = *milliseconds;
  result.timing.device_ms = *milliseconds;
  if (Status status = download(result.o.data, o->get(), "o"); !status.ok()) return status.error();
  if (Status status = download(result.lse.data, lse->get(), "lse"); !status.ok()) return status.error();
  return result;
}

}  // namespace mxflash::cuda
