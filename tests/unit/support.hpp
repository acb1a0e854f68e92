// What the unit tests share: random tensors, packings, odd views of a tensor, and comparisons of every element that
// print the worst place.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mxflash/formats.hpp"
#include "mxflash/packing.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash::test {

enum class Distribution {
  normal,    ///< Close to N(0, 1).
  outliers,  ///< The same, dim 3 of every row 32 times larger.
  wide,      ///< The same, each element times a power of two from 2^-10 to 2^10, every 17th zero.
  integers,  ///< -8 .. 8.
};

/// Uniform in [0, 1).
inline double uniform(std::uint64_t seed, std::uint64_t stream, std::int64_t index) {
  return std::ldexp(static_cast<double>(random_bits(seed, stream, static_cast<std::uint64_t>(index))), -32);
}

/// A sum of uniforms: no library's logarithm in it, so the same numbers everywhere.
inline double normal(std::uint64_t seed, std::int64_t index) {
  double sum = 0;
  for (std::uint64_t stream = 100; stream < 112; ++stream) sum += uniform(seed, stream, index);
  return sum - 6.0;
}

inline float random_value(Distribution distribution, std::uint64_t seed, std::int64_t index, std::int64_t dims) {
  const double value = normal(seed, index);
  switch (distribution) {
    case Distribution::normal: return static_cast<float>(value);
    case Distribution::outliers: return static_cast<float>(index % dims == 3 ? 32 * value : value);
    case Distribution::wide:
      if (index % 17 == 5) return 0;
      return static_cast<float>(std::ldexp(value, static_cast<int>(uniform(seed, 1, index) * 21) - 10));
    case Distribution::integers: return static_cast<float>(static_cast<int>(uniform(seed, 1, index) * 17) - 8);
  }
  return 0;
}

inline Tensor random_tensor(DType dtype, std::vector<std::int64_t> shape, Distribution distribution,
                            std::uint64_t seed) {
  Tensor tensor = Tensor::zeros(dtype, std::move(shape));
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    tensor.set(i, random_value(distribution, seed, i, tensor.shape.back()));
  }
  return tensor;
}

inline Tensor constant_tensor(DType dtype, std::vector<std::int64_t> shape, float value) {
  Tensor tensor = Tensor::zeros(dtype, std::move(shape));
  for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, value);
  return tensor;
}

inline TensorView view(const Tensor& tensor) {
  const Result<TensorView> result = tensor.view("tensor");
  EXPECT_TRUE(result.ok());
  return result.ok() ? *result : TensorView{};
}

/// Sets every element of one row [token, head] of a [tokens, heads, dims] tensor.
inline void set_row(Tensor& tensor, std::int64_t token, std::int64_t head, float value) {
  for (std::int64_t d = 0; d < tensor.shape[2]; ++d) {
    tensor.set((token * tensor.shape[1] + head) * tensor.shape[2] + d, value);
  }
}

/// Multiplies every element.
inline Tensor scaled(Tensor tensor, float factor) {
  for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, tensor.at(i) * factor);
  return tensor;
}

/// Rows [begin, end) along the first dimension, as a tensor of their own.
inline Tensor rows_of(const Tensor& tensor, std::int64_t begin, std::int64_t end) {
  Tensor part{tensor.dtype, tensor.shape, {}};
  part.shape[0] = end - begin;
  const auto row = tensor.shape[0] == 0 ? 0 : static_cast<std::ptrdiff_t>(tensor.data.size()) / tensor.shape[0];
  part.data.assign(tensor.data.begin() + begin * row, tensor.data.begin() + end * row);
  return part;
}

/// Queries and keys of one document.
struct Lengths {
  std::int32_t q = 0;
  std::int32_t k = 0;
};

inline Packing pack(const std::vector<Lengths>& lengths) {
  std::vector<std::int32_t> q = {0};
  std::vector<std::int32_t> k = {0};
  for (const Lengths& document : lengths) {
    q.push_back(q.back() + document.q);
    k.push_back(k.back() + document.k);
  }
  Result<Packing> packing = Packing::make(q, k, q.back(), k.back());
  EXPECT_TRUE(packing.ok());
  return *std::move(packing);
}

/// As many queries as keys.
inline Packing pack_self(const std::vector<std::int32_t>& lengths) {
  std::vector<Lengths> both;
  both.reserve(lengths.size());
  for (const std::int32_t length : lengths) both.push_back({length, length});
  return pack(both);
}

/// A copy with given strides and a base offset, both in elements; gaps hold NaN.
class StridedCopy {
 public:
  StridedCopy(const Tensor& tensor, std::array<std::int64_t, 3> stride, std::int64_t offset)
      : view_{nullptr, tensor.dtype, {tensor.shape[0], tensor.shape[1], tensor.shape[2]}, stride} {
    std::int64_t size = offset + 1;
    for (std::size_t i = 0; i < 3; ++i) size += std::max<std::int64_t>(view_.shape[i] - 1, 0) * stride[i];
    const auto width = static_cast<std::int64_t>(size_of(tensor.dtype));
    // One byte more in front: no element is aligned.
    data_.resize(static_cast<std::size_t>(size * width + 1));
    std::byte* base = data_.data() + 1;
    for (std::int64_t i = 0; i < size; ++i) store_element(base + i * width, tensor.dtype, std::nanf(""));
    view_.data = base + offset * width;
    std::int64_t index = 0;
    for (std::int64_t t = 0; t < view_.shape[0]; ++t) {
      for (std::int64_t h = 0; h < view_.shape[1]; ++h) {
        for (std::int64_t d = 0; d < view_.shape[2]; ++d) {
          const std::int64_t place = offset + t * stride[0] + h * stride[1] + d * stride[2];
          store_element(base + place * width, tensor.dtype, tensor.at(index++));
        }
      }
    }
  }

  [[nodiscard]] const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  std::vector<std::byte> data_;
};

/// "[12, 0, 5]" of a flat index.
inline std::string place_of(const Tensor& tensor, std::int64_t index) {
  std::string text;
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    text = fmt::format("{}{}{}", index % tensor.shape[i], text.empty() ? "" : ", ", text);
    index /= tensor.shape[i];
  }
  return "[" + text + "]";
}

inline std::uint64_t element_bits(const Tensor& tensor, std::int64_t index) {
  std::uint64_t bits = 0;
  const std::size_t width = size_of(tensor.dtype);
  std::memcpy(&bits, tensor.data.data() + static_cast<std::size_t>(index) * width, width);
  return bits;
}

/// Bit for bit, with the number of elements that differ and the place of the largest difference.
inline testing::AssertionResult same_bits(const Tensor& got, const Tensor& want) {
  if (got.dtype != want.dtype || got.shape != want.shape) return testing::AssertionFailure() << "other type or shape";
  if (got.data == want.data) return testing::AssertionSuccess();
  std::int64_t different = 0;
  std::int64_t worst = -1;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    if (element_bits(got, i) == element_bits(want, i)) continue;
    ++different;
    const auto distance = [&](std::int64_t at) { return std::fabs(got.at(at) - want.at(at)); };
    if (worst < 0 || distance(i) > distance(worst)) worst = i;
  }
  if (worst < 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fmt::format("{} of {} elements differ, worst at {}: {} instead of {}",
                                                    different, got.elements(), place_of(got, worst), got.at(worst),
                                                    want.at(worst));
}

/// |got - want| <= bound(index) everywhere; NaN only where `want` is NaN, Inf only where it is the same Inf.
inline testing::AssertionResult within(const Tensor& got, const Tensor& want,
                                       const std::function<double(std::int64_t)>& bound) {
  if (got.shape != want.shape) return testing::AssertionFailure() << "other shape";
  std::int64_t outside = 0;
  std::int64_t worst = -1;
  double worst_excess = -1;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    const auto a = static_cast<double>(got.at(i));
    const auto b = static_cast<double>(want.at(i));
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    const double limit = bound(i);
    const double error = std::fabs(a - b);
    if (error <= limit) continue;
    ++outside;
    const double excess = std::isfinite(error) ? error / std::max(limit, 1e-300) : INFINITY;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (worst < 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fmt::format(
             "{} of {} elements outside, worst at {}: {} instead of {}, {} allowed", outside, got.elements(),
             place_of(got, worst), got.at(worst), want.at(worst), bound(worst));
}

inline testing::AssertionResult within(const Tensor& got, const Tensor& want, double bound) {
  return within(got, want, [bound](std::int64_t) { return bound; });
}

/// The largest finite magnitude.
inline double largest(const Tensor& tensor) {
  double value = 0;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    if (std::isfinite(tensor.at(i))) value = std::max(value, std::fabs(static_cast<double>(tensor.at(i))));
  }
  return value;
}

/// ||got - want|| / ||want|| over the elements whose `want` is finite; ||got - want|| where all of those are zero.
inline double relative_l2(const Tensor& got, const Tensor& want) {
  double error = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    if (!std::isfinite(want.at(i))) continue;
    error += std::pow(static_cast<double>(got.at(i)) - static_cast<double>(want.at(i)), 2);
    norm += std::pow(static_cast<double>(want.at(i)), 2);
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

/// Whether an error's message holds every word.
template <class T>
testing::AssertionResult refused_with(const T& result, const std::vector<std::string>& words) {
  if (result.ok()) return testing::AssertionFailure() << "accepted";
  const std::string& message = result.error().message;
  if (message.find('\n') != std::string::npos) return testing::AssertionFailure() << "more than a line: " << message;
  for (const std::string& word : words) {
    if (message.find(word) == std::string::npos) {
      return testing::AssertionFailure() << "no \"" << word << "\" in: " << message;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace mxflash::test
