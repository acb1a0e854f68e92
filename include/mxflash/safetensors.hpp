// The safetensors file format: named tensors and string metadata. Reading trusts nothing in the file, and memory stays
// within a small multiple of the file's size.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "mxflash/status.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash {

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Refuses: a file shorter than its header says; a header that is no JSON object, repeats a name, or is larger than 100
/// MB; a tensor whose type is not one of DType's, whose shape is negative or overflows, whose byte range is reversed,
/// out of the file or not shape x type; ranges that overlap or leave holes. Messages begin with the path.
Result<TensorFile> read_safetensors(const std::filesystem::path& path);
/// The same from bytes in memory; messages begin with `name`.
Result<TensorFile> parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

/// Writes a temporary file beside `path`, then renames it: the file is whole or untouched. Data begins at a multiple of
/// 8 bytes; tensors of large elements come first, then in name order, so that each is aligned to its own elements.
/// Refuses a tensor whose bytes are not shape x type, and a path that is neither free nor a writable regular file.
Status write_safetensors(const std::filesystem::path& path, const TensorFile& file);

/// Any bytes, whole or not at all, in the same way.
Status write_file(const std::filesystem::path& path, std::span<const std::byte> bytes);

}  // namespace mxflash
