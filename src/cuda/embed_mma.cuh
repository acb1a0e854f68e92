// Warp-level products of BF16 numbers, and what feeds them: asynchronous copies, rows of 16-byte chunks that are
// swizzled so that eight rows at one chunk lie in different banks, loads of 8 x 8 matrices.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace mxflash::cuda {

/// Bytes from the start of a table in shared memory to chunk `chunk` of row `row`.
template <int kRowBytes>
__device__ constexpr std::uint32_t swizzled(int row, int chunk) {
  static_assert(kRowBytes >= 128);
  return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The address of chunk `half` of a row, 0 or 1; that of chunk `even + half` is this ^ (even * 16). One register for a
/// row: an address a chunk would be more than there are. Precondition: the table begins at a multiple of kRowBytes.
template <int kRowBytes>
__device__ std::uint32_t row_address(std::uint32_t table, int row, int half) {
  return table + swizzled<kRowBytes>(row, half);
}

/// 16 bytes; zeros where not `valid`, and then nothing is read.
__device__ inline void copy_chunk(std::uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// The same of 4 or 8 bytes.
template <class T>
__device__ void copy_small(T* to, const T* from, bool valid) {
  const int bytes = valid ? static_cast<int>(sizeof(T)) : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(sizeof(T)),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// All but the last `kLeft` groups have arrived, for this thread.
template <int kLeft>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_transposed(std::uint32_t (&out)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

/// d += a b of 16 x 16 and 16 x 8.
__device__ inline void multiply_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two numbers that are exact in BF16, `low` in the low half.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// 2^x of an integer x, exact; 0 below the normal numbers, at most 2^127.
__device__ inline float held_pow2(float x) {
  constexpr float kToInteger = 8388608.0F;  // Then the low bits of the number are an integer.
  const float biased = fminf(fmaxf(x, -127.0F), 127.0F) + 127.0F;
  return __uint_as_float(__float_as_uint(biased + kToInteger) << 23);
}

}  // namespace mxflash::cuda
