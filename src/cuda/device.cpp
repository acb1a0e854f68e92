// include/mxflash/cuda.hpp on a device.
#include <fmt/format.h>

#include <string>
#include <tuple>
#include <utility>

#include "cuda/arguments.hpp"
#include "cuda/plan.hpp"
#include "cuda/runtime.hpp"

namespace mxflash::cuda {
namespace {

std::string_view rule_of(std::uint32_t status) {
  if ((status & kQStart) != 0) return "cu_seqlens_q: starts elsewhere than at 0, 0 allowed";
  if ((status & kQOrder) != 0) return "cu_seqlens_q: decreases, offsets that never decrease allowed";
  if ((status & kQEnd) != 0) return "cu_seqlens_q: ends elsewhere than at the rows of q, that number allowed";
  if ((status & kKStart) != 0) return "cu_seqlens_k: starts elsewhere than at 0, 0 allowed";
  if ((status & kKOrder) != 0) return "cu_seqlens_k: decreases, offsets that never decrease allowed";
  return "cu_seqlens_k: ends elsewhere than at the rows of k, that number allowed";
}

/// Another device's memory would end the process's context, and host memory is not what the interface asks for.
Status check_memory(std::string_view name, const void* pointer, int current) {
  cudaPointerAttributes attributes{};
  if (Status status = status_of(cudaPointerGetAttributes(&attributes, pointer), name); !status.ok()) return status;
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    return invalid(fmt::format("{}: host memory given, memory of device {} (the current one) allowed", name, current));
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != current) {
    return invalid(fmt::format("{}: memory of device {} given, of device {} (the current one) allowed", name,
                               attributes.device, current));
  }
  return {};
}

/// Whether everything that the kernels will touch lies on the current device.
Status check_memory(const ForwardCall& call, const Execution& execution) {
  int current = 0;
  if (Status status = status_of(cudaGetDevice(&current), "the current device"); !status.ok()) return status;
  const bool queries = call.inputs.q.tokens() > 0;
  const bool keys = call.inputs.k.tokens() > 0;
  const std::tuple<std::string_view, const void*, bool> used[] = {{"cu_seqlens_q", call.documents.cu_seqlens_q, true},
                                                                  {"cu_seqlens_k", call.documents.cu_seqlens_k, true},
                                                                  {"q", call.inputs.q.data, queries},
                                                                  {"k", call.inputs.k.data, keys},
                                                                  {"v", call.inputs.v.data, keys},
                                                                  {"o", call.outputs.o, queries},
                                                                  {"lse", call.outputs.lse, queries},
                                                                  {"workspace", execution.workspace, true}};
  for (const auto& [name, pointer, is_used] : used) {
    if (!is_used) continue;
    if (Status status = check_memory(name, pointer, current); !status.ok()) return status;
  }
  return {};
}

Status launched(int code, std::string_view what) { return status_of(static_cast<cudaError_t>(code), what); }

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
  if (Status status = status_of(cudaGetDevice(&device), "the current device"); !status.ok()) return status;
  for (const auto& [attribute, value] :
       {std::pair{cudaDevAttrComputeCapabilityMajor, &major}, std::pair{cudaDevAttrComputeCapabilityMinor, &minor}}) {
    const cudaError_t code = cudaDeviceGetAttribute(value, attribute, device);
    if (Status status = status_of(code, "the compute capability"); !status.ok()) return status;
  }
  if (major == 9 && minor == 0) return {};
  return unsupported(
      fmt::format("cuda needs a device of compute capability 9.0 (Hopper), this one has {}.{}", major, minor));
}

Result<std::size_t> workspace_bytes(const ForwardCall& call, const Recipe& recipe) {
  const Result<Sizes> sizes = check_call(call, recipe);
  if (!sizes.ok()) return sizes.error();
  const Result<Layout> layout = plan(*sizes);
  if (!layout.ok()) return layout.error();
  return layout->bytes;
}

Status forward(const ForwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<Launches> launches = prepare(call, recipe, execution);
  if (!launches.ok()) return launches.error();
  if (Status status = available(); !status.ok()) return status;
  if (Status status = check_memory(call, execution); !status.ok()) return status;
  void* stream = execution.stream;
  Status status = launched(launch_schedule(launches->schedule, stream), "making the schedule");
  if (!status.ok() || launches->schedule.sizes.tokens_q == 0) return status;
  status = launched(launch_quantize(launches->quantize, stream), "quantizing");
  if (!status.ok()) return status;
  return launched(launch_forward(launches->forward, stream), "the forward");
}

Status check(const Execution& execution) {
  // The workspace begins with it.
  Control control;
  auto* stream = static_cast<cudaStream_t>(execution.stream);
  cudaError_t error = cudaMemcpyAsync(&control, execution.workspace, sizeof control, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (Status status = status_of(error, "the call"); !status.ok()) return status;
  if (control.status != 0) return invalid(std::string(rule_of(control.status)));
  return {};
}

}  // namespace mxflash::cuda
