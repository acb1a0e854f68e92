#include "cuda/residence.hpp"

#include <fmt/format.h>

#include <vector>

#include "cuda/arguments.hpp"
#include "cuda/runtime.hpp"

namespace mxflash::cuda {
namespace {

struct Pointer {
  const char* name;
  const void* address;
};

/// Where a call runs.
struct Site {
  int device = 0;
  bool capturing = false;
};

Result<Site> site_of(const Execution& execution) {
  Site site;
  if (Status status = status_of(cudaGetDevice(&site.device), "the current device"); !status.ok()) return status.error();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(static_cast<cudaStream_t>(execution.stream), &capture);
  if (Status status = status_of(code, "asking whether the stream captures"); !status.ok()) return status.error();
  site.capturing = capture != cudaStreamCaptureStatusNone;
  return site;
}

Status check_pointer(const Pointer& pointer, const Site& site) {
  cudaPointerAttributes about{};
  if (const cudaError_t code = cudaPointerGetAttributes(&about, pointer.address); code != cudaSuccess) {
    return status_of(code, fmt::format("asking where {} lies", pointer.name));
  }
  if (about.type == cudaMemoryTypeManaged) return {};  // Moves to the device that reads it.
  // What a graph will allocate has an address while it is captured, of which the runtime knows no more.
  if (about.type == cudaMemoryTypeUnregistered && site.capturing) return {};
  if (about.type != cudaMemoryTypeDevice) {
    return invalid(fmt::format("{}: host memory given, device memory allowed", pointer.name));
  }
  if (about.device == site.device) return {};
  return invalid(fmt::format("{}: memory of device {} given, of the current device, {}, allowed", pointer.name,
                             about.device, site.device));
}

Status check_pointers(const std::vector<Pointer>& pointers, const Execution& execution) {
  const Result<Site> site = site_of(execution);
  if (!site.ok()) return site.error();
  for (const Pointer& pointer : pointers) {
    if (Status status = check_pointer(pointer, *site); !status.ok()) return status;
  }
  return {};
}

void add_inputs(const Inputs& inputs, std::vector<Pointer>& pointers) {
  if (inputs.q.tokens() > 0) pointers.push_back({"q", inputs.q.data});
  if (inputs.k.tokens() > 0) pointers.insert(pointers.end(), {{"k", inputs.k.data}, {"v", inputs.v.data}});
}

std::vector<Pointer> pointers_of(const DeviceDocuments& documents, const Execution& execution) {
  return {{"cu_seqlens_q", documents.cu_seqlens_q},
          {"cu_seqlens_k", documents.cu_seqlens_k},
          {"workspace", execution.workspace}};
}

}  // namespace

Status check_residence(const ForwardCall& call, const Execution& execution) {
  std::vector<Pointer> pointers = pointers_of(call.documents, execution);
  add_inputs(call.inputs, pointers);
  if (call.inputs.q.tokens() > 0) {
    pointers.insert(pointers.end(), {{"o", call.outputs.o}, {"lse", call.outputs.lse}});
  }
  return check_pointers(pointers, execution);
}

Status check_residence(const BackwardCall& call, const Recipe& recipe, const Execution& execution) {
  const ForwardCall& forward = call.forward;
  const Inputs& inputs = forward.inputs;
  std::vector<Pointer> pointers = pointers_of(forward.documents, execution);
  pointers.push_back({"saved", call.saved});
  if (!multiplies_codes_backward(recipe)) add_inputs(inputs, pointers);
  if (inputs.q.tokens() > 0) {
    pointers.insert(pointers.end(), {{"do", inputs.dout->data}, {"o", forward.outputs.o}, {"dq", call.gradients.dq}});
    if (inputs.dlse) pointers.push_back({"dlse", inputs.dlse->data});
  }
  if (inputs.k.tokens() > 0) {
    pointers.insert(pointers.end(), {{"dk", call.gradients.dk}, {"dv", call.gradients.dv}});
  }
  return check_pointers(pointers, execution);
}

}  // namespace mxflash::cuda
