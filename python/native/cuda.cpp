// Both passes on arrays in device memory, through mxflash/cuda.hpp: memory and stream are the caller's, nothing waits
// but the check. Without CUDA in the build every function raises, in the library's words.
#include "mxflash/cuda.hpp"

#include <fmt/format.h>

#include <bit>

#include "bindings.hpp"
#include "call.hpp"

namespace mxflash::python {

namespace {

/// Where a call writes and runs, on the current device, as addresses.
struct Device {
  std::uintptr_t o = 0;  ///< Read by the backward.
  std::uintptr_t lse = 0;
  bool training = false;     ///< Of a forward that a backward follows.
  std::uintptr_t saved = 0;  ///< That forward's workspace, for the backward, as the four below.
  std::size_t saved_bytes = 0;
  std::uintptr_t dq = 0;
  std::uintptr_t dk = 0;
  std::uintptr_t dv = 0;
  std::uintptr_t workspace = 0;
  std::size_t workspace_bytes = 0;
  std::uintptr_t stream = 0;
};

cuda::DeviceDocuments documents_of(const Arguments& arguments) {
  if (!arguments.offsets.q) raise(invalid("cu_seqlens_q: none given, offsets on the device allowed"));
  const auto q = offsets_of("cu_seqlens_q", *arguments.offsets.q, Memory::cuda);
  const auto k = arguments.offsets.k ? offsets_of("cu_seqlens_k", *arguments.offsets.k, Memory::cuda) : q;
  if (q.empty()) raise(invalid("cu_seqlens_q: 0 entries given, one more than the number of documents allowed"));
  if (k.size() != q.size()) {
    raise(invalid(fmt::format("cu_seqlens_k: {} entries given, {} allowed (cu_seqlens_q's)", k.size(), q.size())));
  }
  return {q.data(), k.data(), static_cast<std::int64_t>(q.size()) - 1, mask_of(arguments), arguments.scale};
}

std::byte* bytes_at(std::uintptr_t address) { return std::bit_cast<std::byte*>(address); }

cuda::ForwardCall call_of(const Arguments& arguments, const Device& device) {
  return {documents_of(arguments),
          {view_of("q", arguments.q, Memory::cuda), view_of("k", arguments.k, Memory::cuda),
           view_of("v", arguments.v, Memory::cuda), std::nullopt, std::nullopt},
          {bytes_at(device.o), std::bit_cast<float*>(device.lse)},
          device.training};
}

/// Of q, k and v nothing but shapes and types may be read (reads_inputs): then any arrays will do that have them.
cuda::BackwardCall backward_call_of(const Arguments& arguments, const Settings& settings, const Device& device) {
  cuda::ForwardCall forward = call_of(arguments, device);
  forward.training = true;
  if (arguments.dout) forward.inputs.dout = view_of("do", *arguments.dout, Memory::cuda);
  if (arguments.dlse) forward.inputs.dlse = rows_view_of("dlse", *arguments.dlse, Memory::cuda);
  return {forward,
          bytes_at(device.saved),
          device.saved_bytes,
          {bytes_at(device.dq), bytes_at(device.dk), bytes_at(device.dv)},
          settings.deterministic,
          settings.seed};
}

cuda::Execution execution_of(const Device& device) {
  return {bytes_at(device.workspace), device.workspace_bytes, std::bit_cast<void*>(device.stream)};
}

std::size_t workspace_bytes(const Arguments& arguments, const Settings& settings, const Device& device) {
  check(cuda::available());
  return value_of(cuda::workspace_bytes(call_of(arguments, device), chosen_recipe(settings)));
}

void forward(const Arguments& arguments, const Settings& settings, const Device& device) {
  const cuda::ForwardCall call = call_of(arguments, device);
  const Recipe recipe = chosen_recipe(settings);
  check(unlocked([&] { return cuda::forward(call, recipe, execution_of(device)); }));
}

bool reads_inputs(const Settings& settings) { return cuda::backward_reads_inputs(chosen_recipe(settings)); }

std::size_t backward_workspace_bytes(const Arguments& arguments, const Settings& settings, const Device& device) {
  check(cuda::available());
  return value_of(
      cuda::backward_workspace_bytes(backward_call_of(arguments, settings, device), chosen_recipe(settings)));
}

void backward(const Arguments& arguments, const Settings& settings, const Device& device) {
  const cuda::BackwardCall call = backward_call_of(arguments, settings, device);
  const Recipe recipe = chosen_recipe(settings);
  check(unlocked([&] { return cuda::backward(call, recipe, execution_of(device)); }));
}

void check_device(const Device& device) {
  check(unlocked([&] { return cuda::check(execution_of(device)); }));
}

}  // namespace

void bind_cuda(nb::module_& module) {
  nb::class_<Device>(module, "Device", "Where a call writes and runs, on the current CUDA device, as addresses.")
      .def(nb::init<>())
      .def_rw("o", &Device::o)
      .def_rw("lse", &Device::lse)
      .def_rw("training", &Device::training)
      .def_rw("saved", &Device::saved)
      .def_rw("saved_bytes", &Device::saved_bytes)
      .def_rw("dq", &Device::dq)
      .def_rw("dk", &Device::dk)
      .def_rw("dv", &Device::dv)
      .def_rw("workspace", &Device::workspace)
      .def_rw("workspace_bytes", &Device::workspace_bytes)
      .def_rw("stream", &Device::stream);
  module.def("cuda_workspace_bytes", &workspace_bytes, "Of a call, whose workspace is not looked at",
             nb::arg("arguments"), nb::arg("settings"), nb::arg("device"));
  module.def("cuda_forward", &forward, "Launches the forward on the stream and returns", nb::arg("arguments"),
             nb::arg("settings"), nb::arg("device"));
  module.def("cuda_backward_reads_inputs", &reads_inputs,
             "Whether the recipe's backward reads q, k and v; otherwise arrays of their shapes and types will do",
             nb::arg("settings"));
  module.def("cuda_backward_workspace_bytes", &backward_workspace_bytes, "As cuda_workspace_bytes, of a backward",
             nb::arg("arguments"), nb::arg("settings"), nb::arg("device"));
  module.def("cuda_backward", &backward, "Launches the backward on the stream and returns", nb::arg("arguments"),
             nb::arg("settings"), nb::arg("device"));
  module.def("cuda_check", &check_device, "Waits for the stream; raises if the call's offsets were malformed",
             nb::arg("device"));
}

}  // namespace mxflash::python
