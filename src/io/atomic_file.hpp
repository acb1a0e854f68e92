// Files that are whole or untouched.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "mxflash/status.hpp"

namespace mxflash {

/// Writes `parts` one after the other to a temporary file beside `path`, syncs it and renames it to `path`. On any
/// failure the temporary file is gone and `path` is as it was.
Status write_parts(const std::filesystem::path& path, std::span<const std::span<const std::byte>> parts);

}  // namespace mxflash
