#include "cuda/arguments.hpp"

#include <fmt/format.h>

#include <bit>

#include "arguments/arguments.hpp"
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

Status check_pointers(const ForwardCall& call) {
  const std::pair<const char*, const void*> pointers[] = {{"cu_seqlens_q", call.documents.cu_seqlens_q},
                                                          {"cu_seqlens_k", call.documents.cu_seqlens_k}};
  for (const auto& [name, pointer] : pointers) {
    if (pointer == nullptr) return invalid(fmt::format("{}: null given, device memory allowed", name));
  }
  const std::pair<const char*, const TensorView*> tensors[] = {
      {"q", &call.inputs.q}, {"k", &call.inputs.k}, {"v", &call.inputs.v}};
  for (const auto& [name, view] : tensors) {
    if (view->data == nullptr && view->tokens() > 0) {
      return invalid(fmt::format("{}: null given, device memory allowed", name));
    }
  }
  if (call.inputs.q.tokens() == 0) return {};
  const std::pair<const char*, const void*> outputs[] = {{"o", call.outputs.o}, {"lse", call.outputs.lse}};
  for (const auto& [name, pointer] : outputs) {
    if (pointer == nullptr || std::bit_cast<std::uintptr_t>(pointer) % 16 != 0) {
      return invalid(fmt::format("{}: address {} given, 16-byte aligned device memory allowed", name, pointer));
    }
  }
  return {};
}

}  // namespace

bool multiplies_codes(const Recipe& recipe) {
  // One exponent a token or for 32 of them: the quantizer's data, the same to the forward.
  const auto per_token = [](Operand operand) {
    if (operand.block == Block::tokens32()) operand.block = Block::token();
    return operand == Operand{Encoding::e4m3, Block::token(), ScaleRule::ceil, Rounding::nearest, SecondLevel::fixed};
  };
  const Operand weights{Encoding::e4m3, Block::tensor(), ScaleRule::ceil, Rounding::nearest, SecondLevel::fixed};
  return per_token(recipe.s.left) && per_token(recipe.s.right) && per_token(recipe.o.tokens) && !recipe.o.cut &&
         recipe.o.weights == weights && recipe.beta == 256 && recipe.row_sum == RowSum::quantized &&
         recipe.exponential == Exponential::exact;
}

Status supports(const Recipe& recipe) { return multiplies_codes(recipe) ? Status{} : embeds(recipe); }

Result<Sizes> check_call(const ForwardCall& call, const Recipe& recipe) {
  const Inputs& inputs = call.inputs;
  if (inputs.q.tokens() < 0 || inputs.k.tokens() < 0) {
    return invalid("tokens: a negative number given, 0 or more allowed");
  }
  // The offsets are on the device: here the rows of q and k count as one document.
  const Problem problem{Packing::single(inputs.q.tokens(), inputs.k.tokens()), call.documents.mask,
                        call.documents.scale};
  const Status checks[] = {check_arguments(problem, inputs, {}), check_recipe(recipe, inputs), supports(recipe),
                           check_counts(call), check_pointers(call)};
  for (const Status& status : checks) {
    if (!status.ok()) return status.error();
  }
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

}  // namespace mxflash::cuda
