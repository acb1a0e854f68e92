// Bytes transposed by a warp: what lies by rows of tokens goes to where it lies along tokens, and back.
#pragma once

#include <cstdint>

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

/// 64 rows of 64 bytes; `rows` of them are read, the others count as zeros. Of the transposed, to_rows rows of to_bytes
/// are written, to_bytes a multiple of 16.
struct Square {
  static constexpr int kSide = 64;

  const std::uint8_t* from = nullptr;
  std::int64_t from_pitch = 0;
  std::int32_t rows = 0;
  std::uint8_t* to = nullptr;
  std::int64_t to_pitch = 0;
  std::int32_t to_rows = 0;
  std::int32_t to_bytes = 0;
};

/// `shared`: kSide x kSide bytes of the warp's own. No two words of an access share a bank: rows of transposed bytes
/// are exchanged in pairs, and halves of a row, from one 16 rows to the next.
class SquareTransposer {
 public:
  __device__ SquareTransposer(const Square& of, std::byte* shared)
      : square(of), staged_(reinterpret_cast<std::uint32_t*>(shared)), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    uint4 rows[kHalves][4];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = h * 32 + lane_ / 4 * 4 + j;
        rows[h][j] = uint4{};
        if (row < square.rows) {
          rows[h][j] = *reinterpret_cast<const uint4*>(square.from + row * square.from_pitch + lane_ % 4 * 16);
        }
      }
    }
    __syncwarp();  // Nobody reads the square before it any more.
#pragma unroll
    for (int h = 0; h < kHalves; ++h) stage(h, rows[h]);
    __syncwarp();
    store();
  }

 private:
  static constexpr int kHalves = 2;

  /// Word `word` of transposed row `row`.
  static __device__ int place(int row, int word) {
    const int sixteen = row / 16;
    return (row ^ (sixteen & 1)) * (Square::kSide / 4) + (word ^ (sixteen / 2 * 8));
  }

  __device__ void stage(int half, const uint4 (&rows)[4]) const {
    const auto word_of = [](const uint4& row, int w) {
      return w == 0 ? row.x : w == 1 ? row.y : w == 2 ? row.z : row.w;
    };
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      std::uint32_t words[4] = {word_of(rows[0], w), word_of(rows[1], w), word_of(rows[2], w), word_of(rows[3], w)};
      transpose4(words);
#pragma unroll
      for (int k = 0; k < 4; ++k) staged_[place(lane_ % 4 * 16 + w * 4 + k, half * 8 + lane_ / 4)] = words[k];
    }
  }

  __device__ void store() const {
    const int unit = lane_ % 4;
    if (unit * 16 >= square.to_bytes) return;
#pragma unroll
    for (int i = 0; i < Square::kSide / 8; ++i) {
      const int row = i * 8 + lane_ / 4;
      if (row >= square.to_rows) return;
      *reinterpret_cast<uint4*>(square.to + row * square.to_pitch + unit * 16) =
          *reinterpret_cast<const uint4*>(staged_ + place(row, unit * 4));
    }
  }

  const Square& square;
  std::uint32_t* staged_;
  int lane_;
};

}  // namespace mxflash::cuda
