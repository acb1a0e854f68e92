#include "mxflash/quantize.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "quantize/scales.hpp"
#include "threading/parallel.hpp"

namespace mxflash {
namespace {

/// The rows of one document and head, widened and, if asked, rotated.
struct Rows {
  std::int64_t count = 0;
  std::int64_t dims = 0;
  std::vector<float> values;
  std::vector<std::uint8_t> poisoned;

  [[nodiscard]] float at(std::int64_t row, std::int64_t dim) const {
    return values[static_cast<std::size_t>(row * dims + dim)];
  }
};

/// In place, in FP32, stages of rising distance: additions alone, in a fixed order, so every engine gets the same bits.
/// The power of two comes first, so that finite rows cannot overflow before they are small.
void hadamard_row(float* row, std::int64_t dims) {
  const int log2_dims = std::countr_zero(static_cast<std::uint64_t>(dims));
  const float factor = detail::pow2(-((log2_dims + 1) / 2));
  for (std::int64_t d = 0; d < dims; ++d) row[d] *= factor;
  for (std::int64_t half = 1; half < dims; half *= 2) {
    for (std::int64_t start = 0; start < dims; start += 2 * half) {
      for (std::int64_t d = start; d < start + half; ++d) {
        const float low = row[d];
        const float high = row[d + half];
        row[d] = low + high;
        row[d + half] = low - high;
      }
    }
  }
}

struct Span {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

Span span_of(const Document& document, Side side) {
  return side == Side::query ? Span{document.q_begin, document.q_length} : Span{document.k_begin, document.k_length};
}

Rows load_rows(const TensorView& tensor, Span span, std::int64_t head, bool hadamard) {
  Rows rows{span.length, tensor.dims(), {}, {}};
  rows.values.resize(static_cast<std::size_t>(rows.count * rows.dims));
  rows.poisoned.resize(static_cast<std::size_t>(rows.count));
  for (std::int64_t row = 0; row < rows.count; ++row) {
    float* values = rows.values.data() + row * rows.dims;
    for (std::int64_t d = 0; d < rows.dims; ++d) values[d] = tensor.at(span.begin + row, head, d);
    if (hadamard) hadamard_row(values, rows.dims);
    const bool finite = std::all_of(values, values + rows.dims, [](float x) { return std::isfinite(x); });
    if (!finite) {
      rows.poisoned[static_cast<std::size_t>(row)] = 1;
      std::fill(values, values + rows.dims, 0.0F);  // the NaN rides in the exponent
    }
  }
  return rows;
}

/// Half-open ranges of one block.
struct Extent {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t column_begin = 0;
  std::int64_t column_end = 0;
};

float maximum_of(const Rows& rows, const Extent& extent) {
  float maximum = 0;
  for (std::int64_t r = extent.row_begin; r < extent.row_end; ++r) {
    for (std::int64_t c = extent.column_begin; c < extent.column_end; ++c) {
      maximum = std::max(maximum, std::fabs(rows.at(r, c)));
    }
  }
  return maximum;
}

bool all_poisoned(const Rows& rows, const Extent& extent) {
  return std::all_of(rows.poisoned.begin() + extent.row_begin, rows.poisoned.begin() + extent.row_end,
                     [](std::uint8_t flag) { return flag != 0; });
}

/// Where the parts of one document and head lie in the Quantized arrays.
class Writer {
 public:
  Writer(Quantized& out, const QuantizeOptions& options, Span span, std::int64_t head, std::int64_t scale_row)
      : out_(out), options_(options), span_(span), head_(head), scale_row_(scale_row) {}

  void unquantized(const Rows& rows) const {
    for (std::int64_t r = 0; r < rows.count; ++r) {
      for (std::int64_t d = 0; d < rows.dims; ++d) {
        const float value = rows.at(r, d);
        out_.values[element(r, d)] =
            options_.operand.encoding == Encoding::bf16 ? decode_bf16(encode_bf16(value)) : value;
      }
    }
  }

  void tensor_wide(const Rows& rows) const {
    const Format format = *element_format(options_.operand.encoding);
    for (std::int64_t r = 0; r < rows.count; ++r) {
      for (std::int64_t d = 0; d < rows.dims; ++d) {
        const std::uint8_t code = encode(format, rows.at(r, d) / out_.tensor_scale);
        out_.codes[element(r, d)] = code;
        out_.values[element(r, d)] = decode(format, code) * out_.tensor_scale;
      }
    }
  }

  void blocks(Rows& rows) const {
    second_level(rows);
    const Operand& operand = options_.operand;
    const std::int64_t height = operand.block.rows;
    const std::int64_t width = operand.block.columns == 0 ? rows.dims : operand.block.columns;
    for (std::int64_t r = 0; r < rows.count; r += height) {
      for (std::int64_t c = 0; c < rows.dims; c += width) {
        block(rows, {r, std::min(r + height, rows.count), c, std::min(c + width, rows.dims)}, r / height, c / width);
      }
    }
  }

 private:
  [[nodiscard]] std::size_t element(std::int64_t row, std::int64_t dim) const {
    return static_cast<std::size_t>(((span_.begin + row) * out_.shape[1] + head_) * out_.shape[2] + dim);
  }
  [[nodiscard]] std::size_t token(std::int64_t row) const {
    return static_cast<std::size_t>((span_.begin + row) * out_.shape[1] + head_);
  }

  /// Divides the rows by nvfp4's adaptive second level, which goes into the exponents.
  void second_level(Rows& rows) const {
    if (options_.operand.second_level != SecondLevel::adaptive) return;
    const std::int64_t height = options_.operand.block.rows == 1 ? 1 : kSecondLevelRows;
    for (std::int64_t begin = 0; begin < rows.count; begin += height) {
      const Extent extent{begin, std::min(begin + height, rows.count), 0, rows.dims};
      const int exponent = second_level_exponent(maximum_of(rows, extent));
      for (std::int64_t r = extent.row_begin; r < extent.row_end; ++r) {
        out_.exponents[token(r)] = exponent;
        for (std::int64_t d = 0; d < rows.dims; ++d) {
          rows.values[static_cast<std::size_t>(r * rows.dims + d)] *= detail::pow2(-exponent);
        }
      }
    }
  }

  void block(const Rows& rows, const Extent& extent, std::int64_t scale_row, std::int64_t scale_column) const {
    const Operand& operand = options_.operand;
    const Format format = *element_format(operand.encoding);
    const BlockScale scale = block_scale(operand, maximum_of(rows, extent));
    const std::uint8_t nan_code = operand.encoding == Encoding::nvfp4 ? std::uint8_t{0x7F} : kE8m0Nan;
    const std::int64_t place = ((scale_row_ + scale_row) * out_.shape[1] + head_) * out_.scale_shape[2] + scale_column;
    out_.scales[static_cast<std::size_t>(place)] = all_poisoned(rows, extent) ? nan_code : scale.code;
    const float factor = operand.folds() ? 1.0F : scale_value(operand, scale);
    for (std::int64_t r = extent.row_begin; r < extent.row_end; ++r) {
      if (operand.folds()) out_.exponents[token(r)] = scale.exponent;
      for (std::int64_t c = extent.column_begin; c < extent.column_end; ++c) {
        const std::uint32_t random =
            operand.rounding == Rounding::stochastic ? element_random(options_.seed, options_.stream, head_, r, c) : 0;
        const std::uint8_t code = encode_element(operand, scale, rows.at(r, c), random);
        out_.codes[element(r, c)] = code;
        out_.values[element(r, c)] = decode(format, code) * factor;
      }
    }
  }

  Quantized& out_;
  const QuantizeOptions& options_;
  Span span_;
  std::int64_t head_;
  std::int64_t scale_row_;
};

/// Anything else has no meaning, and a size of 0 or below would never end.
constexpr Block kBlocks[] = {Block::token(),     Block::tokens32(),  Block::dims16(),   Block::dims32(),
                             Block::channel16(), Block::channel32(), Block::square32(), Block::tensor()};

Status check(const TensorView& tensor, const Packing& packing, const QuantizeOptions& options) {
  const Operand& operand = options.operand;
  const std::int64_t tokens = options.side == Side::query ? packing.tokens_q() : packing.tokens_k();
  if (tensor.tokens() != tokens) {
    return invalid(fmt::format("tensor: {} tokens given, {} allowed (the packing's)", tensor.tokens(), tokens));
  }
  if (tensor.dims() < 1) return invalid(fmt::format("tensor: {} dims given, 1 or more allowed", tensor.dims()));
  if (options.hadamard && !std::has_single_bit(static_cast<std::uint64_t>(tensor.dims()))) {
    return invalid(fmt::format("hadamard: {} dims given, a power of two allowed", tensor.dims()));
  }
  if (!operand.quantized()) return {};
  if (std::ranges::find(kBlocks, operand.block) == std::end(kBlocks)) {
    return invalid(fmt::format("block: {} given, one of the named blocks allowed", to_string(operand.block)));
  }
  const bool sixteen = operand.block == Block::dims16() || operand.block == Block::channel16();
  if (sixteen != (operand.encoding == Encoding::nvfp4)) {
    return invalid(
        fmt::format("block: {} with format {} given, nvfp4 with dims:16 or channel:16, others without, allowed",
                    to_string(operand.block), to_string(operand.encoding)));
  }
  if (operand.rule == ScaleRule::uos && operand.encoding != Encoding::e2m1) {
    return invalid(
        fmt::format("scale_rule: uos with format {} given, uos with e2m1 allowed", to_string(operand.encoding)));
  }
  if (operand.second_level == SecondLevel::adaptive && operand.encoding != Encoding::nvfp4) {
    return invalid(fmt::format("second_level: adaptive with format {} given, adaptive with nvfp4 allowed",
                               to_string(operand.encoding)));
  }
  if (operand.rounding == Rounding::stochastic && operand.block == Block::tensor()) {
    return invalid("rounding: stochastic with block tensor given, nearest allowed");
  }
  return {};
}

float tensor_maximum(const TensorView& tensor, const Packing& packing, const QuantizeOptions& options) {
  float maximum = 0;
  for (const Document& document : packing.documents()) {
    for (std::int64_t head = 0; head < tensor.heads(); ++head) {
      const Rows rows = load_rows(tensor, span_of(document, options.side), head, options.hadamard);
      maximum = std::max(maximum, maximum_of(rows, {0, rows.count, 0, rows.dims}));
    }
  }
  return maximum;
}

}  // namespace

float Quantized::dequantized(std::int64_t token, std::int64_t head, std::int64_t dim) const {
  const auto row = static_cast<std::size_t>(token * shape[1] + head);
  if (poisoned[row] != 0) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(values[row * static_cast<std::size_t>(shape[2]) + static_cast<std::size_t>(dim)], exponents[row]);
}

Result<Quantized> quantize(const TensorView& tensor, const Packing& packing, const QuantizeOptions& options,
                           int threads) {
  if (Status status = check(tensor, packing, options); !status.ok()) return status.error();
  const Operand& operand = options.operand;
  const bool tensor_wide = operand.quantized() && operand.block == Block::tensor();
  const bool blocked = operand.quantized() && !tensor_wide;
  const auto rows = static_cast<std::size_t>(tensor.tokens() * tensor.heads());

  Quantized out;
  out.shape = {tensor.tokens(), tensor.heads(), tensor.dims()};
  out.values.resize(rows * static_cast<std::size_t>(tensor.dims()));
  out.exponents.resize(rows);
  out.poisoned.resize(rows);
  if (operand.quantized()) out.codes.resize(out.values.size());

  std::vector<std::int64_t> scale_rows{0};
  for (const Document& document : packing.documents()) {
    const std::int64_t height = blocked ? operand.block.rows : 1;
    scale_rows.push_back(scale_rows.back() + (span_of(document, options.side).length + height - 1) / height);
  }
  if (blocked) {
    const std::int64_t width = operand.block.columns == 0 ? tensor.dims() : operand.block.columns;
    out.scale_shape = {scale_rows.back(), tensor.heads(), (tensor.dims() + width - 1) / width};
    out.scales.resize(static_cast<std::size_t>(out.scale_shape[0] * out.scale_shape[1] * out.scale_shape[2]));
  }
  if (tensor_wide) {
    const float scale = tensor_maximum(tensor, packing, options) / spec_of(*element_format(operand.encoding)).max;
    out.tensor_scale = scale >= std::numeric_limits<float>::min() ? scale : 1.0F;
  }

  const auto documents = static_cast<std::int64_t>(packing.documents().size());
  parallel_for(documents * tensor.heads(), threads, [&](std::int64_t item) {
    const auto document = static_cast<std::size_t>(item / tensor.heads());
    const std::int64_t head = item % tensor.heads();
    const Span span = span_of(packing.documents()[document], options.side);
    Rows loaded = load_rows(tensor, span, head, options.hadamard);
    for (std::int64_t r = 0; r < span.length; ++r) {
      out.poisoned[static_cast<std::size_t>((span.begin + r) * tensor.heads() + head)] =
          loaded.poisoned[static_cast<std::size_t>(r)];
    }
    const Writer writer(out, options, span, head, scale_rows[document]);
    if (blocked) {
      writer.blocks(loaded);
    } else if (tensor_wide) {
      writer.tensor_wide(loaded);
    } else {
      writer.unquantized(loaded);
    }
  });
  return out;
}

}  // namespace mxflash
