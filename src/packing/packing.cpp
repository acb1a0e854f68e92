#include "mxflash/packing.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace mxflash {
namespace {

/// One side of a packing, as the caller named it.
struct Offsets {
  std::string_view name;
  std::span<const std::int32_t> values;
  std::string_view tensor;
  std::int64_t rows = 0;
};

Status check_offsets(const Offsets& offsets) {
  const auto [name, values, tensor, rows] = offsets;
  if (rows < 0 || rows > INT32_MAX) {
    return invalid(fmt::format("{}: {} rows given, 0 to {} allowed", tensor, rows, INT32_MAX));
  }
  if (values.empty()) {
    return invalid(fmt::format("{}: 0 entries given, one more than the number of documents allowed", name));
  }
  if (values.front() != 0) return invalid(fmt::format("{}: starts at {}, 0 allowed", name, values.front()));
  const auto fall = std::ranges::adjacent_find(values, std::greater<>());
  if (fall != values.end()) {
    return invalid(fmt::format("{}: decreases from {} to {} at index {}, non-decreasing offsets allowed", name, *fall,
                               *(fall + 1), fall + 1 - values.begin()));
  }
  if (values.back() != rows) {
    return invalid(fmt::format("{}: ends at {} but {} has {} rows, an end equal to the rows allowed", name,
                               values.back(), tensor, rows));
  }
  return {};
}

Result<std::vector<std::int32_t>> to_offsets(const Tensor& tensor, std::string_view name) {
  if (tensor.dtype != DType::i32) {
    return invalid(fmt::format("{}: type {} given, I32 allowed", name, name_of(tensor.dtype)));
  }
  if (tensor.shape.size() != 1) {
    return invalid(fmt::format("{}: shape [{}] given, one dimension [documents + 1] allowed", name,
                               fmt::join(tensor.shape, ", ")));
  }
  std::vector<std::int32_t> values(tensor.data.size() / sizeof(std::int32_t));
  if (tensor.shape[0] != static_cast<std::int64_t>(values.size()) || tensor.data.size() % sizeof(std::int32_t) != 0) {
    return invalid(fmt::format("{}: {} bytes given for shape [{}] of I32, 4 an entry allowed", name, tensor.data.size(),
                               tensor.shape[0]));
  }
  if (!values.empty()) std::memcpy(values.data(), tensor.data.data(), values.size() * sizeof(std::int32_t));
  return values;
}

/// A mask bound beyond the reach of the document means the same as one just beyond it; clamped, sums cannot overflow.
std::int64_t clamp_bound(const Document& document, std::int64_t bound) {
  const std::int64_t reach = document.q_length + document.k_length;
  return bound >= Mask::unbounded ? reach : std::clamp(bound, -reach, reach);
}

KeyRange clamp_range(std::int64_t begin, std::int64_t end, std::int64_t length) {
  // An inverted band is empty, and clamping `end` by `begin` keeps both monotonic.
  const std::int64_t clamped = std::clamp<std::int64_t>(begin, 0, length);
  return {clamped, std::clamp(end, clamped, length)};
}

/// Sum over queries i of clamp(i + first, 0, k_length): pairs (i, j) with j < i + first.
std::int64_t pairs_below(const Document& document, std::int64_t first) {
  const std::int64_t keys = document.k_length;
  const std::int64_t start = std::clamp(first, -document.q_length, keys);
  // Sum of clamp(t, 0, keys) over t <= last. With lengths of 32 bits it stays below 2^63.
  const auto sum_to = [keys](std::int64_t last) {
    if (last <= 0) return std::int64_t{0};
    if (last <= keys) return last * (last + 1) / 2;
    return keys * (keys + 1) / 2 + (last - keys) * keys;
  };
  return sum_to(start + document.q_length - 1) - sum_to(start - 1);
}

}  // namespace

Result<Packing> Packing::make(std::span<const std::int32_t> cu_seqlens_q, std::span<const std::int32_t> cu_seqlens_k,
                              std::int64_t tokens_q, std::int64_t tokens_k) {
  if (Status status = check_offsets({"cu_seqlens_q", cu_seqlens_q, "q", tokens_q}); !status) return status.error();
  if (Status status = check_offsets({"cu_seqlens_k", cu_seqlens_k, "k", tokens_k}); !status) return status.error();
  if (cu_seqlens_q.size() != cu_seqlens_k.size()) {
    return invalid(fmt::format("cu_seqlens_k: {} entries ({} documents), cu_seqlens_q has {} ({} documents)",
                               cu_seqlens_k.size(), cu_seqlens_k.size() - 1, cu_seqlens_q.size(),
                               cu_seqlens_q.size() - 1));
  }
  Packing packing;
  packing.tokens_q_ = tokens_q;
  packing.tokens_k_ = tokens_k;
  packing.documents_.reserve(cu_seqlens_q.size() - 1);
  for (std::size_t i = 0; i + 1 < cu_seqlens_q.size(); ++i) {
    packing.documents_.push_back({cu_seqlens_q[i], cu_seqlens_q[i + 1] - cu_seqlens_q[i], cu_seqlens_k[i],
                                  cu_seqlens_k[i + 1] - cu_seqlens_k[i]});
  }
  return packing;
}

Result<Packing> Packing::from_tensors(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, std::int64_t tokens_q,
                                      std::int64_t tokens_k) {
  const Result<std::vector<std::int32_t>> q = to_offsets(cu_seqlens_q, "cu_seqlens_q");
  if (!q) return q.error();
  const Result<std::vector<std::int32_t>> k = to_offsets(cu_seqlens_k, "cu_seqlens_k");
  if (!k) return k.error();
  return make(*q, *k, tokens_q, tokens_k);
}

Packing Packing::single(std::int64_t tokens_q, std::int64_t tokens_k) {
  Packing packing;
  packing.documents_ = {{0, tokens_q, 0, tokens_k}};
  packing.tokens_q_ = tokens_q;
  packing.tokens_k_ = tokens_k;
  return packing;
}

KeyRange visible_keys(const Document& document, const Mask& mask, std::int64_t query) {
  const std::int64_t aligned = query + document.k_length - document.q_length;
  return clamp_range(aligned - clamp_bound(document, mask.left), aligned + clamp_bound(document, mask.right) + 1,
                     document.k_length);
}

KeyRange visible_queries(const Document& document, const Mask& mask, std::int64_t key) {
  const std::int64_t aligned = key - document.k_length + document.q_length;
  return clamp_range(aligned - clamp_bound(document, mask.right), aligned + clamp_bound(document, mask.left) + 1,
                     document.q_length);
}

std::int64_t visible_pairs(const Document& document, const Mask& mask) {
  const std::int64_t offset = document.k_length - document.q_length;
  const std::int64_t begin = offset - clamp_bound(document, mask.left);
  const std::int64_t end = offset + clamp_bound(document, mask.right) + 1;
  return begin >= end ? 0 : pairs_below(document, end) - pairs_below(document, begin);
}

bool cuts_tile(const Document& document, const Mask& mask, std::int64_t query, std::int64_t key) {
  const std::int64_t offset = document.k_length - document.q_length;
  const std::int64_t first_query = query - query % kBlock;
  const std::int64_t last_query = std::min(first_query + kBlock, document.q_length) - 1;
  const std::int64_t first_key = key - key % kBlock;
  return (mask.right < Mask::unbounded && first_key + kBlock - 1 > first_query + offset + mask.right) ||
         (mask.left < Mask::unbounded && first_key < last_query + offset - mask.left);
}

}  // namespace mxflash
