// dQ in FP16: the power of two that each row is multiplied by, and the sum over tiles of 128 keys.
#if defined(MXFLASH_CPU_PRESCALE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef MXFLASH_CPU_PRESCALE_INL
#undef MXFLASH_CPU_PRESCALE_INL
#else
#define MXFLASH_CPU_PRESCALE_INL
#endif

#include "cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {

/// p of docs/numerics.md, section 4, of one document and key/value head.
class DqPrescale {
 public:
  DqPrescale(const Plan& plan, const Item& item, Workspace& work)
      : plan_(plan), item_(item), document_(*item.document), work_(work) {}

  [[nodiscard]] bool is_on() const { return plan_.recipe->dq_accumulation != DqAccumulation::f32; }

  /// Running maxima over all keys of the document, whichever the item sees.
  void read_keys() {
    double* v_most = work_.v_most.require(static_cast<std::size_t>(document_.k_length) + 1);
    double* k_most = work_.k_most.require(static_cast<std::size_t>(document_.k_length) + 1);
    v_most[0] = k_most[0] = 0;
    for (std::int64_t key = 0; key < document_.k_length; key += kBlockRows) {
      const TokenPlace place{document_.k_begin + key, key, item_.kv_head, count_of(document_.k_length - key)};
      const TokenSizes v = sizes(plan_.v_dp, place, document_.k_length);
      const TokenSizes k = sizes(plan_.k_dq, place, document_.k_length);
      const TokenSizes k_cut = plan_.has_dq_cut ? sizes(plan_.k_dq_cut, place, document_.k_length) : k;
      for (std::size_t lane = 0; lane < place.count; ++lane) {
        const std::size_t at = static_cast<std::size_t>(key) + lane;
        v_most[at + 1] = HWY_MAX(v_most[at], v.norm[lane]);
        k_most[at + 1] = HWY_MAX(k_most[at], HWY_MAX(k.largest[lane], k_cut.largest[lane]));
      }
    }
  }

  /// The largest of dO and dLSE of all queries, where they count.
  void read_queries(std::int64_t head) {
    dout_most_ = dlse_most_ = 0;
    if (plan_.recipe->dq_accumulation != DqAccumulation::f16_sequence) return;
    for (std::int64_t query = 0; query < document_.q_length; query += kBlockRows) {
      const TokenPlace place{document_.q_begin + query, query, head, count_of(document_.q_length - query)};
      const TokenSizes dout = sizes(plan_.dout_dp, place, document_.q_length);
      for (std::size_t lane = 0; lane < place.count; ++lane) dout_most_ = HWY_MAX(dout_most_, dout.norm[lane]);
      if (plan_.dlse == nullptr) continue;
      float dlse[kBlockSize];
      load_tokens(*plan_.dlse, place.first, static_cast<std::int64_t>(place.count), head, dlse);
      for (std::size_t lane = 0; lane < place.count; ++lane) {
        const auto size = static_cast<double>(__builtin_fabsf(dlse[lane]));
        if (size <= kLargest) dlse_most_ = HWY_MAX(dlse_most_, size);
      }
    }
  }

  /// p of a block's rows: their dO, the ends of what they see, and dLSE.
  void find(const TokenBlock& dout, const std::int32_t* ends, const float* dlse) {
    const double scale = __builtin_fabs(plan_.softmax);
    const auto all = static_cast<std::size_t>(document_.k_length);
    const TokenSizes own = token_sizes(dout.x, dout.dims, dout.exponent, plan_.dout_dp.tensor_scale);
    for (std::size_t lane = 0; lane < kBlockSize; ++lane) {
      const bool causal = plan_.recipe->dq_accumulation == DqAccumulation::f16_causal;
      const std::size_t end = causal ? static_cast<std::size_t>(ends[lane]) : all;
      const double of_dout = causal ? own.norm[lane] : dout_most_;
      const double of_dlse = causal ? static_cast<double>(__builtin_fabsf(dlse[lane])) : dlse_most_;
      const double by_v = 2 * scale * work_.v_most.data()[end] * work_.k_most.data()[end];
      exponent_[lane] = dq_exponent(of_dout * by_v + of_dlse * (scale * work_.k_most.data()[end]));
    }
  }

  /// sum [dims][32] += part, each of its numbers times `factor` 2^p and all of it in FP16.
  void add(const float* part, float factor, std::size_t dims, float* sum) const {
    const NearestRounder round(round_to_f16());
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const Powers up = powers(hn::LoadU(kI, exponent_ + lane));
      for (std::size_t d = 0; d < dims; ++d) {
        const VF value = hn::Mul(hn::Load(kF, part + d * kBlockSize + lane), hn::Set(kF, factor));
        const VF scaled = round(hn::Mul(hn::Mul(value, up.first), up.second));
        float* at = sum + d * kBlockSize + lane;
        hn::Store(round(hn::Add(hn::Load(kF, at), scaled)), kF, at);
      }
    }
  }
  /// sum [dims][32] times 2^-p.
  void take_back(std::size_t dims, float* sum) const {
    for (std::size_t lane = 0; lane < kBlockSize; lane += kLanes) {
      const Powers down = powers(hn::Neg(hn::LoadU(kI, exponent_ + lane)));
      for (std::size_t d = 0; d < dims; ++d) {
        float* at = sum + d * kBlockSize + lane;
        hn::Store(hn::Mul(hn::Mul(hn::Load(kF, at), down.first), down.second), kF, at);
      }
    }
  }

 private:
  static constexpr double kLargest = 3.40282347e38;
  /// 2^p in two steps: it may lie outside FP32 where what it multiplies does not.
  struct Powers {
    VF first;
    VF second;
  };
  static HWY_INLINE Powers powers(VI exponent) {
    const VI half = hn::ShiftRight<1>(exponent);
    return {pow2(half), pow2(hn::Sub(exponent, half))};
  }
  static std::size_t count_of(std::int64_t left) { return static_cast<std::size_t>(HWY_MIN(kBlockRows, left)); }

  TokenSizes sizes(const TokenOperand& operand, const TokenPlace& place, std::int64_t length) {
    TokenBlock block;
    make_block(plan_, operand, place, length, work_, block);
    return token_sizes(block.x, block.dims, block.exponent, operand.tensor_scale);
  }

  const Plan& plan_;
  const Item& item_;
  const Document& document_;
  Workspace& work_;
  double dout_most_ = 0;
  double dlse_most_ = 0;
  std::int32_t exponent_[kBlockSize] = {};
};

}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
