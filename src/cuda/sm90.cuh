// The few Hopper instructions that the kernels use, over CuTe's atoms: warpgroup MMAs on arrays of registers,
// shared-memory descriptors, transaction barriers, the copy engine.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cuda_fp16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace mxflash::cuda {

using Barrier = cutlass::arch::ClusterTransactionBarrier;
using ScaleOut = cute::SM90::GMMA::ScaleOut;

inline constexpr int kWarpgroup = 128;
/// What a block may have of shared memory.
inline constexpr std::size_t kMostShared = std::size_t{227} * 1024;

/// Of rows that lie along the contraction and are as wide as the swizzle: `kRowBytes` is 128 or 64, eight rows a group.
/// A step of 32 bytes along the contraction adds 2.
template <int kRowBytes>
__device__ std::uint64_t descriptor(std::uint32_t place) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr std::uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr std::uint64_t kGroup = kRowBytes * 8 / 16;
  return place | std::uint64_t{1} << 16 | kGroup << 32 | kSwizzle << 62;
}
/// Where rows lie in shared memory, in steps of sixteen bytes.
__device__ inline std::uint32_t shared_place(const void* rows) {
  return (cute::cast_smem_ptr_to_uint(rows) & 0x3FFFFU) / 16;
}
template <int kRowBytes>
__device__ std::uint64_t descriptor(const void* rows) {
  return descriptor<kRowBytes>(shared_place(rows));
}

template <class Atom, std::size_t kCount, std::size_t... kIndex>
__device__ void multiply(std::uint64_t a, std::uint64_t b, float (&d)[kCount], ScaleOut scale,
                         std::index_sequence<kIndex...>) {
  Atom::fma(a, b, d[kIndex]..., scale);
}
/// d = a b, or d += a b; both from shared memory.
template <class Atom, std::size_t kCount>
__device__ void multiply(std::uint64_t a, std::uint64_t b, float (&d)[kCount], ScaleOut scale) {
  multiply<Atom>(a, b, d, scale, std::make_index_sequence<kCount>{});
}

template <class Atom, std::size_t kCount, std::size_t... kIndex>
__device__ void multiply(const std::uint32_t* a, std::uint64_t b, float (&d)[kCount], ScaleOut scale,
                         std::index_sequence<kIndex...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
}
/// The same with a from four registers.
template <class Atom, std::size_t kCount>
__device__ void multiply(const std::uint32_t* a, std::uint64_t b, float (&d)[kCount], ScaleOut scale) {
  multiply<Atom>(a, b, d, scale, std::make_index_sequence<kCount>{});
}

/// Keeps the compiler from moving uses of accumulators over a wait.
template <class Register, std::size_t kCount>
__device__ void fence(Register (&registers)[kCount]) {
#pragma unroll
  for (std::size_t i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

/// What a product will overwrite: an accumulator is read as well for all that the compiler knows, and would keep its
/// registers until then.
template <class Register, std::size_t kCount>
__device__ void forget(Register (&registers)[kCount]) {
#pragma unroll
  for (std::size_t i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i])::"memory");
}

/// The same value, which the compiler cannot know to be the same as before.
__device__ inline std::uint32_t opaque(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// The same value, which all of the warp have: so the compiler keeps it, and descriptors made from it, in the registers
/// of the warp that products take them from.
__device__ inline std::uint32_t uniform(std::uint32_t x) { return __reduce_min_sync(0xFFFFFFFFU, x); }

/// A stage and the parity of its barriers, in one register.
class Place {
 public:
  [[nodiscard]] __device__ std::uint32_t stage() const { return at_ & (kParity - 1); }
  [[nodiscard]] __device__ std::uint32_t phase() const { return at_ / kParity; }

  template <int kStages>
  __device__ void advance() {
    static_assert(kStages < kParity);
    at_ = stage() + 1 == kStages ? (at_ & kParity) ^ kParity : at_ + 1;
  }

 private:
  static constexpr std::uint32_t kParity = 256;
  std::uint32_t at_ = 0;
};

/// min and max that keep a NaN.
__device__ inline float held(float x, float most) {
  float y = 0;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-most));
  return y;
}

__device__ inline float exp2_fast(float x) {
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^x of an integer x <= 127, exact; 0 below the normal numbers and for -inf.
__device__ inline float exact_pow2(float x) {
  return x < -126.0F ? 0.0F : __int_as_float((static_cast<int>(x) + 127) << 23);
}

/// 2^x of -126 <= x <= 127.
__device__ inline float normal_pow2(int x) { return __int_as_float((x + 127) << 23); }

/// 2^x without branches; below 2^-149 0, above 2^127 Inf.
__device__ inline float any_pow2(int x) {
  const int subnormal = x < -149 ? 0 : 1 << ((x + 149) & 31);
  return __int_as_float(x < -126 ? subnormal : (min(x, 128) + 127) << 23);
}

/// 1 / x of a normal number below 2^126, to the last bit but one.
__device__ inline float reciprocal(float x) {
  float y = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0F), y);
}

/// All bits of the first `count` bytes of four.
__device__ inline std::uint32_t bytes_below(std::int32_t count) {
  return __funnelshift_lc(~0U, 0U, static_cast<std::uint32_t>(8 * max(min(count, 4), 0)));
}

/// Two E4M3 codes, `low` in the low byte.
__device__ inline std::uint32_t to_e4m3(float low, float high) {
  std::uint16_t codes = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ inline std::uint32_t to_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a, b) | to_e4m3(c, d) << 16;
}

/// The numbers of two E4M3 codes.
__device__ inline float2 from_e4m3(std::uint32_t codes) {
  std::uint32_t halves = 0;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(codes)));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

}  // namespace mxflash::cuda
