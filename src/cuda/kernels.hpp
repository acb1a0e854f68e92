// What the host calls: each launches on a stream and returns CUDA's own code (0: success). No CUDA headers here.
#pragma once

#include <cstdint>

#include "cuda/layout.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash::cuda {

/// The arrays of a workspace, by address.
struct Workspace {
  Control* control = nullptr;
  Item* items = nullptr;
  KeyTile* tiles = nullptr;
  std::uint64_t* costs = nullptr;
  std::int32_t* slots = nullptr;
  std::uint64_t* costs_out = nullptr;
  std::int32_t* order = nullptr;
  void* sort = nullptr;
  std::size_t sort_bytes = 0;
  QueryScale* query_scale = nullptr;
  KeyScale* key_scale = nullptr;
  Range* ranges = nullptr;
  std::uint8_t* query_codes = nullptr;
  std::uint8_t* key_codes = nullptr;
  std::uint8_t* value_codes = nullptr;
  RowRecord* rows = nullptr;  ///< Null where no backward follows.
  void* residual = nullptr;   ///< The same, and where o is FP32.
};

/// A band of keys in 64 bits, as Mask.
struct Band {
  std::int64_t left = 0;
  std::int64_t right = 0;
};

struct Offsets {
  const std::int32_t* q = nullptr;
  const std::int32_t* k = nullptr;
};

struct ScheduleArguments {
  Sizes sizes;
  Offsets offsets;
  Band band;
  Workspace workspace;
};

/// Checks the offsets, makes the work items and the tiles of keys, sorts the items: falling visible pairs, equal ones
/// in rising (document, query).
int launch_schedule(const ScheduleArguments& arguments, void* stream);
/// Scratch that the sort of so many slots needs; negative: CUDA's code.
std::int64_t sort_scratch_bytes(std::int64_t slots);

/// Strides in elements; `vectors`: rows may be read 16 bytes at a time; `scale_tokens`: so many tokens, 1 or 32,
/// counted from a document's first, share an exponent.
struct Source {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t dim_stride = 1;
  bool vectors = false;
  std::int32_t scale_tokens = 1;
};

struct QuantizeArguments {
  Sizes sizes;
  Workspace workspace;
  Source q;
  Source k;
  Source v;
  /// Power of two that goes before the butterflies of q and k, negated; -1: no rotation.
  std::int32_t rotation_shift = -1;
};

/// Codes and scales of q, k and v, and the ranges of exponents of each tile of keys.
int launch_quantize(const QuantizeArguments& arguments, void* stream);

struct ForwardArguments {
  Sizes sizes;
  Band band;
  Workspace workspace;
  float logit_scale = 0;  ///< scale log2(e), with the rotation's factor.
  DType dtype = DType::bf16;
  void* o = nullptr;
  float* lse = nullptr;
};

int launch_forward(const ForwardArguments& arguments, void* stream);

/// Sets `key_dims`, `value_dims` and `value_parts` from head_dim and value_dim: which kernel runs.
constexpr void choose_kernel(Sizes& sizes) {
  const std::int32_t most = sizes.head_dim > sizes.value_dim ? sizes.head_dim : sizes.value_dim;
  sizes.key_dims = most <= 64 ? 64 : sizes.head_dim <= 128 ? 128 : 256;
  sizes.value_dims = most <= 64 ? 64 : 128;
  sizes.value_parts = sizes.value_dim <= 128 ? 1 : 2;
}

}  // namespace mxflash::cuda
