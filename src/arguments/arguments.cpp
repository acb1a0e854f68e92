#include "arguments/arguments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cmath>

namespace mxflash {
namespace {

Status check_shape(std::string_view name, const TensorView& given, std::array<std::int64_t, 3> allowed,
                   std::string_view meaning) {
  if (given.shape == allowed) return {};
  return invalid(fmt::format("{}: shape [{}] given, [{}] allowed ({})", name, fmt::join(given.shape, ", "),
                             fmt::join(allowed, ", "), meaning));
}

Status check_type(std::string_view name, const TensorView& given, DType allowed) {
  if (!is_floating(given.dtype)) {
    return invalid(fmt::format("{}: type {} given, BF16, F16 or F32 allowed", name, name_of(given.dtype)));
  }
  if (given.dtype == allowed) return {};
  return invalid(fmt::format("{}: type {} given, {} allowed (q's)", name, name_of(given.dtype), name_of(allowed)));
}

Status check_dims(std::string_view name, std::int64_t dims) {
  if (dims >= kSmallestDim && dims <= kLargestDim && dims % 8 == 0) return {};
  return invalid(
      fmt::format("{}: {} given, a multiple of 8 from {} to {} allowed", name, dims, kSmallestDim, kLargestDim));
}

Status check_heads(const Inputs& inputs) {
  const std::int64_t heads = inputs.q.heads();
  const std::int64_t kv_heads = inputs.k.heads();
  if (heads > 0 && kv_heads > 0 && heads % kv_heads == 0) return {};
  return invalid(
      fmt::format("q: {} heads given with {} heads of k, a positive multiple of k's heads allowed", heads, kv_heads));
}

}  // namespace

Status check_arguments(const Problem& problem, const Inputs& inputs, const Options& options) {
  const TensorView& q = inputs.q;
  const TensorView& k = inputs.k;
  const TensorView& v = inputs.v;
  const Status checks[] = {
      check_type("q", q, q.dtype),
      check_type("k", k, q.dtype),
      check_type("v", v, q.dtype),
      check_heads(inputs),
      check_dims("head_dim", q.dims()),
      check_dims("value_dim", v.dims()),
      check_shape("q", q, {problem.packing.tokens_q(), q.heads(), q.dims()},
                  "[tokens of cu_seqlens_q, heads, head_dim]"),
      check_shape("k", k, {problem.packing.tokens_k(), k.heads(), q.dims()},
                  "[tokens of cu_seqlens_k, kv_heads, q's head_dim]"),
      check_shape("v", v, {problem.packing.tokens_k(), k.heads(), v.dims()},
                  "[tokens of cu_seqlens_k, k's heads, value_dim]"),
  };
  for (const Status& status : checks) {
    if (!status.ok()) return status;
  }
  if (problem.scale && !std::isfinite(*problem.scale)) {
    return invalid(fmt::format("scale: {} given, a finite number allowed", *problem.scale));
  }
  if (options.threads < 0 || options.threads > kLargestThreads) {
    return invalid(fmt::format("threads: {} given, 0 (one a core) to {} allowed", options.threads, kLargestThreads));
  }
  return {};
}

Status check_backward_arguments(const Problem& problem, const Inputs& inputs, const Options& options) {
  if (Status status = check_arguments(problem, inputs, options); !status.ok()) return status;
  if (!inputs.dout) return invalid("do: none given, the gradient of o [tokens_q, heads, value_dim] allowed");
  if (Status status = check_type("do", *inputs.dout, inputs.q.dtype); !status.ok()) return status;
  if (Status status = check_shape("do", *inputs.dout, {inputs.q.tokens(), inputs.q.heads(), inputs.v.dims()},
                                  "[q's tokens, q's heads, v's value_dim]");
      !status.ok() || !inputs.dlse) {
    return status;
  }
  if (inputs.dlse->dtype != DType::f32) {
    return invalid(fmt::format("dlse: type {} given, F32 allowed (lse's)", name_of(inputs.dlse->dtype)));
  }
  const auto& [tokens, heads, dims] = inputs.dlse->shape;
  if (tokens == inputs.q.tokens() && heads == inputs.q.heads() && dims == 1) return {};
  // Files and arrays have two dimensions.
  return invalid(fmt::format("dlse: shape [{}, {}{}] given, [{}, {}] allowed ([q's tokens, q's heads])", tokens, heads,
                             dims == 1 ? "" : fmt::format(", {}", dims), inputs.q.tokens(), inputs.q.heads()));
}

Status check_recipe(const Recipe& recipe, const Inputs& inputs) {
  if (Status status = validate(recipe); !status.ok()) return status;
  const auto dims = static_cast<std::uint64_t>(inputs.q.dims());
  if (recipe.hadamard == Hadamard::required && !std::has_single_bit(dims)) {
    return invalid(fmt::format("head_dim: {} given with recipe {}, whose Hadamard transform needs a power of two", dims,
                               recipe.name));
  }
  return {};
}

}  // namespace mxflash
