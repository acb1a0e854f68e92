// Attention on an NVIDIA Hopper GPU, on device pointers and a stream: it allocates nothing and waits for nothing.
//
//   const ForwardCall call{{cu_seqlens_q, cu_seqlens_k, documents}, {q, k, v}, {o, lse}};
//   const std::size_t bytes = *cuda::workspace_bytes(call, recipe);            // O(tokens), whatever the packing
//   cuda::forward(call, recipe, {workspace, bytes, stream});                   // may be captured in a graph
//   cuda::check({workspace, bytes, stream});                                   // waits; were the offsets well formed?
//
// With `training` set, the workspace is what a backward reads, and stays as it is:
//
//   const BackwardCall back{call, workspace, bytes, {dq, dk, dv}};              // call.inputs.dout is set by now
//   cuda::backward(back, recipe, {another, *cuda::backward_workspace_bytes(back, recipe), stream});
//
// A library built without CUDA has these functions too; they say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "mxflash/attention.hpp"

namespace mxflash::cuda {

/// Packed documents whose offsets lie on the device, so that one graph serves every packing of the same totals.
struct DeviceDocuments {
  const std::int32_t* cu_seqlens_q = nullptr;  ///< [documents + 1]; as Packing::make asks, but see check.
  const std::int32_t* cu_seqlens_k = nullptr;  ///< [documents + 1]
  std::int64_t documents = 0;
  Mask mask = Mask::causal();
  std::optional<float> scale = std::nullopt;  ///< Absent: 1 / sqrt(head_dim).
};

/// Contiguous, on the device.
struct ForwardOutputs {
  std::byte* o = nullptr;  ///< [tokens_q, heads, value_dim], the inputs' type; 16-byte aligned.
  float* lse = nullptr;    ///< [tokens_q, heads], natural log.
};

/// The views of `inputs` point to device memory; dout and dlse are not read.
struct ForwardCall {
  DeviceDocuments documents;
  Inputs inputs;
  ForwardOutputs outputs;
  bool training = false;  ///< A backward follows: the workspace, larger then, holds what it needs.
};

/// Contiguous, on the device, the inputs' type, 16-byte aligned.
struct Gradients {
  std::byte* dq = nullptr;  ///< [tokens_q, heads, head_dim]
  std::byte* dk = nullptr;  ///< [tokens_k, kv_heads, head_dim]
  std::byte* dv = nullptr;  ///< [tokens_k, kv_heads, value_dim]
};

/// What follows a forward with `training` set. Of the inputs dout and dlse are read; q, k and v too, unless the recipe
/// runs in products of E4M3 codes, when their shapes alone are.
struct BackwardCall {
  ForwardCall forward;          ///< As it was, with dout; its o, cu_seqlens and recipe unchanged.
  const void* saved = nullptr;  ///< Its workspace, to which nothing has been written since.
  std::size_t saved_bytes = 0;  ///< What was given to it as workspace_bytes.
  Gradients gradients;
  bool deterministic = true;  ///< Bit-identical dq for the same input; dk and dv always are.
  std::uint64_t seed = 0;     ///< Of stochastic rounding.
};

/// Where a call runs: on the current device. `workspace` is device memory, 256-byte aligned.
struct Execution {
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  void* stream = nullptr;  ///< A cudaStream_t of the current device; another's is an error of the runtime.
};

/// Whether this build and the current device can run it at all; the error says what is missing.
Status available();
/// Whether the forward of this recipe runs on the device; the error says why not.
Status supports(const Recipe& recipe);

/// Depends on shapes, types and the number of documents alone. Refuses what forward refuses, but does not ask where
/// memory lies.
Result<std::size_t> workspace_bytes(const ForwardCall& call, const Recipe& recipe);
/// Refuses whatever the host can see, memory of the host and of another device too, before anything is written; while
/// the stream captures, an address that the runtime does not know is taken, since the graph may allocate it. Offsets
/// are checked on the device: malformed ones fill o and lse with NaN and are reported by `check`.
Status forward(const ForwardCall& call, const Recipe& recipe, const Execution& execution);

/// Whether the backward of this recipe runs on the device; the error says why not, and of which recipes it does.
Status supports_backward(const Recipe& recipe);
/// Whether that backward reads q, k and v themselves; otherwise the forward's workspace will do, and they may be gone.
bool backward_reads_inputs(const Recipe& recipe);
/// As workspace_bytes; and on the current device.
Result<std::size_t> backward_workspace_bytes(const BackwardCall& call, const Recipe& recipe);
/// As forward: malformed offsets fill dq, dk and dv with NaN. `execution` has a workspace of its own.
Status backward(const BackwardCall& call, const Recipe& recipe, const Execution& execution);

/// Waits for the stream; an error if the last call in this workspace had malformed offsets or a kernel failed.
Status check(const Execution& execution);

}  // namespace mxflash::cuda
