#include "reference/operands.hpp"

#include <cmath>
#include <optional>

namespace mxflash::reference {
namespace {

/// Quantizes each distinct (tensor, operand, stream) once.
class OperandCache {
 public:
  OperandCache(const Problem& problem, const Options& options) : problem_(problem), options_(options) {}

  QuantizedPtr get(const TensorView& tensor, QuantizeOptions request) {
    if (request.operand.rounding == Rounding::nearest) request.stream = 0;
    request.seed = options_.seed;
    for (const Entry& entry : entries_) {
      if (entry.tensor == &tensor && entry.request.operand == request.operand &&
          entry.request.stream == request.stream) {
        return entry.quantized;
      }
    }
    Result<Quantized> result = quantize(tensor, problem_.packing, request, options_.threads);
    if (!result.ok()) {
      if (!error_) error_ = result.error();
      return nullptr;
    }
    entries_.push_back({&tensor, request, std::make_shared<const Quantized>(std::move(result).value())});
    return entries_.back().quantized;
  }

  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

 private:
  struct Entry {
    const TensorView* tensor = nullptr;
    QuantizeOptions request;
    QuantizedPtr quantized;
  };

  const Problem& problem_;
  const Options& options_;
  std::vector<Entry> entries_;
  std::optional<Error> error_;
};

QuantizeOptions request(const Operand& operand, Side side, bool hadamard, Stream stream) {
  return {operand, side, hadamard, 0, static_cast<std::uint64_t>(stream)};
}

}  // namespace

void unrotate(const Rotation& rotation, std::int64_t dims, double* row) {
  if (!rotation.on) return;
  for (std::int64_t half = 1; half < dims; half *= 2) {
    for (std::int64_t start = 0; start < dims; start += 2 * half) {
      for (std::int64_t d = start; d < start + half; ++d) {
        const double low = row[d];
        const double high = row[d + half];
        row[d] = low + high;
        row[d + half] = low - high;
      }
    }
  }
  for (std::int64_t d = 0; d < dims; ++d) row[d] = std::ldexp(row[d], -rotation.shift);
}

Result<Operands> quantize_operands(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                   const Options& options, bool with_backward) {
  const bool rotated = rotation_of(recipe, inputs.q.dims()).on;
  OperandCache cache(problem, options);
  Operands operands;
  operands.q_s = cache.get(inputs.q, request(recipe.s.left, Side::query, rotated, Stream::none));
  operands.k_s = cache.get(inputs.k, request(recipe.s.right, Side::key, rotated, Stream::none));
  operands.v_o = cache.get(inputs.v, request(recipe.o.tokens, Side::key, false, Stream::none));
  const Operand v_cut = recipe.o.cut ? recipe.o.cut->tokens : recipe.o.tokens;
  operands.v_o_cut = cache.get(inputs.v, request(v_cut, Side::key, false, Stream::none));
  if (with_backward) {
    operands.dout_dp = cache.get(*inputs.dout, request(recipe.dp.left, Side::query, false, Stream::dout_dp));
    operands.v_dp = cache.get(inputs.v, request(recipe.dp.right, Side::key, false, Stream::v_dp));
    operands.dout_dv = cache.get(*inputs.dout, request(recipe.dv.tokens, Side::query, false, Stream::dout_dv));
    operands.k_dq = cache.get(inputs.k, request(recipe.dq.tokens, Side::key, rotated, Stream::k_dq));
    const Operand k_cut = recipe.dq.cut ? recipe.dq.cut->tokens : recipe.dq.tokens;
    operands.k_dq_cut = cache.get(inputs.k, request(k_cut, Side::key, rotated, Stream::k_dq));
    operands.q_dk = cache.get(inputs.q, request(recipe.dk.tokens, Side::query, rotated, Stream::q_dk));
  }
  if (cache.error()) return *cache.error();
  return operands;
}

ForwardRows forward_rows(const Operands& operands, const Recipe& recipe, const Document& document, std::int64_t head,
                         std::int64_t kv_head) {
  ForwardRows rows;
  rows.q = dequantized_rows(*operands.q_s, document, Side::query, head);
  rows.keys = document.k_length;
  rows.k_transposed = transposed(dequantized_rows(*operands.k_s, document, Side::key, kv_head));
  rows.v = folding_rows(*operands.v_o, recipe.o.tokens.folds(), document, Side::key, kv_head);
  if (recipe.o.cut) {
    rows.v_cut = folding_rows(*operands.v_o_cut, recipe.o.cut->tokens.folds(), document, Side::key, kv_head);
  }
  return rows;
}

}  // namespace mxflash::reference
