// Bytes transposed by a block: what lies by rows of tokens goes to where it lies along tokens, and back.
#pragma once

#include "cuda/quantize_rows.cuh"

namespace mxflash::cuda {

/// Four rows of four bytes: words[i] byte j becomes words[j] byte i.
__device__ inline void transpose4(std::uint32_t (&words)[4]) {
  const std::uint32_t low[2] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
  const std::uint32_t high[2] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
  words[0] = __byte_perm(low[0], low[1], 0x5410);
  words[1] = __byte_perm(low[0], low[1], 0x7632);
  words[2] = __byte_perm(high[0], high[1], 0x5410);
  words[3] = __byte_perm(high[0], high[1], 0x7632);
}

constexpr unsigned kSide = 128;  // Lines of a square, and bytes of a line.
constexpr unsigned kUnit = 16;   // Bytes that a lane reads or writes.

/// 128 lines of 128 bytes in shared memory, kPitch from each other. Memory is read and written by whole lines, eight
/// lanes a line.
template <unsigned kPitch>
class Square {
 public:
  /// `index`: lines may hold several squares side by side.
  __device__ Square(std::byte* lines, unsigned index) : bytes_(lines + index * kSide) {}

  /// Sixteen bytes of a line. Which of its eight units lies where depends on the line: neither whole lines, nor the
  /// same word of lines that are sixteen apart, nor words of four lines share a bank.
  [[nodiscard]] __device__ std::byte* unit(unsigned line, unsigned index) const {
    return bytes_ + line * kPitch + (index ^ (line / 16 % 8) ^ (line / 4 % 4 * 2)) * kUnit;
  }

  /// `from(line, unit)`: where a unit comes from; null: zeros. They are on their way from here on.
  template <class From>
  __device__ void load(const From& from) const {
#pragma unroll
    for (unsigned line = threadIdx.x / 8; line < kSide; line += kThreads / 8) {
      const unsigned index = threadIdx.x % 8;
      const std::uint8_t* of = from(line, index);
      if (of == nullptr) {
        *reinterpret_cast<uint4*>(unit(line, index)) = uint4{};
      } else {
        const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(unit(line, index)));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(of) : "memory");
      }
    }
  }
  /// 32 lines that the warp has written, by it. `to(line, unit)`: where a unit goes; null: nowhere.
  template <class To>
  __device__ void store(unsigned first, const To& to) const {
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < 32; i += 4) {
      const unsigned line = first + i + threadIdx.x % 32 / 8;
      const unsigned index = threadIdx.x % 8;
      if (std::uint8_t* at = to(line, index); at != nullptr) {
        *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(unit(line, index));
      }
    }
  }

  /// All lines of the transposed.
  template <class To>
  __device__ void store_transposed(const To& to) const {
#pragma unroll
    for (unsigned line = threadIdx.x / 8 * 4; line < kSide; line += kThreads / 8 * 4) {
      std::uint32_t words[4][4];
      transposed(line, threadIdx.x % 8, words);
#pragma unroll
      for (unsigned k = 0; k < 4; ++k) {
        if (std::uint8_t* at = to(line + k, threadIdx.x % 8); at != nullptr) {
          *reinterpret_cast<uint4*>(at) = {words[0][k], words[1][k], words[2][k], words[3][k]};
        }
      }
    }
  }

 private:
  /// A unit of each of four transposed lines: words[i][k] is word i of line first + k.
  __device__ void transposed(unsigned first, unsigned index, std::uint32_t (&words)[4][4]) const {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        const std::byte* of = unit(index * kUnit + i * 4 + j, first / kUnit) + first % kUnit;
        words[i][j] = *reinterpret_cast<const std::uint32_t*>(of);
      }
      transpose4(words[i]);
    }
  }

  std::byte* bytes_;
};

/// Tokens of a block: 128 of one head's, or, of short tiles, 64 of each of two heads or 32 of four.
class Share {
 public:
  /// `place`: of the block, among those of the tile; fewer are needed the shorter it is.
  __device__ Share(std::int32_t tokens, std::int32_t place)
      : shift_(tokens <= kGroup       ? 5
               : tokens <= 2 * kGroup ? 6
                                      : 7),
        first_head_(place << (7 - shift_)) {}

  [[nodiscard]] __device__ std::int32_t tokens() const { return 1 << shift_; }
  [[nodiscard]] __device__ std::int32_t head(unsigned token) const {
    return first_head_ + static_cast<std::int32_t>(token >> shift_);
  }
  /// In the tile.
  [[nodiscard]] __device__ std::int32_t place(unsigned token) const {
    return static_cast<std::int32_t>(token & ((1U << shift_) - 1));
  }

 private:
  int shift_;
  std::int32_t first_head_;
};

/// A tile's part of a table [heads, tokens, dims] or [heads, dims, tokens]; beyond its tokens and dims there is
/// nothing.
template <class Byte>
struct Part {
  Byte* first;              ///< Of head 0.
  std::int64_t head_pitch;  ///< Bytes.
  std::int64_t pitch;       ///< Bytes of a line.
  std::int32_t heads;
  std::int32_t tokens;
  std::int32_t dims;
  std::int32_t gap = 0;  ///< Lines that each 128 dims are followed by.

  [[nodiscard]] __device__ bool has(std::int32_t head, std::int32_t token, std::int32_t dim) const {
    return head < heads && token < tokens && dim < dims;
  }
};

/// Lines of a square are tokens.
template <class Byte>
struct ByRows {
  Share share;
  Part<Byte> part;

  __device__ Byte* operator()(unsigned square, unsigned line, unsigned unit) const {
    const std::int32_t head = share.head(line);
    const std::int32_t token = share.place(line);
    const auto dim = static_cast<std::int32_t>(square * kSide + unit * kUnit);
    return part.has(head, token, dim) ? part.first + head * part.head_pitch + token * part.pitch + dim : nullptr;
  }
};

/// Lines of a square are dims.
template <class Byte>
struct ByColumns {
  Share share;
  Part<Byte> part;

  __device__ Byte* operator()(unsigned square, unsigned line, unsigned unit) const {
    const std::int32_t head = share.head(unit * kUnit);
    const std::int32_t token = share.place(unit * kUnit);
    const auto dim = static_cast<std::int32_t>(square * kSide + line);
    const std::int64_t below = dim + static_cast<std::int32_t>(square) * part.gap;
    return part.has(head, token, dim) ? part.first + head * part.head_pitch + below * part.pitch + token : nullptr;
  }
};

template <class Shape>
constexpr unsigned kSquares = (Shape::kDims + kSide - 1) / kSide;
/// Of a block, its warps' rows.
template <class Shape>
constexpr unsigned kBlockBytes = kSide * Shape::kPitch;

template <class Shape, class To>
__device__ void store_transposed(std::byte* lines, const To& to) {
#pragma unroll 1
  for (unsigned s = 0; s < kSquares<Shape>; ++s) {
    Square<Shape::kPitch>(lines, s).store_transposed([&](unsigned line, unsigned unit) { return to(s, line, unit); });
  }
}

template <class Shape, class From, class To>
__device__ void transpose(std::byte* lines, const From& from, const To& to) {
#pragma unroll 1
  for (unsigned s = 0; s < kSquares<Shape>; ++s) {
    Square<Shape::kPitch>(lines, s).load([&](unsigned line, unsigned unit) { return from(s, line, unit); });
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  store_transposed<Shape>(lines, to);
}

}  // namespace mxflash::cuda
