// Dense tensors in host memory: views that carry strides, and owning contiguous arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "mxflash/formats.hpp"
#include "mxflash/status.hpp"

namespace mxflash {

enum class DType : std::uint8_t { bf16, f16, f32, i32, i64, u8 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
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
/// The safetensors name: "BF16", "F16", "F32", "I32", "I64", "U8".
std::string_view name_of(DType dtype);
/// Whether q, k, v and dO may have this type.
constexpr bool is_floating(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32; }

/// One BF16, FP16 or FP32 element widened to FP32 (exact); `bits` points at an element of any alignment.
inline float load_element(const std::byte* bits, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, bits, sizeof value);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, bits, sizeof half);
  return dtype == DType::bf16 ? decode_bf16(half) : decode_f16(half);
}

/// Rounds to nearest even into BF16, FP16 or FP32; overflow gives Inf, as IEEE conversion does.
inline void store_element(std::byte* bits, DType dtype, float value) {
  if (dtype == DType::f32) {
    std::memcpy(bits, &value, sizeof value);
    return;
  }
  const std::uint16_t half = dtype == DType::bf16 ? encode_bf16(value) : encode_f16(value);
  std::memcpy(bits, &half, sizeof half);
}

/// A [tokens, heads, dims] view. Strides are in elements and may be 0 or in any order; nothing needs to be aligned.
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> stride{};

  [[nodiscard]] std::int64_t tokens() const { return shape[0]; }
  [[nodiscard]] std::int64_t heads() const { return shape[1]; }
  [[nodiscard]] std::int64_t dims() const { return shape[2]; }
  [[nodiscard]] float at(std::int64_t token, std::int64_t head, std::int64_t dim) const {
    const std::int64_t offset = token * stride[0] + head * stride[1] + dim * stride[2];
    return load_element(data + offset * static_cast<std::int64_t>(size_of(dtype)), dtype);
  }
};

namespace detail {

/// Leaves new bytes as they are: whoever makes large outputs writes all of them, from many threads.
struct Uninitialized : std::allocator<std::byte> {
  template <class U>
  struct rebind {
    using other = Uninitialized;
  };
  static void construct(std::byte*) {}
  template <class... Arguments>
  static void construct(std::byte* place, Arguments&&... arguments) {
    std::construct_at(place, std::forward<Arguments>(arguments)...);
  }
};

}  // namespace detail

/// Bytes of a tensor; resize does not clear what it adds.
using Bytes = std::vector<std::byte, detail::Uninitialized>;

/// An owning, contiguous, row-major tensor of any rank.
struct Tensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  Bytes data;

  /// Of unspecified values, to be written whole.
  static Tensor uninitialized(DType dtype, std::vector<std::int64_t> shape);
  static Tensor zeros(DType dtype, std::vector<std::int64_t> shape);
  static Tensor from_floats(DType dtype, std::vector<std::int64_t> shape, const std::vector<float>& values);

  [[nodiscard]] std::int64_t elements() const;
  /// Precondition: the type is floating and 0 <= index < elements().
  [[nodiscard]] float at(std::int64_t index) const {
    return load_element(data.data() + index * static_cast<std::int64_t>(size_of(dtype)), dtype);
  }
  void set(std::int64_t index, float value) {
    store_element(data.data() + index * static_cast<std::int64_t>(size_of(dtype)), dtype, value);
  }
  /// A [tokens, heads, dims] view; refuses other ranks and non-floating types, naming `argument`.
  [[nodiscard]] Result<TensorView> view(std::string_view argument) const;
};

}  // namespace mxflash
