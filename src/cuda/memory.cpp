#include "cuda/memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/runtime.hpp"

namespace mxflash::cuda {

Status status_of(cudaError_t code, std::string_view what) {
  if (code == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());  // Else the next call would report it again.
  return unsupported(fmt::format("cuda: {}: {}", what, cudaGetErrorString(code)));
}

void Free::operator()(std::byte* memory) const { static_cast<void>(cudaFree(memory)); }

Result<DeviceMemory> allocate(std::size_t bytes, std::string_view name) {
  void* memory = nullptr;
  // An empty tensor has an address too.
  const cudaError_t code = cudaMalloc(&memory, std::max<std::size_t>(bytes, 16));
  if (Status status = status_of(code, fmt::format("{} bytes of device memory for {}", bytes, name)); !status.ok()) {
    return status.error();
  }
  return DeviceMemory(static_cast<std::byte*>(memory));
}

Result<DeviceMemory> upload(std::span<const std::byte> bytes, std::string_view name) {
  Result<DeviceMemory> memory = allocate(bytes.size(), name);
  if (!memory.ok()) return memory;
  const cudaError_t code = cudaMemcpy(memory->get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  if (Status status = status_of(code, fmt::format("copying {} to the device", name)); !status.ok()) {
    return status.error();
  }
  return memory;
}

Status download(std::span<std::byte> bytes, const std::byte* device, std::string_view name) {
  const cudaError_t code = cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost);
  return status_of(code, fmt::format("copying {} from the device", name));
}

}  // namespace mxflash::cuda
