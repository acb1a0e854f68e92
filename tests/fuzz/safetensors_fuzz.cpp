// Any bytes as a safetensors file: refused in one line, or read whole.
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>

#include "mxflash/safetensors.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace {

constexpr std::size_t kLengthBytes = 8;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_refusal(const mxflash::Error& error) {
  require(error.message.starts_with("fuzz: "));
  for (const char c : error.message) require(c >= 0x20 && c < 0x7F);
}

void check_file(const mxflash::TensorFile& file, std::span<const std::byte> bytes) {
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  std::size_t total = 0;
  for (const auto& [name, tensor] : file.tensors) {
    require(name != "__metadata__");
    for (const std::int64_t extent : tensor.shape) require(extent >= 0);
    require(tensor.data.size() == static_cast<std::size_t>(tensor.elements()) * mxflash::size_of(tensor.dtype));
    total += tensor.data.size();
  }
  require(total + header + kLengthBytes == bytes.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  const mxflash::Result<mxflash::TensorFile> file = mxflash::parse_safetensors(bytes, "fuzz");
  if (file) {
    check_file(*file, bytes);
  } else {
    check_refusal(file.error());
  }
  return 0;
}

/// Three times in four the length is made right again: an input with a wrong one never gets past it.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  std::minstd_rand random(seed);
  if (size < kLengthBytes || random() % 4 == 0) return size;
  std::size_t end = size;
  while (end > kLengthBytes && data[end - 1] != '}') --end;
  const std::uint64_t header = end - kLengthBytes;
  std::memcpy(data, &header, sizeof header);
  return size;
}
