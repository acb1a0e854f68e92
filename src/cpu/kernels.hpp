// The kernels of one instruction set, and the list of those that this build has.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "cpu/buffers.hpp"
#include "cpu/plan.hpp"
#include "reference/weights.hpp"

namespace mxflash::cpu {

/// Queries [query_begin, query_end) of one document against one key/value head, for all query heads that read it.
/// query_begin is a multiple of 32.
struct Item {
  const Document* document = nullptr;
  std::int64_t kv_head = 0;
  std::int64_t query_begin = 0;
  std::int64_t query_end = 0;
};

/// Contiguous [tokens, heads, dims] of the inputs' type.
struct Output {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
};

/// What quantization did, where the plan asks for it. One a worker.
struct Counts {
  OctaveCounter weights;
  double row_sum = 0;
  double least_row_sum = 1;
};

struct Forward {
  Output o;
  float* lse = nullptr;  ///< [tokens, heads]
};

/// Whole documents only: an item writes dK and dV.
struct Backward {
  Output dq;
  Output dk;
  Output dv;
};

struct Kernels {
  void (*forward)(const Plan&, const Item&, const Forward&, Workspace&, Counts&) = nullptr;
  void (*backward)(const Plan&, const Item&, const Backward&, Workspace&, Counts&) = nullptr;
  /// Values and exponents of 32 tokens or fewer, as `quantize` gives them: x [dims][32]. For tests.
  void (*quantize)(const Plan&, const TokenOperand&, Side, const Item&, std::int64_t head, float* x,
                   std::int32_t* exponents, Workspace&) = nullptr;
};

struct InstructionSet {
  std::string_view name;         ///< "avx2", ...
  std::string_view description;  ///< What multiplies.
  std::string_view needs;        ///< What a machine without it lacks.
  bool (*available)() = nullptr;
  bool exact_f32 = true;  ///< Whether an operand that is not quantized below FP32 keeps its bits.
  Kernels kernels;
};

/// Best first; the portable one is last.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace mxflash::cpu
