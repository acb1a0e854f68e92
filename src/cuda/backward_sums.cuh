// How dQ adds up: what a tile's part is in shared memory, the multipliers of its rows, the copy engine's addition.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/backward.hpp"
#include "cuda/sm90.cuh"

namespace mxflash::cuda {

struct FloatSums {
  using Element = float;

  /// Of a thread's two rows.
  struct Powers {
    /// `row`: gives the first's index in the tables.
    template <class Row>
    __device__ Powers(const BackwardWorkspace&, const Row&) {}
    __device__ void raise(float (&)[2]) const {}
  };

  /// Two dims.
  static __device__ void store(std::uint32_t to, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(low), "f"(high) : "memory");
  }
  static __device__ void add(Element* to, std::uint32_t from, std::int32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
  }
};

struct HalfSums {
  using Element = __half;

  class Powers {
   public:
    template <class Row>
    __device__ Powers(const BackwardWorkspace& work, const Row& row) {
      const std::int32_t* of = work.prescale + row();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Asked for here, long before it is needed; a plain load would sink to its use.
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(exponent_[r]) : "l"(of + 8 * r));
      }
    }

    /// Powers of two: what leaves FP32 above is held, since zeros may be multiplied by it; below, the product is
    /// nothing in FP16.
    __device__ void raise(float (&scale)[2]) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int half = exponent_[r] >> 1;
        scale[r] = fminf(scale[r] * normal_pow2(half) * normal_pow2(exponent_[r] - half), 0x1p127F);
      }
    }

   private:
    std::int32_t exponent_[2];
  };

  static __device__ void store(std::uint32_t to, float low, float high) {
    const __half2 two = __floats2half2_rn(low, high);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(reinterpret_cast<const std::uint32_t&>(two)) : "memory");
  }
  static __device__ void add(Element* to, std::uint32_t from, std::int32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
  }
};

}  // namespace mxflash::cuda
