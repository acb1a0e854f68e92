#include "arrays.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <vector>

namespace mxflash::python {

namespace {

constexpr std::string_view kFloats = "bfloat16, float16 or float32";

std::optional<DType> dtype_of(const Array& array) {
  const nb::dlpack::dtype type = array.dtype();
  if (type.lanes != 1) return std::nullopt;
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits;
  };
  using Code = nb::dlpack::dtype_code;
  if (is(Code::Bfloat, 16) || is(Code::UInt, 16)) return DType::bf16;
  if (is(Code::Float, 16)) return DType::f16;
  if (is(Code::Float, 32)) return DType::f32;
  if (is(Code::Int, 32)) return DType::i32;
  if (is(Code::Int, 64)) return DType::i64;
  if (is(Code::UInt, 8)) return DType::u8;
  return std::nullopt;
}

/// As "float64" or "int8", for messages.
std::string type_name(const Array& array) {
  const nb::dlpack::dtype type = array.dtype();
  using Code = nb::dlpack::dtype_code;
  switch (static_cast<Code>(type.code)) {
    case Code::Int: return fmt::format("int{}", type.bits);
    case Code::UInt: return fmt::format("uint{}", type.bits);
    case Code::Float: return fmt::format("float{}", type.bits);
    case Code::Bfloat: return fmt::format("bfloat{}", type.bits);
    case Code::Bool: return "bool";
    case Code::Complex: return fmt::format("complex{}", type.bits);
    default: return fmt::format("an 8-bit float (DLPack code {})", type.code);
  }
}

std::vector<std::int64_t> shape_of(const Array& array) { return {array.shape_ptr(), array.shape_ptr() + array.ndim()}; }

void check_memory(std::string_view name, const Array& array, Memory memory) {
  const int device = array.device_type();
  const bool cuda = device == nb::device::cuda::value;
  // Pinned host memory is host memory.
  const bool host = device == nb::device::cpu::value || device == nb::device::cuda_host::value;
  if (memory == Memory::host ? host : cuda) return;
  const std::string given = cuda ? "a CUDA device" : host ? "the host" : fmt::format("DLPack device {}", device);
  const std::string allowed = memory == Memory::cuda
                                  ? "a CUDA device's memory allowed"
                                  : "the host's memory allowed (mxflash.torch.attention takes CUDA's)";
  raise(unsupported(fmt::format("{}: an array on {} given, {}", name, given, allowed)));
}

}  // namespace

void raise(const Error& error) {
  if (error.kind == ErrorKind::invalid_argument) throw nb::value_error(error.message.c_str());
  throw std::runtime_error(error.message);
}

std::span<const std::int32_t> offsets_of(std::string_view name, const Array& array, Memory memory) {
  check_memory(name, array, memory);
  if (array.ndim() != 1) {
    raise(invalid(fmt::format("{}: shape [{}] given, one dimension [documents + 1] allowed", name,
                              fmt::join(shape_of(array), ", "))));
  }
  if (dtype_of(array) != DType::i32) {
    raise(invalid(fmt::format("{}: type {} given, int32 allowed", name, type_name(array))));
  }
  if (array.shape(0) > 1 && array.stride(0) != 1) {
    raise(invalid(fmt::format("{}: stride {} given, a contiguous array allowed", name, array.stride(0))));
  }
  return {static_cast<const std::int32_t*>(array.data()), array.shape(0)};
}

TensorView view_of(std::string_view name, const Array& array, Memory memory) {
  check_memory(name, array, memory);
  const std::optional<DType> dtype = dtype_of(array);
  if (!dtype || !is_floating(*dtype)) {
    raise(invalid(fmt::format("{}: type {} given, {} allowed", name, type_name(array), kFloats)));
  }
  if (array.ndim() != 3) {
    raise(invalid(fmt::format("{}: shape [{}] given, three dimensions [tokens, heads, head_dim] allowed", name,
                              fmt::join(shape_of(array), ", "))));
  }
  TensorView view;
  view.data = static_cast<const std::byte*>(array.data());
  view.dtype = *dtype;
  for (std::size_t i = 0; i < 3; ++i) {
    view.shape.at(i) = static_cast<std::int64_t>(array.shape(i));
    view.stride.at(i) = array.stride(i);
  }
  return view;
}

TensorView rows_view_of(std::string_view name, const Array& array, Memory memory) {
  check_memory(name, array, memory);
  if (dtype_of(array) != DType::f32) {
    raise(invalid(fmt::format("{}: type {} given, float32 allowed", name, type_name(array))));
  }
  if (array.ndim() != 2) {
    raise(invalid(fmt::format("{}: shape [{}] given, two dimensions [tokens, heads] allowed", name,
                              fmt::join(shape_of(array), ", "))));
  }
  const auto* data = static_cast<const std::byte*>(array.data());
  return {data,
          DType::f32,
          {static_cast<std::int64_t>(array.shape(0)), static_cast<std::int64_t>(array.shape(1)), 1},
          {array.stride(0), array.stride(1), 1}};
}

Tensor copy_of(std::string_view name, const Array& array) {
  check_memory(name, array, Memory::host);
  const std::optional<DType> dtype = dtype_of(array);
  if (!dtype) {
    raise(
        invalid(fmt::format("{}: type {} given, {}, int32, int64 or uint8 allowed", name, type_name(array), kFloats)));
  }
  Tensor tensor = Tensor::uninitialized(*dtype, shape_of(array));
  const auto bytes = size_of(*dtype);
  const auto* data = static_cast<const std::byte*>(array.data());
  std::vector<std::int64_t> index(array.ndim(), 0);
  std::int64_t offset = 0;
  for (std::byte* out = tensor.data.data(); out != tensor.data.data() + tensor.data.size(); out += bytes) {
    std::memcpy(out, data + offset * static_cast<std::int64_t>(bytes), bytes);
    for (std::size_t axis = index.size(); axis-- > 0;) {
      offset += array.stride(axis);
      if (++index[axis] < tensor.shape[axis]) break;
      offset -= tensor.shape[axis] * array.stride(axis);
      index[axis] = 0;
    }
  }
  return tensor;
}

Packing packing_of(const Offsets& offsets, std::int64_t tokens_q, std::int64_t tokens_k) {
  if (!offsets.q && offsets.k) {
    raise(invalid("cu_seqlens_k: given without cu_seqlens_q, both allowed or neither"));
  }
  if (!offsets.q) return Packing::single(tokens_q, tokens_k);
  const auto q = offsets_of(offsets.k ? "cu_seqlens_q" : "cu_seqlens", *offsets.q, Memory::host);
  const auto k = offsets.k ? offsets_of("cu_seqlens_k", *offsets.k, Memory::host) : q;
  return value_of(Packing::make(q, k, tokens_q, tokens_k));
}

nb::object give(Tensor tensor, bool numpy) {
  using Code = nb::dlpack::dtype_code;
  const auto type = [&]() -> nb::dlpack::dtype {
    switch (tensor.dtype) {
      case DType::bf16: return {static_cast<std::uint8_t>(numpy ? Code::UInt : Code::Bfloat), 16, 1};
      case DType::f16: return {static_cast<std::uint8_t>(Code::Float), 16, 1};
      case DType::f32: return {static_cast<std::uint8_t>(Code::Float), 32, 1};
      case DType::i32: return {static_cast<std::uint8_t>(Code::Int), 32, 1};
      case DType::i64: return {static_cast<std::uint8_t>(Code::Int), 64, 1};
      case DType::u8: return {static_cast<std::uint8_t>(Code::UInt), 8, 1};
    }
    return {};
  }();
  const std::vector<std::size_t> shape(tensor.shape.begin(), tensor.shape.end());
  auto owner = std::make_unique<Tensor>(std::move(tensor));
  void* data = owner->data.data();
  const nb::capsule capsule(owner.get(), [](void* owned) noexcept { delete static_cast<Tensor*>(owned); });
  [[maybe_unused]] const Tensor* held = owner.release();
  const auto array = [&]<class... Framework>(Framework...) {
    return nb::cast(
        nb::ndarray<Framework...>(data, shape.size(), shape.data(), capsule, nullptr, type, nb::device::cpu::value));
  };
  return numpy ? array(nb::numpy()) : array();
}

}  // namespace mxflash::python
