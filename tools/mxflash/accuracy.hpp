// How far one tensor is from another, and where it is farthest.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "mxflash/tensor.hpp"

namespace mxflash::tool {

struct Accuracy {
  /// None where a NaN or Inf stands on one side only. Two zero tensors have cosine 1, a zero and another one 0.
  std::optional<double> cosine;
  double relative_l2 = 0;  ///< |got - want| / |want|; infinite where only `want` is zero.
  double max_abs = 0;      ///< Largest |got - want|.
  /// Elements that are NaN, Inf or -Inf on one side and something else on the other. Equal ones count as agreement.
  std::int64_t non_finite_mismatches = 0;
  std::vector<std::int64_t> worst;  ///< Of the first such mismatch, else of max_abs; empty where nothing differs.
  double got = 0;
  double want = 0;
};

/// Precondition: the shapes are equal.
Accuracy measure(const Tensor& got, const Tensor& want);

/// {cosine, relative_l2, max_abs, non_finite_mismatches, worst: {index, got, want}}; null for what is not finite.
nlohmann::ordered_json accuracy_json(const Accuracy& accuracy);

}  // namespace mxflash::tool
