// The powers of two before FP16 sums of dQ: norms of tokens, their maxima, and what follows for a row.
#pragma once

#include "cuda/embed_pairs.cuh"

namespace mxflash::cuda {

inline constexpr int kBoundThreads = 256;
inline constexpr int kBoundWarps = kBoundThreads / 32;

/// A warp's: |x|_2 of a row of a table.
__device__ inline float norm_of(const std::uint16_t* row, int dims) {
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x % 32); d < dims; d += 32) sum += decode_bf16(row[d]) * decode_bf16(row[d]);
  for (int half = 1; half < 32; half *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, half);
  return sqrtf(sum);
}

/// The same of |x|_inf.
__device__ inline float most_of(const std::uint16_t* row, int dims) {
  float most = 0;
  for (int d = static_cast<int>(threadIdx.x % 32); d < dims; d += 32) most = fmaxf(most, fabsf(decode_bf16(row[d])));
  for (int half = 1; half < 32; half *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, half));
  return most;
}

__device__ inline float dlse_of(const EmbedBackwardArguments& a, std::int64_t token, std::int32_t head) {
  if (a.dlse == nullptr) return 0;
  const float dlse = a.dlse[token * a.dlse_token_stride + head * a.dlse_head_stride];
  const bool finite = (__float_as_uint(dlse) & detail::kAbsMask) < detail::kInfBits;
  return finite ? held(dlse, kFarLogit) : detail::float_of(detail::kNanBits);
}

/// A warp has a query of a head. Poisoned ones take no part in a document's maxima: fmaxf leaves a NaN out.
__device__ inline void bound_query(const EmbedBackwardArguments& a, std::int64_t token, std::int32_t head) {
  const std::int32_t dims = a.sizes.value_parts * a.sizes.value_dims;
  const std::int64_t row = head * std::int64_t{a.sizes.tokens_q} + token;
  const float norm = norm_of(a.tables.dout_rows.values + row * dims, dims) * a.tables.dout_rows.about[row];
  if (threadIdx.x % 32 != 0) return;
  a.tables.dout_norms[row] = norm;
  const std::int32_t document = document_of_token(a.offsets.q, a.sizes.documents, static_cast<std::int32_t>(token));
  QueryBounds& all = a.tables.document_bounds[std::int64_t{head} * a.sizes.documents + document];
  atomicMax(&all.dout, __float_as_uint(fmaxf(norm, 0.0F)));
  atomicMax(&all.dlse, __float_as_uint(fmaxf(fabsf(dlse_of(a, token, head)), 0.0F)));
}

/// A warp has a key.
__device__ inline KeyBound bound_key(const EmbedBackwardArguments& a, std::int64_t row) {
  const std::int32_t dims = a.sizes.value_parts * a.sizes.value_dims;
  KeyBound bound;
  bound.value = fmaxf(norm_of(a.tables.value_rows.values + row * dims, dims) * a.tables.value_rows.about[row], 0.0F);
  for (int kind = 0; kind < a.dq_weights.kinds; ++kind) {
    const TokenTable& keys = a.tables.keys[kind];
    const float most = most_of(keys.values + row * a.sizes.key_dims, a.sizes.key_dims);
    const float exponent = keys.about[row];
    if (exponent == exponent) bound.key = fmaxf(bound.key, scalbnf(most, static_cast<int>(exponent)));
  }
  return bound;
}

/// A warp: each becomes the largest up to it.
__device__ inline void run_maxima(KeyBound* bounds, std::int32_t count) {
  KeyBound before;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int32_t first = 0; first < count; first += 32) {
    KeyBound own = first + lane < count ? bounds[first + lane] : KeyBound{};
    for (int step = 1; step < 32; step *= 2) {
      const float value = __shfl_up_sync(0xFFFFFFFFU, own.value, step);
      const float key = __shfl_up_sync(0xFFFFFFFFU, own.key, step);
      if (lane >= step) own = {fmaxf(own.value, value), fmaxf(own.key, key)};
    }
    own = {fmaxf(own.value, before.value), fmaxf(own.key, before.key)};
    if (first + lane < count) bounds[first + lane] = own;
    before = {__shfl_sync(0xFFFFFFFFU, own.value, 31), __shfl_sync(0xFFFFFFFFU, own.key, 31)};
  }
}

/// 14 - ceil(log2(bound)), the bound of numerics.md on a row's dQ.
__device__ inline float prescale_of(const EmbedBackwardArguments& a, const Pair& pair, std::int32_t query,
                                    std::int32_t end) {
  const std::int64_t keys = std::int64_t{pair.kv_head} * a.sizes.tokens_k + pair.item.key_row;
  double dout = 0;
  double dlse = 0;
  if (a.dq_accumulation == DqAccumulation::f16_causal) {
    const std::int64_t token = std::int64_t{pair.item.query_row} + query;
    dout = a.tables.dout_norms[std::int64_t{pair.head} * a.sizes.tokens_q + token];
    dlse = fabsf(dlse_of(a, token, pair.head));
  } else {
    const QueryBounds all = a.tables.document_bounds[std::int64_t{pair.head} * a.sizes.documents + pair.item.document];
    dout = __uint_as_float(all.dout);
    dlse = __uint_as_float(all.dlse);
    end = pair.item.keys;
  }
  if (end == 0) return 0;
  const KeyBound most = a.tables.key_bounds[keys + end - 1];
  const double scale = fabsf(a.scale);
  const double bound = dout * (2 * scale * most.value * most.key) + dlse * (scale * most.key);
  if (!(bound > 0) || bound > 1e300) return 0;
  int exponent = 0;
  const double fraction = frexp(bound, &exponent);
  return static_cast<float>(14 - (fraction == 0.5 ? exponent - 1 : exponent));
}

}  // namespace mxflash::cuda
