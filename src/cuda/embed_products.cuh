// Products over tokens: weights of a pair of tiles, in shared memory, against rows of a table; sums in global memory.
#pragma once

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

/// Squares of the weights that a product takes: those of one kind, or all that have a pair.
struct Squares {
  std::int32_t kinds = 1;
  std::int32_t only = kWholeTiles;

  [[nodiscard]] __device__ bool takes(std::int32_t kind) const {
    return kind == only || (kinds == 1 && kind != kUnseen);
  }
};

/// sums += factor weights rows. All warps; a thread always has the same sums.
template <class Over>
__device__ void add_product(PairShared& s, const Squares& squares, const TableRows& rows, const SumRows& sums,
                            float factor) {
  const Lane at;
  const int m = at.warp / 2;
  const int half = at.warp % 2;
  __syncthreads();  // All weights are there.
  copy_rows(s.stage[0][0], rows, 0);
  commit_copies();
#pragma unroll 1
  for (int chunk = 0; chunk < rows.dims / kChunkDims; ++chunk) {
    if (chunk + 1 < rows.dims / kChunkDims) copy_rows(s.stage[(chunk + 1) % 2][0], rows, chunk + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    float part[4][4] = {};
    const std::uint32_t operand = shared_address(s.stage[chunk % 2][0]);
#pragma unroll 2
    for (int k = 0; k < kTileRows / 16; ++k) {
      if (!squares.takes(s.kind[Over::square(m, k)])) continue;
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
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int dim = chunk * kChunkDims + half * 32 + 8 * n + at.lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 16 * m + at.lane / 4 + 8 * r;
        if (row >= sums.count) continue;
        auto* to = reinterpret_cast<float2*>(sums.first + std::int64_t{row} * sums.dims + dim);
        const float2 before = *to;
        *to = {before.x + part[n][2 * r] * factor, before.y + part[n][2 * r + 1] * factor};
      }
    }
    __syncthreads();
  }
}

}  // namespace mxflash::cuda
