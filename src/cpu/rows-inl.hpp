// Rows of tensors in and out: a block of tokens with everything that decides its codes, and blocks of results.
#if defined(MXFLASH_CPU_ROWS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_ROWS_INL
#undef MXFLASH_CPU_ROWS_INL
#else
#define MXFLASH_CPU_ROWS_INL
#endif

#include "cpu/kernels.hpp"
#include "cpu/tokens-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

inline constexpr std::int64_t kBlockRows = 32;
inline constexpr std::int64_t kStripRows = kStripBlocks * kBlockRows;

HWY_INLINE std::size_t padded_dims(std::int64_t dims) {
  return (static_cast<std::size_t>(dims) + kBlockSize - 1) / kBlockSize * kBlockSize;
}

/// Largest |x| of the 128 tokens, all dims, that share nvfp4's second level with the block.
HWY_INLINE float strip_maximum(const Plan& plan, const TokenOperand& operand, const TokenPlace& place,
                               std::int64_t length, Workspace& work) {
  TokenBlock block;
  block.x = work.block.data();
  float largest = 0;
  const std::int64_t first = place.row - place.row % kStripRows;
  for (std::int64_t row = first; row < HWY_MIN(first + kStripRows, length); row += kBlockRows) {
    const TokenPlace at{place.first + row - place.row, row, place.head,
                        static_cast<std::size_t>(HWY_MIN(kBlockRows, length - row))};
    load_block(operand, plan.rotation_shift, at, work.rows.data(), block);
    float maxima[kBlockSize];
    lane_maxima(block.x, 0, block.dims, block.lanes, maxima);
    spread_maximum(maxima, kBlockSize);
    largest = HWY_MAX(largest, maxima[0]);
  }
  return largest;
}

/// A block of tokens before it is quantized, and what else decides its codes.
struct Fresh {
  TokenBlock block;
  RandomPlace random;
  float strip_maximum = 0;
};

inline constexpr std::int64_t kLine = 64;

HWY_INLINE std::int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// Rows of the block of tokens at `place`: those of one head often lie a page apart, where the hardware foresees none.
HWY_INLINE void fetch_rows(const TensorView& tensor, const TokenPlace& place, std::size_t begin, std::size_t end) {
  if (tensor.stride[2] != 1) return;
  const std::int64_t size = bytes_of(tensor.dtype);
  const std::byte* head = tensor.data + place.head * tensor.stride[1] * size;
  for (std::size_t row = begin; row < HWY_MIN(end, place.count); ++row) {
    const std::byte* from = head + (place.first + static_cast<std::int64_t>(row)) * tensor.stride[0] * size;
    for (std::int64_t byte = 0; byte < tensor.shape[2] * size; byte += kLine) __builtin_prefetch(from + byte, 0, 2);
  }
}

/// Fetches the rows that `store_block` will write.
HWY_INLINE void fetch_output(const Output& out, std::int64_t dims, std::int64_t heads, const TokenPlace& place) {
  const std::int64_t bytes = dims * bytes_of(out.dtype);
  for (std::int64_t row = place.first; row < place.first + static_cast<std::int64_t>(place.count); ++row) {
    const std::byte* to = out.data + (row * heads + place.head) * bytes;
    for (std::int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(to + byte, 1, 2);
  }
}

/// Reads one block of a document's `length` tokens.
HWY_INLINE void read_block(const Plan& plan, const TokenOperand& operand, const TokenPlace& place, std::int64_t length,
                           Workspace& work, Fresh& fresh) {
  fresh.block.x = work.block.data();
  if (operand.operand.second_level == SecondLevel::adaptive && operand.operand.block.rows != 1) {
    fresh.strip_maximum = strip_maximum(plan, operand, place, length, work);
  }
  load_block(operand, plan.rotation_shift, place, work.rows.data(), fresh.block);
  fresh.random = {plan.seed, static_cast<std::uint32_t>(operand.stream), static_cast<std::uint32_t>(place.head),
                  static_cast<std::int32_t>(place.row)};
}

/// One block of tokens, quantized, exponents apart.
HWY_INLINE void make_block(const Plan& plan, const TokenOperand& operand, const TokenPlace& place, std::int64_t length,
                           Workspace& work, TokenBlock& block) {
  Fresh fresh;
  read_block(plan, operand, place, length, work, fresh);
  quantize_block(operand, fresh.random, fresh.strip_maximum, fresh.block);
  block = fresh.block;
}

/// In place: takes the gradient of a rotated row back to the row.
HWY_INLINE void unrotate(const Plan& plan, float* x, std::size_t dims) {
  if (plan.rotation_shift < 0) return;
  hadamard(x, dims, kBlockSize, 1.0F);
  scale_all(x, dims, hn::GetLane(pow2(hn::Set(kI, -plan.rotation_shift))));
}

HWY_INLINE void store_row(const Output& out, std::int64_t offset, const float* row, std::size_t dims) {
#if HWY_TARGET != HWY_SCALAR
  if (out.dtype == DType::bf16 && dims % kLanes == 0) {
    const hn::Rebind<std::uint16_t, I32> half;
    auto* to = reinterpret_cast<std::uint16_t*>(out.data) + offset;
    for (std::size_t d = 0; d < dims; d += kLanes) {
      const VU bits = hn::ShiftRight<16>(hn::BitCast(kU, round_bf16(hn::LoadU(kF, row + d))));
      hn::StoreU(hn::DemoteTo(half, hn::BitCast(kI, bits)), half, to + d);
    }
    return;
  }
#endif
  convert_row(out.dtype, row, static_cast<std::int64_t>(dims), out.data, offset);
}

/// x [dims][32] to the rows of tokens [first, first + count) of a head; rows marked `nan` become NaN.
HWY_INLINE void store_block(const Output& out, const float* x, std::size_t dims, std::int64_t heads,
                            const TokenPlace& place, const std::int32_t* nan, float* rows) {
  transpose(reinterpret_cast<const std::uint32_t*>(x), kBlockSize, dims, kBlockSize,
            reinterpret_cast<std::uint32_t*>(rows), dims);
  for (std::size_t lane = 0; lane < place.count; ++lane) {
    float* row = rows + lane * dims;
    if (nan[lane] != 0) {
      for (std::size_t d = 0; d < dims; ++d) row[d] = __builtin_nanf("");
    }
    const std::int64_t token = place.first + static_cast<std::int64_t>(lane);
    store_row(out, (token * heads + place.head) * static_cast<std::int64_t>(dims), row, dims);
  }
}

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
