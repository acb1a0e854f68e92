#include "accuracy.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace mxflash::tool {

namespace {

template <class T>
double load_integer(const Tensor& tensor, std::int64_t index) {
  T value = 0;
  std::memcpy(&value, tensor.data.data() + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return static_cast<double>(value);
}

double element(const Tensor& tensor, std::int64_t index) {
  switch (tensor.dtype) {
    case DType::i32: return load_integer<std::int32_t>(tensor, index);
    case DType::i64: return load_integer<std::int64_t>(tensor, index);
    case DType::u8: return load_integer<std::uint8_t>(tensor, index);
    default: return tensor.at(index);
  }
}

std::vector<std::int64_t> place_of(std::int64_t index, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> place(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    place[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return place;
}

double cosine_of(double dot, double got_squares, double want_squares) {
  if (got_squares == 0 && want_squares == 0) return 1;
  if (got_squares == 0 || want_squares == 0) return 0;
  return dot / std::sqrt(got_squares * want_squares);
}

double relative_l2_of(double error_squares, double want_squares) {
  if (error_squares == 0) return 0;
  return want_squares == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(error_squares / want_squares);
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

Accuracy measure(const Tensor& got, const Tensor& want) {
  Accuracy result;
  double dot = 0;
  double got_squares = 0;
  double want_squares = 0;
  double error_squares = 0;
  std::int64_t worst = -1;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    const double a = element(got, i);
    const double b = element(want, i);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      if (same(a, b)) continue;
      if (++result.non_finite_mismatches == 1) worst = i;
      continue;
    }
    dot += a * b;
    got_squares += a * a;
    want_squares += b * b;
    const double error = std::fabs(a - b);
    error_squares += error * error;
    if (error > result.max_abs && result.non_finite_mismatches == 0) worst = i;
    result.max_abs = std::fmax(result.max_abs, error);
  }
  if (worst >= 0) {
    result.worst = place_of(worst, got.shape);
    result.got = element(got, worst);
    result.want = element(want, worst);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const bool finite = result.non_finite_mismatches == 0;
  if (finite) result.cosine = cosine_of(dot, got_squares, want_squares);
  result.relative_l2 = finite ? relative_l2_of(error_squares, want_squares) : nan;
  if (!finite) result.max_abs = nan;
  return result;
}

nlohmann::ordered_json accuracy_json(const Accuracy& accuracy) {
  nlohmann::ordered_json json = {
      {"cosine", accuracy.cosine ? nlohmann::ordered_json(*accuracy.cosine) : nlohmann::ordered_json()},
      {"relative_l2", accuracy.relative_l2},
      {"max_abs", accuracy.max_abs},
      {"non_finite_mismatches", accuracy.non_finite_mismatches},
      {"worst", nullptr}};
  if (!accuracy.worst.empty()) {
    json["worst"] = {{"index", accuracy.worst}, {"got", accuracy.got}, {"want", accuracy.want}};
  }
  return json;
}

}  // namespace mxflash::tool
