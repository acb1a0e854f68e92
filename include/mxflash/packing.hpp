// Packed documents (varlen): which rows belong together and which keys a query may see.
//
//   Packing packing = *Packing::make(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k);
//   for (const Document& document : packing.documents()) visible_keys(document, Mask::causal(), query);
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mxflash/status.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash {

/// Tokens that share a scale in the token-block formats; blocks start anew at each document.
inline constexpr std::int64_t kBlock = 32;

/// One document: rows [q_begin, q_begin + q_length) of q and dO, [k_begin, k_begin + k_length) of k and v.
struct Document {
  std::int64_t q_begin = 0;
  std::int64_t q_length = 0;
  std::int64_t k_begin = 0;
  std::int64_t k_length = 0;
  bool operator==(const Document&) const = default;
};

class Packing {
 public:
  /// Offsets int32, start at 0, never decrease, end at the number of rows; q and k hold the same number of documents.
  static Result<Packing> make(std::span<const std::int32_t> cu_seqlens_q, std::span<const std::int32_t> cu_seqlens_k,
                              std::int64_t tokens_q, std::int64_t tokens_k);
  /// The same from tensors; refuses anything but one-dimensional I32 (an I64 tensor is named, not converted).
  static Result<Packing> from_tensors(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, std::int64_t tokens_q,
                                      std::int64_t tokens_k);
  /// One document over all tokens.
  static Packing single(std::int64_t tokens_q, std::int64_t tokens_k);

  [[nodiscard]] const std::vector<Document>& documents() const { return documents_; }
  [[nodiscard]] std::int64_t tokens_q() const { return tokens_q_; }
  [[nodiscard]] std::int64_t tokens_k() const { return tokens_k_; }

 private:
  std::vector<Document> documents_;
  std::int64_t tokens_q_ = 0;
  std::int64_t tokens_k_ = 0;
};

/// A band of allowed keys. With offset = k_length - q_length (bottom-right alignment), query i of a document sees keys
/// j with i + offset - left <= j <= i + offset + right. Bounds may be negative; anything at or beyond `unbounded` is
/// no bound.
struct Mask {
  static constexpr std::int64_t unbounded = INT32_MAX;
  std::int64_t left = unbounded;
  std::int64_t right = 0;

  static constexpr Mask causal() { return {unbounded, 0}; }
  static constexpr Mask full() { return {unbounded, unbounded}; }
  static constexpr Mask window(std::int64_t left, std::int64_t right) { return {left, right}; }
  /// No query sees a later key.
  [[nodiscard]] constexpr bool is_causal() const { return right <= 0; }
  bool operator==(const Mask&) const = default;
};

/// Half-open range of document-relative key positions; empty when begin == end.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] bool empty() const { return begin == end; }
  [[nodiscard]] bool contains(std::int64_t key) const { return begin <= key && key < end; }
  bool operator==(const KeyRange&) const = default;
};

/// The keys that query `query` (document-relative) sees. The range of a later query never begins or ends earlier.
KeyRange visible_keys(const Document& document, const Mask& mask, std::int64_t query);

/// The queries (document-relative) that see key `key`: a range too, since the mask is a band.
KeyRange visible_queries(const Document& document, const Mask& mask, std::int64_t key);

/// Number of (query, key) pairs the mask allows in the document.
std::int64_t visible_pairs(const Document& document, const Mask& mask);

/// Whether the mask cuts the 32 x 32 tile of the pair: some query of it does not see a key of the square, or a key past
/// the document's end, as it would not if the document went on; so a causal document that goes on cuts the same tiles.
bool cuts_tile(const Document& document, const Mask& mask, std::int64_t query, std::int64_t key);

}  // namespace mxflash
