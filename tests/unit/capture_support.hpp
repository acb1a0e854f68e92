// What layers of a model saw in training: the capture in examples/, and those of a folder that MXFLASH_TEST_CAPTURES
// names, which are too large to be kept here.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "mxflash/safetensors.hpp"
#include "unit/attention_support.hpp"

namespace mxflash::test {

struct Capture {
  std::string name;
  Case c;
};

/// A file with q, k, v, do and cu_seqlens.
inline Capture read_capture(const std::filesystem::path& path) {
  Capture capture{path.filename().string(), {}};
  const auto file = read_safetensors(path);
  EXPECT_TRUE(file.ok()) << (file.ok() ? "" : file.error().message);
  if (!file.ok()) return capture;
  for (const auto& [name, tensor] :
       {std::pair{"q", &capture.c.q}, {"k", &capture.c.k}, {"v", &capture.c.v}, {"do", &capture.c.dout}}) {
    const auto found = file->tensors.find(name);
    EXPECT_NE(found, file->tensors.end()) << path << ": " << name;
    if (found != file->tensors.end()) *tensor = found->second;
  }
  const auto offsets = file->tensors.find("cu_seqlens");
  EXPECT_NE(offsets, file->tensors.end()) << path << ": cu_seqlens";
  if (testing::Test::HasFailure()) return capture;
  const Result<Packing> packing =
      Packing::from_tensors(offsets->second, offsets->second, capture.c.q.shape[0], capture.c.k.shape[0]);
  EXPECT_TRUE(packing.ok()) << path;
  if (packing.ok()) capture.c.problem.packing = *packing;
  return capture;
}

/// By name. A folder without any is a mistake.
inline std::vector<Capture> captures() {
  std::vector<std::filesystem::path> paths;
  std::vector<std::string> folders = {MXFLASH_EXAMPLES};
  if (const char* more = std::getenv("MXFLASH_TEST_CAPTURES"); more != nullptr) folders.emplace_back(more);
  for (const std::string& folder : folders) {
    const std::size_t before = paths.size();
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      const auto same = [&](const std::filesystem::path& path) { return path.filename() == entry.path().filename(); };
      if (entry.path().extension() == ".safetensors" && std::ranges::none_of(paths, same))
        paths.push_back(entry.path());
    }
    EXPECT_FALSE(error) << folder << ": " << error.message();
    EXPECT_GT(paths.size(), before) << folder << ": no capture, or none of another name";
  }
  std::ranges::sort(paths);
  std::vector<Capture> all;
  for (const std::filesystem::path& path : paths) {
    all.push_back(read_capture(path));
    if (testing::Test::HasFailure()) return {};
  }
  return all;
}

}  // namespace mxflash::test
