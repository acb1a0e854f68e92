// The CUDA engine of a build without CUDA: it says so.
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
Status check(const Execution&) { return absent(); }

}  // namespace mxflash::cuda
