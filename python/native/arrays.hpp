// Arrays across the border: DLPack in without a copy, owned tensors out without one.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "mxflash/packing.hpp"
#include "mxflash/status.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash::python {

namespace nb = nanobind;

/// Any array of any framework, on any device; read only.
using Array = nb::ndarray<nb::ro>;

/// Throws ValueError for an invalid argument, RuntimeError for the rest, with the library's message.
[[noreturn]] void raise(const Error& error);
inline void check(const Status& status) {
  if (!status) raise(status.error());
}
template <class T>
T value_of(Result<T> result) {
  if (!result) raise(result.error());
  return std::move(result).value();
}

/// Where an array has to lie.
enum class Memory { host, cuda };

/// A view of [tokens, heads, dims] in the caller's memory. UINT16 stands for BF16 bits: numpy's arrays of ml_dtypes'
/// bfloat16 come as such, which DLPack cannot carry.
TensorView view_of(std::string_view name, const Array& array, Memory memory = Memory::host);
/// The same of a float32 array [tokens, heads], as [tokens, heads, 1].
TensorView rows_view_of(std::string_view name, const Array& array, Memory memory = Memory::host);
/// A contiguous copy of any rank.
Tensor copy_of(std::string_view name, const Array& array);

/// Offsets as the contract has them: int32, one-dimensional. None: one document over all tokens; for keys None means
/// the queries' offsets.
struct Offsets {
  std::optional<Array> q;
  std::optional<Array> k;
};
/// Type, shape and place are checked, the values are not: on a device they cannot be read here.
std::span<const std::int32_t> offsets_of(std::string_view name, const Array& array, Memory memory);
Packing packing_of(const Offsets& offsets, std::int64_t tokens_q, std::int64_t tokens_k);

/// Hands the tensor over: an array of numpy, whose BF16 goes as UINT16, or else a DLPack capsule.
nb::object give(Tensor tensor, bool numpy);

}  // namespace mxflash::python
