// include/mxflash/cuda.hpp on a device.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "cuda/arguments.hpp"
#include "cuda/backward_plan.hpp"
#include "cuda/plan.hpp"
#include "cuda/residence.hpp"
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
  const Result<Layout> layout = plan(*sizes, call, recipe);
  if (!layout.ok()) return layout.error();
  return layout->bytes;
}

Status forward(const ForwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<Launches> launches = prepare(call, recipe, execution);
  if (!launches.ok()) return launches.error();
  if (Status status = available(); !status.ok()) return status;
  if (Status status = check_residence(call, execution); !status.ok()) return status;
  void* stream = execution.stream;
  Status status = launched(launch_schedule(launches->schedule, stream), "making the schedule");
  const Sizes& sizes = launches->schedule.sizes;
  // A backward reads keys' codes where there are no queries too.
  if (!status.ok() || (sizes.tokens_q == 0 && (!call.training || sizes.tokens_k == 0))) return status;
  const std::optional<EmbedLaunches>& embedded = launches->embedded;
  status = launched(
      embedded ? launch_embed_quantize(embedded->quantize, stream) : launch_quantize(launches->quantize, stream),
      "quantizing");
  if (!status.ok()) return status;
  return launched(
      embedded ? launch_embed_forward(embedded->forward, stream) : launch_forward(launches->forward, stream),
      "the forward");
}

bool backward_reads_inputs(const Recipe& recipe) { return !multiplies_codes_backward(recipe); }

Result<std::size_t> backward_workspace_bytes(const BackwardCall& call, const Recipe& recipe) {
  const Result<Sizes> sizes = check_backward_call(call, recipe);
  if (!sizes.ok()) return sizes.error();
  return backward_bytes(*sizes, recipe);
}

Status backward(const BackwardCall& call, const Recipe& recipe, const Execution& execution) {
  const Result<BackwardLaunches> launches = prepare_backward(call, recipe, execution);
  if (!launches.ok()) return launches.error();
  if (Status status = available(); !status.ok()) return status;
  if (Status status = check_residence(call, recipe, execution); !status.ok()) return status;
  void* stream = execution.stream;
  if (launches->embedded) return launched(launch_embed_backward(*launches->embedded, stream), "the backward");
  Status status = launched(launch_key_schedule(launches->schedule, stream), "making the backward's schedule");
  const Sizes& sizes = launches->schedule.sizes.forward;
  if (!status.ok() || (sizes.tokens_q == 0 && sizes.tokens_k == 0)) return status;
  status = launched(launch_prepare(launches->prepare, stream), "quantizing for the backward");
  if (!status.ok()) return status;
  status = launched(launch_prescale(launches->prescale, stream), "the powers of two before dQ");
  if (!status.ok()) return status;
  status = launched(launch_backward(launches->backward, stream), "the backward");
  if (!status.ok()) return status;
  return launched(launch_finish(launches->finish, stream), "rounding the gradients");
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
