// The fused quantizer: a block of 32 tokens of one head is read once, turned so that tokens lie in the lanes, rotated
// and quantized in place.
#if defined(MXFLASH_CPU_TOKENS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_TOKENS_INL
#undef MXFLASH_CPU_TOKENS_INL
#else
#define MXFLASH_CPU_TOKENS_INL
#endif

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// Where a block of tokens lies.
struct TokenPlace {
  std::int64_t first = 0;  ///< Token of the first lane, in the tensor.
  std::int64_t row = 0;    ///< The same in its document.
  std::int64_t head = 0;
  std::size_t count = 0;  ///< Lanes in use, 1 to 32; the others are zero.
};

struct TokenBlock {
  float* x = nullptr;  ///< [dims][32]
  std::size_t dims = 0;
  std::size_t lanes = kBlockSize;          ///< Those that may hold tokens: whole vectors.
  std::int32_t exponent[kBlockSize] = {};  ///< The folding exponent, or nvfp4's second level; else 0.
  std::int32_t poisoned[kBlockSize] = {};
  bool any_poisoned = false;
  float* scale = nullptr;  ///< [blocks][32]: x shall hold codes where blocks do not fold, their scales be here.
  std::size_t width = 0;   ///< Dims of a block.
  float largest = 0;       ///< Of |x| before quantization, without poisoned tokens.
};

inline constexpr std::size_t kLargestDims = 256;
inline constexpr float kLargestBf16 = 0x1.FEp127F;

HWY_INLINE void widen_row(const TensorView& tensor, std::int64_t token, std::int64_t head, float* row) {
  if (tensor.stride[2] != 1) {
    load_row(tensor, token, head, row);
    return;
  }
#if HWY_TARGET != HWY_SCALAR
  const std::int64_t offset = token * tensor.stride[0] + head * tensor.stride[1];
  const auto dims = static_cast<std::size_t>(tensor.shape[2]);
  using Half = hn::Rebind<std::uint16_t, U32>;
  if (tensor.dtype == DType::bf16 && dims % kLanes == 0) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(tensor.data) + offset;
    for (std::size_t d = 0; d < dims; d += kLanes) {
      const VU wide = hn::PromoteTo(kU, hn::LoadU(Half(), from + d));
      hn::StoreU(hn::BitCast(kF, hn::ShiftLeft<16>(wide)), kF, row + d);
    }
    return;
  }
  if (tensor.dtype == DType::f32 && dims % kLanes == 0) {
    const auto* from = reinterpret_cast<const float*>(tensor.data) + offset;
    for (std::size_t d = 0; d < dims; d += kLanes) hn::StoreU(hn::LoadU(kF, from + d), kF, row + d);
    return;
  }
#endif
  load_row(tensor, token, head, row);
}

/// log2(kRadix) stages of butterflies from distance `half` on, of x times a power of two.
template <std::size_t kRadix>
HWY_INLINE void butterflies(float* x, std::size_t dims, std::size_t lanes, std::size_t half, VF factor) {
  for (std::size_t start = 0; start < dims; start += kRadix * half) {
    for (std::size_t d = start; d < start + half; ++d) {
      for (std::size_t lane = 0; lane < lanes; lane += kLanes) {
        float* at = x + d * kBlockSize + lane;
        VF v[kRadix];
        for (std::size_t i = 0; i < kRadix; ++i) v[i] = hn::Mul(hn::Load(kF, at + i * half * kBlockSize), factor);
        for (std::size_t step = 1; step < kRadix; step *= 2) {
          for (std::size_t i = 0; i < kRadix; ++i) {
            if ((i & step) != 0) continue;
            const VF a = v[i];
            const VF b = v[i + step];
            v[i] = hn::Add(a, b);
            v[i + step] = hn::Sub(a, b);
          }
        }
        for (std::size_t i = 0; i < kRadix; ++i) hn::Store(v[i], kF, at + i * half * kBlockSize);
      }
    }
  }
}

/// Rows of x times a power of two, by H: the same additions in the same order as the reference's, token by token.
HWY_INLINE void hadamard(float* x, std::size_t dims, std::size_t lanes, float scale) {
  VF factor = hn::Set(kF, scale);
  for (std::size_t half = 1; half < dims;) {
    const std::size_t left = dims / half;
    if (left >= 8) {
      butterflies<8>(x, dims, lanes, half, factor);
      half *= 8;
    } else if (left == 4) {
      butterflies<4>(x, dims, lanes, half, factor);
      half *= 4;
    } else {
      butterflies<2>(x, dims, lanes, half, factor);
      half *= 2;
    }
    factor = hn::Set(kF, 1.0F);
  }
}

HWY_INLINE void scale_all(float* x, std::size_t dims, float factor) {
  for (std::size_t i = 0; i < dims * kBlockSize; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(kF, x + i), hn::Set(kF, factor)), kF, x + i);
  }
}

/// x[d][lane] *= factor[lane].
HWY_INLINE void scale_lanes(float* x, std::size_t dims, const float* factor) {
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    const VF f = hn::LoadU(kF, factor + lane);
    for (std::size_t d = 0; d < dims; ++d) {
      float* at = x + d * kBlockSize + lane;
      hn::Store(hn::Mul(hn::Load(kF, at), f), kF, at);
    }
  }
}

HWY_INLINE void poison(TokenBlock& block) {
  block.any_poisoned = false;
  for (std::int32_t& flag : block.poisoned) flag = 0;
  VI most = hn::Zero(kI);
  for (std::size_t lane = 0; lane < block.lanes; lane += kLanes) {
    VI largest = hn::Zero(kI);
    for (std::size_t d = 0; d < block.dims; ++d) {
      const VI bits = hn::BitCast(kI, hn::Load(kF, block.x + d * kBlockSize + lane));
      largest = hn::Max(largest, hn::And(bits, hn::Set(kI, 0x7FFFFFFF)));
    }
    const auto bad = hn::Gt(largest, hn::Set(kI, 0x7F7FFFFF));
    hn::StoreU(hn::IfThenElseZero(bad, hn::Set(kI, 1)), kI, block.poisoned + lane);
    most = hn::Max(most, hn::IfThenZeroElse(bad, largest));
    if (hn::AllFalse(kI, bad)) continue;
    block.any_poisoned = true;
    for (std::size_t d = 0; d < block.dims; ++d) {
      float* at = block.x + d * kBlockSize + lane;
      hn::Store(hn::IfThenZeroElse(hn::RebindMask(kF, bad), hn::Load(kF, at)), kF, at);
    }
  }
  block.largest = __builtin_bit_cast(float, hn::GetLane(hn::MaxOfLanes(kI, most)));
}

/// Fills block.x from the tensor, rotated where the operand asks for it; poisoned tokens are zero.
HWY_INLINE void load_block(const TokenOperand& operand, int rotation_shift, const TokenPlace& place, float* rows,
                           TokenBlock& block) {
  const TensorView& tensor = *operand.tensor;
  block.dims = static_cast<std::size_t>(tensor.shape[2]);
  for (std::size_t lane = 0; lane < place.count; ++lane) {
    widen_row(tensor, place.first + static_cast<std::int64_t>(lane), place.head, rows + lane * block.dims);
  }
  // Few tokens, as one-token documents have: only as many vectors as they take.
  const std::size_t used = (place.count + 3) / 4 * 4;
  block.lanes = (place.count + kLanes - 1) / kLanes * kLanes;
  for (std::size_t i = place.count * block.dims; i < used * block.dims; ++i) rows[i] = 0.0F;
  if (used < kBlockSize) {
    for (std::size_t i = 0; i < block.dims * kBlockSize; i += kLanes) hn::Store(hn::Zero(kF), kF, block.x + i);
  }
  transpose(reinterpret_cast<const std::uint32_t*>(rows), block.dims, used, block.dims,
            reinterpret_cast<std::uint32_t*>(block.x), kBlockSize);
  if (operand.rotate) {
    hadamard(block.x, block.dims, block.lanes, hn::GetLane(pow2(hn::Set(kI, -rotation_shift))));
  }
  poison(block);
}

/// Largest |x| by lane over rows [begin, end).
HWY_INLINE void lane_maxima(const float* x, std::size_t begin, std::size_t end, std::size_t lanes, float* maxima) {
  for (std::size_t lane = lanes; lane < kBlockSize; ++lane) maxima[lane] = 0.0F;
  for (std::size_t lane = 0; lane < lanes; lane += kLanes) {
    VF largest = hn::Zero(kF);
    for (std::size_t d = begin; d < end; ++d) {
      largest = hn::Max(largest, hn::Abs(hn::Load(kF, x + d * kBlockSize + lane)));
    }
    hn::StoreU(largest, kF, maxima + lane);
  }
}

/// Replaces every lane of `values` by the largest of its group of 16 or 32 lanes.
HWY_INLINE void spread_maximum(float* values, std::size_t size) {
  float largest[2];
  for (std::size_t half = 0; half < 2; ++half) {
    VF most = hn::Zero(kF);
    for (std::size_t i = 0; i < kBlockSize / 2; i += kLanes) {
      most = hn::Max(most, hn::LoadU(kF, values + half * kBlockSize / 2 + i));
    }
    largest[half] = hn::GetLane(hn::MaxOfLanes(kF, most));
  }
  if (size == kBlockSize) largest[0] = largest[1] = HWY_MAX(largest[0], largest[1]);
  for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
    hn::StoreU(hn::Set(kF, largest[2 * i / kBlockSize]), kF, values + i);
  }
}

/// Largest |x| of one row, for all lanes.
HWY_INLINE void row_maximum(const float* x, std::size_t lanes, float* maxima) {
  VF most = hn::Zero(kF);
  for (std::size_t lane = 0; lane < lanes; lane += kLanes) most = hn::Max(most, hn::Abs(hn::Load(kF, x + lane)));
  most = hn::MaxOfLanes(kF, most);
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) hn::StoreU(most, kF, maxima + lane);
}

/// Scales of a vector of blocks.
struct Scales {
  VF encode;  ///< Multiplies before rounding; of nvfp4, divides.
  VF decode;
  VI exponent;  ///< Of power-of-two scales.
};

/// Powers of two. Subnormal maxima have the least exponent as well: every format's limit is at least 4.
HWY_INLINE Scales power_scales(VF maximum, const ScaleLimit& limit) {
  const VI bits = hn::BitCast(kI, maximum);
  const VI above = hn::IfThenElseZero(hn::Gt(hn::And(bits, hn::Set(kI, 0x7FFFFF)), hn::Set(kI, limit.limit_mantissa)),
                                      hn::Set(kI, 1));
  VI exponent = hn::Add(hn::Sub(hn::ShiftRight<23>(bits), hn::Set(kI, 127 + limit.limit_exponent)), above);
  exponent = hn::Min(hn::Max(exponent, hn::Set(kI, -127)), hn::Set(kI, 127));
  return {pow2(hn::Neg(exponent)), pow2(exponent), exponent};
}

/// Scales from the blocks' maxima, as block_scale in quantize/scales.hpp has them.
class ScaleMaker {
 public:
  explicit ScaleMaker(const Operand& operand)
      : nvfp4_(operand.encoding == Encoding::nvfp4), limit_(scale_limit(operand)), e4m3_(round_to(Encoding::e4m3)) {}

  HWY_INLINE Scales operator()(VF maximum) const {
    return nvfp4_ ? with_mantissa(maximum) : power_scales(maximum, limit_);
  }

 private:
  /// A sixth rounded to FP32 and then to E4M3 is a sixth rounded once: no FP32 number's sixth lies so near a tie of
  /// E4M3 that the first rounding could reach it.
  HWY_INLINE Scales with_mantissa(VF maximum) const {
    const VF sixth = e4m3_(hn::Div(maximum, hn::Set(kF, 6.0F)));
    const MF zero = hn::Eq(maximum, hn::Zero(kF));
    const VF scale = hn::IfThenZeroElse(zero, hn::Max(sixth, hn::Set(kF, 0x1p-9F)));
    return {hn::IfThenElse(zero, hn::Set(kF, 1.0F), scale), scale, hn::Zero(kI)};
  }

  bool nvfp4_;
  ScaleLimit limit_;
  NearestRounder e4m3_;
};

/// Rounds to what codes decode to.
class Encoder {
 public:
  Encoder(const Operand& operand, const RandomPlace& random)
      : nearest_(round_to(operand.encoding)),
        stochastic_(round_to(operand.encoding)),
        random_(random),
        divides_(operand.encoding == Encoding::nvfp4 || operand.block.rows == 0),
        by_chance_(operand.rounding == Rounding::stochastic) {}

  /// Lanes [lane, lane + kLanes) of rows [begin, end), in place; row d is column d + `column` of the operand.
  HWY_INLINE void run(float* x, std::size_t begin, std::size_t end, std::size_t lane, VF encode, VF decode,
                      std::uint32_t column) const {
    for (std::size_t d = begin; d < end; ++d) {
      float* at = x + d * kBlockSize + lane;
      const VF scaled = divides_ ? hn::Div(hn::Load(kF, at), encode) : hn::Mul(hn::Load(kF, at), encode);
      const VF code = by_chance_
                          ? stochastic_(scaled, random_bits(random_, lane, column + static_cast<std::uint32_t>(d)))
                          : nearest_(scaled);
      hn::Store(hn::Mul(code, decode), kF, at);
    }
  }

 private:
  NearestRounder nearest_;
  StochasticRounder stochastic_;
  RandomPlace random_;
  bool divides_;
  bool by_chance_;
};

/// What quantize_rows leaves besides the values.
struct BlockScales {
  std::int32_t* exponent = nullptr;  ///< [32], of the last row of blocks.
  std::size_t lanes = kBlockSize;    ///< In use: only these are read and written.
  float* decode = nullptr;           ///< [blocks][32]: the values are codes; null: they are codes times scales.
};

/// Quantizes x [rows][32] in place in blocks of `width` rows and `height` lanes.
HWY_INLINE void quantize_rows(const Operand& operand, const RandomPlace& random, std::uint32_t column, float* x,
                              std::size_t rows, std::size_t width, std::size_t height, const BlockScales& out) {
  const ScaleMaker make(operand);
  const Encoder encoder(operand, random);
  float maxima[kBlockSize];
  for (std::size_t begin = 0; begin < rows; begin += width) {
    const std::size_t end = HWY_MIN(begin + width, rows);
    if (width == 1 && height == kBlockSize) {
      row_maximum(x + begin * kBlockSize, out.lanes, maxima);
    } else {
      lane_maxima(x, begin, end, out.lanes, maxima);
      if (height > 1) spread_maximum(maxima, height);
    }
    for (std::size_t lane = 0; lane < out.lanes; lane += kLanes) {
      const Scales scales = make(hn::LoadU(kF, maxima + lane));
      if (out.exponent != nullptr) hn::StoreU(scales.exponent, kI, out.exponent + lane);
      VF decode = scales.decode;
      if (out.decode != nullptr) {
        hn::StoreU(decode, kF, out.decode + begin / width * kBlockSize + lane);
        decode = hn::Set(kF, 1.0F);
      }
      encoder.run(x, begin, end, lane, scales.encode, decode, column);
    }
  }
}

/// Divides by nvfp4's second level: per token, or one over all rows of the strip, given as `strip_maximum`.
HWY_INLINE void apply_second_level(const Operand& operand, float strip_maximum, TokenBlock& block) {
  if (operand.second_level != SecondLevel::adaptive) return;
  float maxima[kBlockSize];
  lane_maxima(block.x, 0, block.dims, block.lanes, maxima);
  if (operand.block.rows != 1) {
    for (float& maximum : maxima) maximum = strip_maximum;
  }
  second_levels(kBlockSize, maxima, block.exponent);
  float factor[kBlockSize];
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    hn::StoreU(pow2(hn::Neg(hn::LoadU(kI, block.exponent + lane))), kF, factor + lane);
  }
  scale_lanes(block.x, block.dims, factor);
}

/// In blocks along dims: codes, scales apart, where block.scale is there to take them.
HWY_INLINE void quantize_scaled(const Operand& operand, const RandomPlace& random, TokenBlock& block) {
  const bool folds = operand.block.columns == 0;
  block.width = folds ? block.dims : static_cast<std::size_t>(operand.block.columns);
  float unit[kBlockSize];  // A folding operand's codes stay codes: its scale is in the exponents.
  BlockScales out;
  out.lanes = block.lanes;
  out.decode = folds ? unit : block.scale;
  if (folds) {
    for (std::size_t lane = block.lanes; lane < kBlockSize; ++lane) block.exponent[lane] = -127;  // as zero tokens
    out.exponent = block.exponent;
  } else if (block.scale != nullptr) {
    for (std::size_t i = 0; i < (block.dims + block.width - 1) / block.width * kBlockSize; ++i) block.scale[i] = 0.0F;
  }
  quantize_rows(operand, random, 0, block.x, block.dims, block.width, static_cast<std::size_t>(operand.block.rows),
                out);
}

/// Codes' values in place of x, as `quantize` gives them.
HWY_INLINE void quantize_block(const TokenOperand& operand, const RandomPlace& random, float strip_maximum,
                               TokenBlock& block) {
  for (std::int32_t& exponent : block.exponent) exponent = 0;
  const Operand& how = operand.operand;
  if (how.encoding == Encoding::f32) return;
  if (how.encoding == Encoding::bf16) {
    for (std::size_t i = 0; i < block.dims * kBlockSize; i += kLanes) {
      // Not Inf, which would be NaN under a masked weight of zero.
      const VF held =
          hn::Max(hn::Min(hn::Load(kF, block.x + i), hn::Set(kF, kLargestBf16)), hn::Set(kF, -kLargestBf16));
      hn::Store(round_bf16(held), kF, block.x + i);
    }
    return;
  }
  if (how.block.rows == 0) {  // tensor-wide
    const Encoder encoder(how, random);
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      encoder.run(block.x, 0, block.dims, lane, hn::Set(kF, operand.tensor_scale), hn::Set(kF, 1.0F), 0);
    }
    return;
  }
  apply_second_level(how, strip_maximum, block);
  quantize_scaled(how, random, block);
}

/// Multiplies the exponents in.
HWY_INLINE void apply_exponents(TokenBlock& block) {
  float factor[kBlockSize];
  bool any = false;
  for (const std::int32_t exponent : block.exponent) any = any || exponent != 0;
  if (!any) return;
  for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
    hn::StoreU(pow2(hn::LoadU(kI, block.exponent + lane)), kF, factor + lane);
  }
  scale_lanes(block.x, block.dims, factor);
}

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
