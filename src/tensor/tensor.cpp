#include "mxflash/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "mxflash/formats.hpp"

namespace mxflash {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::i64: return 8;
    case DType::u8: return 1;
  }
  return 0;
}

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

bool is_floating(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32; }

float load_element(const std::byte* bits, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, bits, sizeof value);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, bits, sizeof half);
  return dtype == DType::bf16 ? decode_bf16(half) : decode_f16(half);
}

void store_element(std::byte* bits, DType dtype, float value) {
  if (dtype == DType::f32) {
    std::memcpy(bits, &value, sizeof value);
    return;
  }
  const std::uint16_t half = dtype == DType::bf16 ? encode_bf16(value) : encode_f16(value);
  std::memcpy(bits, &half, sizeof half);
}

Tensor Tensor::zeros(DType dtype, std::vector<std::int64_t> shape) {
  Tensor tensor{dtype, std::move(shape), {}};
  tensor.data.resize(static_cast<std::size_t>(tensor.elements()) * size_of(dtype));
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
