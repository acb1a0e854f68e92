// A warp's 32 rows on their way through the quantizer: it copies them into its own part of shared memory and reads them
// from there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels.hpp"

namespace mxflash::cuda {

constexpr int kGroup = 32;  // Rows; and the tokens that share an exponent, where more than one does.
constexpr int kChunk = 8;   // Dims that are read together.
constexpr int kWarps = 4;   // Of a block: those that a full tile's groups take.
constexpr unsigned kThreads = kWarps * 32;
static_assert(kWarps * kGroup == kTileRows);

/// The larger magnitude, of some sign; a NaN stays one.
__device__ inline float larger(float a, float b) {
  float out = 0;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

/// Types of inputs. A `Most` collects the largest magnitude of chunks.
struct Bf16 {
  using Element = std::uint16_t;
  using Chunk = uint4;
  using Most = std::uint32_t;
  static __device__ float widened(Element bits) { return __uint_as_float(std::uint32_t{bits} << 16); }
  static __device__ void widen(const Chunk& bits, float* out) {
    const std::uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      out[2 * w] = __uint_as_float(words[w] << 16);
      out[2 * w + 1] = __uint_as_float(words[w] & 0xFFFF0000U);
    }
  }
  static __device__ Most larger_of(Most a, Most b) {
    Most out = 0;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  static __device__ Most most(const Chunk& c) { return larger_of(larger_of(c.x, c.y), larger_of(c.z, c.w)); }
  static __device__ float value(Most most) {
    return larger(__uint_as_float(most << 16), __uint_as_float(most & 0xFFFF0000U));
  }
};
struct F16 {
  using Element = std::uint16_t;
  using Chunk = uint4;
  using Most = std::uint32_t;
  static __device__ float widened(Element bits) { return __half2float(__ushort_as_half(bits)); }
  static __device__ float2 both(std::uint32_t bits) { return __half22float2(*reinterpret_cast<const __half2*>(&bits)); }
  static __device__ void widen(const Chunk& bits, float* out) {
    const std::uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      out[2 * w] = both(words[w]).x;
      out[2 * w + 1] = both(words[w]).y;
    }
  }
  static __device__ Most larger_of(Most a, Most b) {
    Most out = 0;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  static __device__ Most most(const Chunk& c) { return larger_of(larger_of(c.x, c.y), larger_of(c.z, c.w)); }
  static __device__ float value(Most most) { return larger(both(most).x, both(most).y); }
};
struct F32 {
  using Element = float;
  struct Chunk {
    float4 low;
    float4 high;
  };
  using Most = float;
  static __device__ float widened(Element x) { return x; }
  static __device__ void widen(const Chunk& chunk, float* out) {
    const float all[] = {chunk.low.x,  chunk.low.y,  chunk.low.z,  chunk.low.w,
                         chunk.high.x, chunk.high.y, chunk.high.z, chunk.high.w};
#pragma unroll
    for (int d = 0; d < kChunk; ++d) out[d] = all[d];
  }
  static __device__ Most larger_of(Most a, Most b) { return larger(a, b); }
  static __device__ Most most(const Chunk& chunk) {
    const float low = larger(larger(chunk.low.x, chunk.low.y), larger(chunk.low.z, chunk.low.w));
    return larger(low, larger(larger(chunk.high.x, chunk.high.y), larger(chunk.high.z, chunk.high.w)));
  }
  static __device__ float value(Most most) { return most; }
};

/// How a warp holds a group of rows of up to kDims dims. Code that is longer than the instruction cache costs more than
/// exchanges between lanes: hence 64 numbers of q and k at a time, though a lane could hold 128.
template <class InputType, int kMostDims>
struct Shape {
  using Type = InputType;
  static constexpr int kBytes = sizeof(typename Type::Element);
  static constexpr int kDims = kMostDims;
  static constexpr int kPitch = kDims * kBytes + 16;  // Bytes of a row; 16 more: rows in different banks.
  static constexpr int kStage = kGroup * kPitch;
  // Of q and k: numbers of a lane, lanes of a row, rows at once.
  static constexpr int kOwn = 64;
  static constexpr int kLanes = kDims / kOwn;
  static constexpr int kRows = kGroup / kLanes;
  // Of v: a lane has 4 keys, which 4 lanes share, chunk by chunk, 128 dims at a time.
  static constexpr int kKeys = 4;
  static constexpr int kKeyLanes = 4;
  static constexpr int kHalves = kDims > 128 ? 2 : 1;
  static constexpr int kChunks = kDims / kHalves / kKeyLanes / kChunk;
  /// Where transposed codes lie: over the rows, or beside them where those are still needed.
  static constexpr int kTransposed = kHalves > 1 ? kStage : 0;
  /// Of a warp.
  static constexpr int kShared = kStage + (kHalves > 1 ? kDims * kGroup : 0);
};

/// Rows [first, first + count) of one head of a tensor.
struct Rows {
  const Source* source;
  std::int32_t dims;
  std::int32_t head;
  std::int32_t first;
  std::int32_t count;

  template <class Type>
  [[nodiscard]] __device__ const typename Type::Element* at(std::int32_t row, std::int32_t dim) const {
    return static_cast<const typename Type::Element*>(source->data) +
           (std::int64_t{first} + row) * source->token_stride + head * source->head_stride + dim * source->dim_stride;
  }
  /// Whether tokens share an exponent.
  [[nodiscard]] __device__ bool alike() const { return source->scale_tokens > 1; }
  /// Those of one group, up to 32; a count of 0 or less: none. (With max(0, ...) ptxas 13.0 fuses both into
  /// VIMNMX.RELU, whose predicate it then takes for "32": rows of the next document would be read.)
  [[nodiscard]] __device__ Rows group(int index) const {
    return {source, dims, head, first + index * kGroup, min(kGroup, count - index * kGroup)};
  }
};

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / 32); }

/// The warps of a block that have one head's tile, or queries of an item: one for each group of rows. Of short ones a
/// block has several heads.
struct Team {
  int warps;
  int group;  ///< This warp's.
  std::int32_t head;

  /// `place`: of the block, among those of the tile; fewer are needed the shorter it is.
  __device__ Team(std::int32_t rows, std::int32_t place) {
    const int shift = rows <= kGroup ? 0 : rows <= 2 * kGroup ? 1 : 2;
    warps = 1 << shift;
    group = warp_index() & (warps - 1);
    head = place * (kWarps >> shift) + (warp_index() >> shift);
  }
  [[nodiscard]] __device__ int first_warp() const { return warp_index() - group; }
  /// Of all its lanes.
  [[nodiscard]] __device__ int lane() const { return group * 32 + lane_index(); }
};

/// A warp's group of rows in shared memory, with zeros where it has fewer than 32.
template <class Shape>
class Group {
 public:
  using Type = typename Shape::Type;
  using Chunk = typename Type::Chunk;

  __device__ Group(const Rows& of, std::byte* shared) : rows(of), staged_(shared) {}

  /// The rows are on their way from here on.
  __device__ void start() const {
    if (rows.source->vectors) {
      copy();
    } else {
      fill();
    }
  }

  /// Until they are there.
  static __device__ void wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

  /// Shared memory of the group; the warp may write there what it likes.
  [[nodiscard]] __device__ std::byte* staged() const { return staged_; }

  [[nodiscard]] __device__ Chunk chunk(int row, int index) const {
    return *reinterpret_cast<const Chunk*>(staged_ + row * Shape::kPitch + index * kChunk * Shape::kBytes);
  }

  const Rows rows;

 private:
  static __device__ void copy16(std::uint32_t to, const void* from, int bytes) {
    // The rest of the 16 becomes zeros.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }

  __device__ void copy() const {
    constexpr int kUnitDims = 16 / Shape::kBytes;
    constexpr int kUnits = Shape::kDims / kUnitDims;  // Of a row.
    constexpr int kAtOnce = kUnits < 32 ? kUnits : 32;
    constexpr int kStep = 32 / kAtOnce;
    const int first = lane_index() / kAtOnce;
    const int column = lane_index() % kAtOnce;
    const auto* from = rows.at<Type>(first, column * kUnitDims);
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(staged_)) + first * Shape::kPitch + column * 16;
    const std::int64_t step = kStep * rows.source->token_stride;
    if (kUnits == kAtOnce && rows.count == kGroup && rows.dims == Shape::kDims) {
#pragma unroll
      for (int r = 0; r < kGroup; r += kStep) {
        copy16(to + r * Shape::kPitch, from, 16);
        from += step;
      }
      return;
    }
#pragma unroll 1
    for (int r = 0; r < kGroup; r += kStep) {
      for (int unit = 0; unit < kUnits; unit += kAtOnce) {
        const bool inside = r + first < rows.count && (unit + column) * kUnitDims < rows.dims;
        copy16(to + r * Shape::kPitch + unit * 16, from + unit * kUnitDims, inside ? 16 : 0);
      }
      from += step;
    }
  }

  /// Rows that cannot be copied 16 bytes at a time.
  __device__ void fill() const {
#pragma unroll 2
    for (int r = 0; r < kGroup; ++r) {
      auto* to = reinterpret_cast<typename Type::Element*>(staged_ + r * Shape::kPitch);
#pragma unroll
      for (int d = lane_index(); d < Shape::kDims; d += 32) {
        to[d] = d < rows.dims && r < rows.count ? *rows.at<Type>(r, d) : typename Type::Element{};
      }
    }
  }

  std::byte* staged_;
};

}  // namespace mxflash::cuda
