// include/mxflash/cuda.hpp on a device.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <string>
#include <utility>

#include "cuda/arguments.hpp"
#include "cuda/plan.hpp"

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
  const Result<Launches> launches = prepare(call, recipe, execution);
  if (!launches.ok()) return launches.error();
  if (Status status = available(); !status.ok()) return status;
  void* stream = execution.stream;
  if (const int code = launch_schedule(launches->schedule, stream); code != cudaSuccess) return failed("schedule", code);
  if (const int code = launch_quantize(launches->quantize, stream); code != cudaSuccess) return failed("quantize", code);
  if (const int code = launch_forward(launches->forward, stream); code != cudaSuccess) return failed("forward", code);
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
