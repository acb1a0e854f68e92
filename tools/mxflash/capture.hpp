// One input file: tensors, and the problem that they and the metadata state.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "mxflash/attention.hpp"
#include "mxflash/safetensors.hpp"

namespace mxflash::tool {

/// How the command line overrides the file's mask.
struct MaskArguments {
  bool full = false;
  std::string window;
};

struct Capture {
  TensorFile file;
  Problem problem;
  Inputs inputs;  ///< Views into `file`.
  bool causal = true;
};

/// Documents from `cu_seqlens`, or from `cu_seqlens_q` and `cu_seqlens_k`, or one over all tokens.
Result<Packing> packing_of(const TensorFile& file, std::int64_t tokens_q, std::int64_t tokens_k);

Result<Capture> load_capture(const std::string& path, const MaskArguments& mask);

/// `problem` of the JSON outputs.
nlohmann::ordered_json problem_json(const Capture& capture);
/// One line for people.
std::string describe(const Capture& capture);

}  // namespace mxflash::tool
