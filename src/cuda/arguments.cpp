#include "cuda/arguments.hpp"

#include <fmt/format.h>

#include <bit>
#include <vector>

#include "arguments/arguments.hpp"
#include "cuda/embed_backward_plan.hpp"
#include "cuda/embed_plan.hpp"
#include "cuda/kernels.hpp"

namespace mxflash::cuda {
namespace {

Status check_counts(const ForwardCall& call) {
  constexpr std::int64_t kMost = INT32_MAX;
  const std::int64_t documents = call.documents.documents;
  const bool empty = call.inputs.q.tokens() == 0 && call.inputs.k.tokens() == 0;
  if (documents < (empty ? 0 : 1) || documents >= kMost) {
    return invalid(fmt::format("documents: {} given, {} to {} allowed", documents, empty ? 0 : 1, kMost - 1));
  }
  // Slots and rows of the code tables are counted in 32 bits.
  for (const auto& [name, view] : {std::pair{"q", &call.inputs.q}, std::pair{"k", &call.inputs.k}}) {
    const std::int64_t rows = (view->tokens() + kTileRows) * view->heads();
    if (rows > kMost) {
      return invalid(fmt::format("{}: {} tokens of {} heads given, at most {} together allowed", name, view->tokens(),
                                 view->heads(), kMost));
    }
  }
  return {};
}

Status check_offsets(const DeviceDocuments& documents) {
  const std::pair<const char*, const void*> pointers[] = {{"cu_seqlens_q", documents.cu_seqlens_q},
                                                          {"cu_seqlens_k", documents.cu_seqlens_k}};
  for (const auto& [name, pointer] : pointers) {
    if (pointer == nullptr) return invalid(fmt::format("{}: null given, device memory allowed", name));
  }
  return {};
}

Status check_data(const char* name, const TensorView& view) {
  if (view.data != nullptr || view.tokens() == 0) return {};
  return invalid(fmt::format("{}: null given, device memory allowed", name));
}

Status check_aligned(const char* name, const void* pointer, std::uintptr_t alignment = 16) {
  if (pointer != nullptr && std::bit_cast<std::uintptr_t>(pointer) % alignment == 0) return {};
  return invalid(fmt::format("{}: address {} given, {}-byte aligned device memory allowed", name, pointer, alignment));
}

Status check_pointers(const ForwardCall& call) {
  const Status inputs[] = {check_offsets(call.documents), check_data("q", call.inputs.q),
                           check_data("k", call.inputs.k), check_data("v", call.inputs.v)};
  for (const Status& status : inputs) {
    if (!status.ok()) return status;
  }
  if (call.inputs.q.tokens() == 0) return {};
  if (Status status = check_aligned("o", call.outputs.o); !status.ok()) return status;
  return check_aligned("lse", call.outputs.lse);
}

Status check_pointers(const BackwardCall& call, const Recipe& recipe) {
  const ForwardCall& forward = call.forward;
  const Inputs& inputs = forward.inputs;
  std::vector<Status> checks = {check_offsets(forward.documents), check_aligned("saved", call.saved, 256)};
  if (!multiplies_codes_backward(recipe)) {
    checks.insert(checks.end(), {check_data("q", inputs.q), check_data("k", inputs.k), check_data("v", inputs.v)});
  }
  if (inputs.q.tokens() > 0) {
    checks.push_back(check_aligned("do", inputs.dout->data, size_of(inputs.dout->dtype)));
    if (inputs.dlse) checks.push_back(check_aligned("dlse", inputs.dlse->data, sizeof(float)));
    checks.push_back(check_aligned("o", forward.outputs.o));
    checks.push_back(check_aligned("dq", call.gradients.dq));
  }
  if (inputs.k.tokens() > 0) {
    checks.push_back(check_aligned("dk", call.gradients.dk));
    checks.push_back(check_aligned("dv", call.gradients.dv));
  }
  for (const Status& status : checks) {
    if (!status.ok()) return status;
  }
  return {};
}

/// As an engine on host memory would check it: the offsets are on the device, the rows of q and k count as one
/// document.
Problem problem_of(const ForwardCall& call) {
  return {Packing::single(call.inputs.q.tokens(), call.inputs.k.tokens()), call.documents.mask, call.documents.scale};
}

Status check_tokens(const Inputs& inputs) {
  if (inputs.q.tokens() >= 0 && inputs.k.tokens() >= 0) return {};
  return invalid("tokens: a negative number given, 0 or more allowed");
}

Sizes sizes_of(const ForwardCall& call) {
  const Inputs& inputs = call.inputs;
  Sizes sizes;
  sizes.documents = static_cast<std::int32_t>(call.documents.documents);
  sizes.tokens_q = static_cast<std::int32_t>(inputs.q.tokens());
  sizes.tokens_k = static_cast<std::int32_t>(inputs.k.tokens());
  sizes.heads = static_cast<std::int32_t>(inputs.q.heads());
  sizes.kv_heads = static_cast<std::int32_t>(inputs.k.heads());
  sizes.head_dim = static_cast<std::int32_t>(inputs.q.dims());
  sizes.value_dim = static_cast<std::int32_t>(inputs.v.dims());
  choose_kernel(sizes);
  return sizes;
}

/// E4M3 with one exponent a token, or for 32 of them: the quantizer's data, the same to the products.
bool per_token(Operand operand) {
  if (operand.block == Block::tokens32()) operand.block = Block::token();
  return operand == Operand{Encoding::e4m3, Block::token(), ScaleRule::ceil, Rounding::nearest, SecondLevel::fixed};
}

constexpr Operand kStaticWeights{Encoding::e4m3, Block::tensor(), ScaleRule::ceil, Rounding::nearest,
                                 SecondLevel::fixed};

bool is_score_gradient(const Operand& operand) {
  const Operand square{Encoding::e4m3, Block::square32(), ScaleRule::ceil, Rounding::nearest, SecondLevel::fixed};
  Operand row = square;
  row.block = Block::dims32();
  return operand == square || operand == row;
}

}  // namespace

bool multiplies_codes(const Recipe& recipe) {
  return per_token(recipe.s.left) && per_token(recipe.s.right) && per_token(recipe.o.tokens) && !recipe.o.cut &&
         recipe.o.weights == kStaticWeights && recipe.beta == 256 && recipe.row_sum == RowSum::quantized &&
         recipe.exponential == Exponential::exact;
}

Status supports(const Recipe& recipe) { return multiplies_codes(recipe) ? Status{} : embeds(recipe); }

/// Each operand's codes are made once: those of the forward, of dO, and of dS are there.
bool multiplies_codes_backward(const Recipe& recipe) {
  return multiplies_codes(recipe) && recipe.dp.right == recipe.o.tokens && per_token(recipe.dp.left) &&
         recipe.dv.tokens == recipe.dp.left && recipe.dv.weights == kStaticWeights &&
         recipe.dq.tokens == recipe.s.right && recipe.dk.tokens == recipe.s.left &&
         is_score_gradient(recipe.dq.weights) && recipe.dk.weights == recipe.dq.weights && !recipe.dv.cut &&
         !recipe.dq.cut && !recipe.dk.cut && recipe.dq_accumulation != DqAccumulation::f16_sequence;
}

bool runs_on_codes(const ForwardCall& call, const Recipe& recipe) {
  return call.training ? multiplies_codes_backward(recipe) : multiplies_codes(recipe);
}

Status supports_backward(const Recipe& recipe) {
  if (Status status = validate_backward(recipe); !status.ok()) return status;
  return multiplies_codes_backward(recipe) ? Status{} : embeds_backward(recipe);
}

Result<Sizes> check_call(const ForwardCall& call, const Recipe& recipe) {
  if (Status status = check_tokens(call.inputs); !status.ok()) return status.error();
  const Status checks[] = {check_arguments(problem_of(call), call.inputs, {}), check_recipe(recipe, call.inputs),
                           call.training ? supports_backward(recipe) : supports(recipe), check_counts(call),
                           check_pointers(call)};
  for (const Status& status : checks) {
    if (!status.ok()) return status.error();
  }
  return sizes_of(call);
}

Result<Sizes> check_backward_call(const BackwardCall& call, const Recipe& recipe) {
  const ForwardCall& forward = call.forward;
  if (!forward.training) {
    return invalid("training: false given, true allowed: the workspace of another forward does not hold enough");
  }
  if (Status status = check_tokens(forward.inputs); !status.ok()) return status.error();
  if (Status status = check_backward_arguments(problem_of(forward), forward.inputs, {}); !status.ok()) {
    return status.error();  // Without dout there are no pointers to check.
  }
  const Status checks[] = {check_recipe(recipe, forward.inputs), supports_backward(recipe), check_counts(forward),
                           check_pointers(call, recipe)};
  for (const Status& status : checks) {
    if (!status.ok()) return status.error();
  }
  const Sizes sizes = sizes_of(forward);
  // Work is counted in 32 bits: key tiles, each with its head and part.
  constexpr std::int64_t kParts = 2;
  if (sizes.tile_slots() * sizes.kv_heads * kParts > INT32_MAX) {
    return invalid(fmt::format("documents: {} with {} key/value heads given, fewer than {} together allowed",
                               sizes.documents, sizes.kv_heads, INT32_MAX / kParts));
  }
  return sizes;
}

}  // namespace mxflash::cuda
