// Device memory with an owner; errors carry the CUDA runtime's own words.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "mxflash/status.hpp"

namespace mxflash::cuda {

struct Free {
  void operator()(std::byte* memory) const;
};
using DeviceMemory = std::unique_ptr<std::byte, Free>;

/// `name` is what an error says the memory is for.
Result<DeviceMemory> allocate(std::size_t bytes, std::string_view name);
Result<DeviceMemory> upload(std::span<const std::byte> bytes, std::string_view name);
/// Waits for the default stream.
Status download(std::span<std::byte> bytes, const std::byte* device, std::string_view name);

}  // namespace mxflash::cuda
