// The CUDA engine of a build without CUDA: it says so.
#include "cuda/host.hpp"
#include "cuda/memory.hpp"
#include "mxflash/cuda.hpp"

namespace mxflash::cuda {
namespace {

Error absent() {
  return unsupported(
      "cuda: this build has no CUDA engine; configure with -DMXFLASH_CUDA=ON (preset gpu), which needs nvcc");
}

}  // namespace

Status available() { return absent(); }
Status supports(const Recipe&) { return absent(); }
Result<std::size_t> workspace_bytes(const ForwardCall&, const Recipe&) { return absent(); }
Status forward(const ForwardCall&, const Recipe&, const Execution&) { return absent(); }
Status supports_backward(const Recipe&) { return absent(); }
bool backward_reads_inputs(const Recipe&) { return true; }
Result<std::size_t> backward_workspace_bytes(const BackwardCall&, const Recipe&) { return absent(); }
Status backward(const BackwardCall&, const Recipe&, const Execution&) { return absent(); }
Status check(const Execution&) { return absent(); }
Result<ForwardResult> forward(const Problem&, const Recipe&, const Inputs&) { return absent(); }
Result<BackwardResult> backward(const Problem&, const Recipe&, const Inputs&, const Options&) { return absent(); }

// There is none to free.
void Free::operator()(std::byte*) const {}
Result<DeviceMemory> allocate(std::size_t, std::string_view) { return absent(); }
Result<DeviceMemory> upload(std::span<const std::byte>, std::string_view) { return absent(); }
Status download(std::span<std::byte>, const std::byte*, std::string_view) { return absent(); }

}  // namespace mxflash::cuda
