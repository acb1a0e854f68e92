// Offsets on the device: which document a slot or a token is of.
#pragma once

#include <cstdint>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {

/// Where a document's blocks of 128 rows begin among the slots.
__device__ inline std::int32_t first_slot(const std::int32_t* offsets, std::int32_t document) {
  return offsets[document] / kTileRows + document;
}

/// Column of a document's first key.
__device__ inline std::int32_t first_column(const std::int32_t* offsets, std::int32_t document) {
  return (offsets[document] / kColumnStep + document) * kColumnStep;
}

/// The last document for which `begins(document)`: a condition that holds for the first, and up to some document.
template <class Begins>
__device__ std::int32_t last_document(std::int32_t documents, Begins begins) {
  std::int32_t low = 0;
  std::int32_t high = documents;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (begins(middle) ? low : high) = middle;
  }
  return low;
}

/// The document whose blocks may have this slot. Of well-formed offsets the slots rise strictly, zero lengths included.
__device__ inline std::int32_t document_of_slot(const std::int32_t* offsets, std::int32_t documents,
                                                std::int32_t slot) {
  return last_document(documents, [&](std::int32_t document) { return first_slot(offsets, document) <= slot; });
}

/// The document that holds a token: those of no length that begin there come before it.
__device__ inline std::int32_t document_of_token(const std::int32_t* offsets, std::int32_t documents,
                                                 std::int32_t token) {
  return last_document(documents, [&](std::int32_t document) { return offsets[document] <= token; });
}

/// One side of the pack.
struct Side {
  const std::int32_t* offsets = nullptr;
  std::int32_t documents = 0;
  std::int32_t tokens = 0;
};

/// Columns from `column` on, `most` at most, that a document's last tile has to fill: up to those of the next document
/// that has tokens. `end`: the token after the document's last.
__device__ inline std::int32_t columns_to_fill(const Side& side, std::int32_t end, std::int32_t column,
                                               std::int32_t most) {
  if (end >= side.tokens) return most;
  const std::int32_t next = document_of_token(side.offsets, side.documents, end);
  return min(most, first_column(side.offsets, next) - column);
}

struct KeySpan {
  std::int64_t begin;
  std::int64_t end;
};

/// Keys that the query at `position` (its place + keys - queries of the document) sees; begin == end: none.
__device__ inline KeySpan visible_keys(std::int64_t position, std::int64_t keys, const Band& band) {
  const std::int64_t begin = max(position - band.left, std::int64_t{0});
  const std::int64_t end = min(position + band.right + 1, keys);
  return end > begin ? KeySpan{begin, end} : KeySpan{0, 0};
}

}  // namespace mxflash::cuda
