// Products over tokens: weights of a pair of tiles, in shared memory, against rows of a table; sums in global memory.
#pragma once

#include <cuda_fp16.h>

#include "cuda/embed_pairs.cuh"

namespace mxflash::cuda {

/// dQ: a sum's rows are queries, its contraction runs over keys.
struct OverKeys {
  static __device__ void load(std::uint32_t (&out)[4], std::uint32_t weights, const Lane& at, int m, int k) {
    load_matrices(out, weights + swizzled<kWeightBytes>(16 * m + at.row_16(), 2 * k + at.chunk_16()));
  }
  static __device__ int square(int m, int k) { return m / 2 * kSquares + k / 2; }
};

/// dK and dV: the other way round.
struct OverQueries {
  static __device__ void load(std::uint32_t (&out)[4], std::uint32_t weights, const Lane& at, int m, int k) {
    load_transposed(out, weights + swizzled<kWeightBytes>(16 * k + at.row_8(), 2 * m + at.chunk_8()));
  }
  static __device__ int square(int m, int k) { return k / 2 * kSquares + m / 2; }
};

/// Rows of sums that a block alone adds to: FP32 [count, dims].
struct SumRows {
  float* first = nullptr;
  std::int32_t dims = 0;
  std::int32_t count = 0;

  __device__ void clear() const {
    for (std::int64_t i = threadIdx.x; i < std::int64_t{count} * dims; i += kPairThreads) first[i] = 0;
    __syncthreads();
  }
};

/// Rows of a table by kind of tile; of one kind, squares of both.
struct KindRows {
  TableRows whole;
  const std::uint16_t* cut = nullptr;  ///< The first of the other kind, where there are two.

  [[nodiscard]] __device__ int kinds() const { return cut == nullptr ? 1 : 2; }
  [[nodiscard]] __device__ TableRows of(int kind) const {
    return {kind == kWholeTiles ? whole.first : cut, whole.dims, whole.count};
  }
  [[nodiscard]] __device__ bool takes(std::int32_t square, int kind) const {
    return square == kind || (cut == nullptr && square != kUnseen);
  }
};

__device__ inline void clear(float (&part)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) part[n][j] = 0;
  }
}

/// How the sum of a pair of tiles joins those before it.
struct Joining {
  float factor = 1;                     ///< Of the tile's sum.
  const GradientRow* halves = nullptr;  ///< Not null: in FP16, after each row's power of two.

  [[nodiscard]] __device__ float join(float before, float part, int row) const {
    if (halves == nullptr) return before + part * factor;
    const float narrow = __half2float(__float2half_rn(scalbnf(part, static_cast<int>(halves[row].prescale))));
    return __half2float(__float2half_rn(before + narrow));
  }
};

/// A warp's 16 rows and 32 dims, `dim` the first.
__device__ inline void join(const float (&part)[4][4], const SumRows& sums, const Joining& joining, int dim) {
  const Lane at;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.warp / 2 * 16 + at.lane / 4 + 8 * r;
      if (row >= sums.count) continue;
      auto* to = reinterpret_cast<float2*>(sums.first + std::int64_t{row} * sums.dims + dim + 8 * n + at.lane % 4 * 2);
      const float2 before = *to;
      *to = {joining.join(before.x, part[n][2 * r], row), joining.join(before.y, part[n][2 * r + 1], row)};
    }
  }
}

/// sums += weights rows. All warps; a thread always has the same sums.
template <class Over>
__device__ void add_product(PairShared& s, const KindRows& rows, const SumRows& sums, const Joining& joining) {
  const Lane at;
  const int m = at.warp / 2;
  const int half = at.warp % 2;
  const int steps = sums.dims / kChunkDims * rows.kinds();
  const auto copy = [&](int step) {
    copy_rows(s.stage[step % 2][0], rows.of(step % rows.kinds()), step / rows.kinds());
  };
  __syncthreads();  // All weights are there.
  copy(0);
  commit_copies();
  float part[4][4];
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) copy(step + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const int kind = step % rows.kinds();
    if (kind == 0) clear(part);
    const std::uint32_t operand = shared_address(s.stage[step % 2][0]);
#pragma unroll 2
    for (int k = 0; k < kTileRows / 16; ++k) {
      if (!rows.takes(s.kind[Over::square(m, k)], kind)) continue;
      std::uint32_t left[4];
      Over::load(left, shared_address(s.weights), at, m, k);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        std::uint32_t right[4];
        load_transposed(right, operand + swizzled<kChunkBytes>(16 * k + at.row_16(), half * 4 + n + at.chunk_16()));
        multiply_bf16(part[n], left, right[0], right[1]);
        multiply_bf16(part[n + 1], left, right[2], right[3]);
      }
    }
    if (kind + 1 == rows.kinds()) join(part, sums, joining, step / rows.kinds() * kChunkDims + half * 32);
    __syncthreads();
  }
}

}  // namespace mxflash::cuda
