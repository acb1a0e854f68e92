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

Status check_pointer(const Pointer& pointer, int device) {
  cudaPointerAttributes about{};
  if (const cudaError_t code = cudaPointerGetAttributes(&about, pointer.address); code != cudaSuccess) {
    return status_of(code, fmt::format("asking where {} lies", pointer.name));
  }
  switch (about.type) {
    case cudaMemoryTypeManaged: return {};  // Moves to the device that reads it.
    case cudaMemoryTypeDevice:
      if (about.device == device) return {};
      return invalid(fmt::format("{}: memory of device {} given, of the current device, {}, allowed", pointer.name,
                                 about.device, device));
    default: return invalid(fmt::format("{}: host memory given, device memory allowed", pointer.name));
  }
}

Status check_pointers(const std::vector<Pointer>& pointers) {
  int device = 0;
  if (Status status = status_of(cudaGetDevice(&device), "the current device"); !status.ok()) return status;
  for (const Pointer& pointer : pointers) {
    if (Status status = check_pointer(pointer, device); !status.ok()) return status;
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
  return check_pointers(pointers);
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
  return check_pointers(pointers);
}

}  // namespace mxflash::cuda
