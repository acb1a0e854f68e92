// The kernels of one instruction set, and the list of those that this build has.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "cpu/buffers.hpp"
#include "cpu/key_sums.hpp"
#include "cpu/plan.hpp"
#include "reference/weights.hpp"

namespace mxflash::cpu {

/// Queries [query_begin, query_end) of one document against one key/value head, for all query heads that read it.
/// query_begin is a multiple of 32, in the backward of 128.
struct Item {
  const Document* document = nullptr;
  std::int64_t kv_head = 0;
  std::int64_t query_begin = 0;
  std::int64_t query_end = 0;
  /// Of a backward whose document is several items: what they add to, and this one's number.
  KeySums* sums = nullptr;
  int number = 0;
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

/// dK and dV are written by the item that covers its document, or by the last of those that do.
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
