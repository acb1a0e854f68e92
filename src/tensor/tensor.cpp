#include "mxflash/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace mxflash {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return "BF16";
    case DType::f16: return "F16";
    case DType::f32: return "F32";
    case DType::i32: return "I32";
    case DType::i64: return "I64";
    case DType::u8: return "U8";
  }
  return "";
}

Tensor Tensor::uninitialized(DType dtype, std::vector<std::int64_t> shape) {
  Tensor tensor{dtype, std::move(shape), {}};
  tensor.data.resize(static_cast<std::size_t>(tensor.elements()) * size_of(dtype));
  return tensor;
}

Tensor Tensor::zeros(DType dtype, std::vector<std::int64_t> shape) {
  Tensor tensor = uninitialized(dtype, std::move(shape));
  std::ranges::fill(tensor.data, std::byte{0});
  return tensor;
}

Tensor Tensor::from_floats(DType dtype, std::vector<std::int64_t> shape, const std::vector<float>& values) {
  Tensor tensor = zeros(dtype, std::move(shape));
  for (std::size_t i = 0; i < values.size(); ++i) tensor.set(static_cast<std::int64_t>(i), values[i]);
  return tensor;
}

std::int64_t Tensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

Result<TensorView> Tensor::view(std::string_view argument) const {
  if (!is_floating(dtype)) {
    return invalid(fmt::format("{}: type {} given, BF16, F16 or F32 allowed", argument, name_of(dtype)));
  }
  if (shape.size() != 3) {
    return invalid(fmt::format("{}: shape [{}] given, three dimensions [tokens, heads, head_dim] allowed", argument,
                               fmt::join(shape, ", ")));
  }
  return TensorView{data.data(), dtype, {shape[0], shape[1], shape[2]}, {shape[1] * shape[2], shape[2], 1}};
}

}  // namespace mxflash
