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

/// A workspace on the device, aligned as a call asks for.
struct Space {
  DeviceMemory memory;
  Execution execution;
};

Result<Space> make_space(const Result<std::size_t>& bytes, std::string_view name) {
  if (!bytes.ok()) return bytes.error();
  constexpr std::size_t kAlignment = 256;
  Result<DeviceMemory> memory = allocate(*bytes + kAlignment, name);
  if (!memory.ok()) return memory.error();
  void* aligned = memory->get();
  std::size_t space = *bytes + kAlignment;
  const Execution execution{std::align(kAlignment, *bytes, aligned, space), *bytes, nullptr};
  return Space{*std::move(memory), execution};
}

/// The milliseconds that a call on the default stream takes; it has ended well.
template <class Call>
Result<double> time_of(const Execution& execution, const Call& call) {
  const Result<Event> start = record_event();
  if (!start.ok()) return start.error();
  if (Status status = call(); !status.ok()) return status.error();
  const Result<Event> stop = record_event();
  if (!stop.ok()) return stop.error();
  if (Status status = check(execution); !status.ok()) return status.error();
  float milliseconds = 0;
  const cudaError_t code = cudaEventElapsedTime(&milliseconds, start->get(), stop->get());
  if (Status status = status_of(code, "the time between two events"); !status.ok()) return status.error();
  return static_cast<double>(milliseconds);
}

/// A call on the default stream whose tensors are on the device. Copies are not in its time; quantization is, and
/// cannot be told from the rest.
struct DeviceCall {
  DeviceMemory offsets_q, offsets_k, o, lse;
  Operand q, k, v;
  ForwardCall forward;
};

Result<DeviceCall> upload_call(const Problem& problem, const Inputs& inputs) {
  const Packing& packing = problem.packing;
  Result<DeviceMemory> offsets_q = upload_offsets(packing, &Document::q_begin, packing.tokens_q(), "cu_seqlens_q");
  if (!offsets_q.ok()) return offsets_q.error();
  Result<DeviceMemory> offsets_k = upload_offsets(packing, &Document::k_begin, packing.tokens_k(), "cu_seqlens_k");
  if (!offsets_k.ok()) return offsets_k.error();
  Result<Operand> q = upload_view(inputs.q, "q");
  if (!q.ok()) return q.error();
  Result<Operand> k = upload_view(inputs.k, "k");
  if (!k.ok()) return k.error();
  Result<Operand> v = upload_view(inputs.v, "v");
  if (!v.ok()) return v.error();
  const auto rows = static_cast<std::size_t>(inputs.q.tokens() * inputs.q.heads());
  Result<DeviceMemory> o = allocate(rows * static_cast<std::size_t>(inputs.v.dims()) * size_of(inputs.q.dtype), "o");
  if (!o.ok()) return o.error();
  Result<DeviceMemory> lse = allocate(rows * sizeof(float), "lse");
  if (!lse.ok()) return lse.error();

  const DeviceDocuments documents{reinterpret_cast<const std::int32_t*>(offsets_q->get()),
                                  reinterpret_cast<const std::int32_t*>(offsets_k->get()),
                                  static_cast<std::int64_t>(packing.documents().size()), problem.mask, problem.scale};
  const ForwardCall forward{
      documents, {q->view, k->view, v->view, std::nullopt}, {o->get(), reinterpret_cast<float*>(lse->get())}};
  return DeviceCall{*std::move(offsets_q), *std::move(offsets_k), *std::move(o), *std::move(lse),
                    *std::move(q),         *std::move(k),         *std::move(v), forward};
}

Tensor tensor_like(const TensorView& view) {
  return Tensor::uninitialized(view.dtype, {view.tokens(), view.heads(), view.dims()});
}

}  // namespace

Result<ForwardResult> forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs) {
  const Result<DeviceCall> call = upload_call(problem, inputs);
  if (!call.ok()) return call.error();
  const Result<Space> space = make_space(workspace_bytes(call->forward, recipe), "the workspace");
  if (!space.ok()) return space.error();
  const Result<double> milliseconds =
      time_of(space->execution, [&] { return forward(call->forward, recipe, space->execution); });
  if (!milliseconds.ok()) return milliseconds.error();

  ForwardResult result;
  result.timing.compute_ms = *milliseconds;
  result.timing.device_ms = *milliseconds;
  result.o = Tensor::uninitialized(inputs.q.dtype, {inputs.q.tokens(), inputs.q.heads(), inputs.v.dims()});
  result.lse = Tensor::uninitialized(DType::f32, {inputs.q.tokens(), inputs.q.heads()});
  if (Status status = download(result.o.data, call->o.get(), "o"); !status.ok()) return status.error();
  if (Status status = download(result.lse.data, call->lse.get(), "lse"); !status.ok()) return status.error();
  return result;
}

Result<BackwardResult> backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                const Options& options) {
  Result<DeviceCall> call = upload_call(problem, inputs);
  if (!call.ok()) return call.error();
  const Result<Operand> dout = upload_view(*inputs.dout, "do");
  if (!dout.ok()) return dout.error();
  call->forward.inputs.dout = dout->view;
  std::optional<Operand> dlse;
  if (inputs.dlse) {
    Result<Operand> uploaded = upload_view(*inputs.dlse, "dlse");
    if (!uploaded.ok()) return uploaded.error();
    dlse = *std::move(uploaded);
    call->forward.inputs.dlse = dlse->view;
  }
  call->forward.training = true;
  const Result<Space> saved = make_space(workspace_bytes(call->forward, recipe), "the forward's workspace");
  if (!saved.ok()) return saved.error();
  if (Status status = forward(call->forward, recipe, saved->execution); !status.ok()) return status.error();

  BackwardResult result{tensor_like(inputs.q), tensor_like(inputs.k), tensor_like(inputs.v), {}, {}};
  const Result<DeviceMemory> dq = allocate(result.dq.data.size(), "dq");
  if (!dq.ok()) return dq.error();
  const Result<DeviceMemory> dk = allocate(result.dk.data.size(), "dk");
  if (!dk.ok()) return dk.error();
  const Result<DeviceMemory> dv = allocate(result.dv.data.size(), "dv");
  if (!dv.ok()) return dv.error();
  const BackwardCall back{call->forward,
                          saved->execution.workspace,
                          saved->execution.workspace_bytes,
                          {dq->get(), dk->get(), dv->get()},
                          options.deterministic,
                          options.seed};
  const Result<Space> space = make_space(backward_workspace_bytes(back, recipe), "the backward's workspace");
  if (!space.ok()) return space.error();
  const Result<double> milliseconds =
      time_of(space->execution, [&] { return backward(back, recipe, space->execution); });
  if (!milliseconds.ok()) return milliseconds.error();
  result.timing.compute_ms = *milliseconds;
  result.timing.device_ms = *milliseconds;
  if (Status status = download(result.dq.data, dq->get(), "dq"); !status.ok()) return status.error();
  if (Status status = download(result.dk.data, dk->get(), "dk"); !status.ok()) return status.error();
  if (Status status = download(result.dv.data, dv->get(), "dv"); !status.ok()) return status.error();
  return result;
}

}  // namespace mxflash::cuda
