#include "cpu/kernels.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cpp"
#include "hwy/foreach_target.h"
//
#include "cpu/backward-inl.hpp"
#include "cpu/forward-inl.hpp"
#include "cpu/int8_output-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mxflash::cpu::HWY_NAMESPACE {
namespace {

template <class Multiply>
void forward(const Plan& plan, const Item& item, const Forward& out, Workspace& work, Counts& counts) {
  ForwardUnit<Multiply, ValueScores<Multiply>, ValueOutput<Multiply>>(plan, item, work, counts).run(out);
}

template <class Multiply>
void backward(const Plan& plan, const Item& item, const Backward& out, Workspace& work, Counts& counts) {
  BackwardUnit<Multiply, ValueScores<Multiply>>(plan, item, work, counts).run(out);
}

#if HWY_TARGET == HWY_AVX3

/// Whether 4-bit codes multiply faster in int8 than their values do. Forward and backward must decide alike: sums in
/// another order would make other codes of P.
bool takes_codes(const Plan& plan, FmaMultiply /*values*/) { return plan.int8_scores; }
bool takes_codes(const Plan& plan, DotMultiply /*values*/) { return plan.int8_scores && plan.int8_output; }

/// Codes where they pay, values elsewhere.
template <class Multiply>
void forward_codes(const Plan& plan, const Item& item, const Forward& out, Workspace& work, Counts& counts) {
  if (!takes_codes(plan, Multiply())) {
    forward<Multiply>(plan, item, out, work, counts);
  } else if (plan.int8_output) {
    ForwardUnit<Multiply, Int8Scores, Int8Output>(plan, item, work, counts).run(out);
  } else {
    ForwardUnit<Multiply, Int8Scores, ValueOutput<Multiply>>(plan, item, work, counts).run(out);
  }
}

template <class Multiply>
void backward_codes(const Plan& plan, const Item& item, const Backward& out, Workspace& work, Counts& counts) {
  if (takes_codes(plan, Multiply())) {
    BackwardUnit<Multiply, Int8Scores>(plan, item, work, counts).run(out);
  } else {
    backward<Multiply>(plan, item, out, work, counts);
  }
}

#endif

void quantize(const Plan& plan, const TokenOperand& operand, Side side, const Item& item, std::int64_t head, float* x,
              std::int32_t* exponents, Workspace& work) {
  const Document& document = *item.document;
  const std::int64_t begin = side == Side::query ? document.q_begin : document.k_begin;
  const std::int64_t length = side == Side::query ? document.q_length : document.k_length;
  const std::int64_t row = item.query_begin;
  work.block.require(kLargestDims * kBlockSize);
  work.rows.require(kLargestDims * kBlockSize);
  TokenBlock block;
  make_block(plan, operand, {begin + row, row, head, static_cast<std::size_t>(HWY_MIN(kBlockRows, length - row))},
             length, work, block);
  for (std::size_t i = 0; i < block.dims * kBlockSize; ++i) x[i] = block.x[i];
  for (std::size_t lane = 0; lane < kBlockSize; ++lane) exponents[lane] = block.exponent[lane];
}

template <class Multiply>
Kernels kernels_of() {
  return {forward<Multiply>, backward<Multiply>, quantize};
}

Kernels fma_kernels() { return kernels_of<FmaMultiply>(); }
#if HWY_TARGET == HWY_AVX3
Kernels amx_kernels() { return kernels_of<AmxMultiply>(); }
Kernels bf16_kernels() { return {forward_codes<DotMultiply>, backward_codes<DotMultiply>, quantize}; }
Kernels vnni_kernels() { return {forward_codes<FmaMultiply>, backward_codes<FmaMultiply>, quantize}; }
#endif

}  // namespace
}  // namespace mxflash::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "cpu/features.hpp"

namespace mxflash::cpu {
namespace {

template <std::int64_t Target>
bool has() {
  return (hwy::SupportedTargets() & Target) != 0;
}

bool always() { return true; }

std::vector<InstructionSet> make_sets() {
  std::vector<InstructionSet> sets;
#if HWY_TARGETS & HWY_AVX3
  sets.push_back({"amx", "AMX tiles of BF16", "a CPU with AMX-BF16 and AVX-512, and a system that lets programs use it",
                  has_amx, false, N_AVX3::amx_kernels()});
  sets.push_back({"avx512bf16", "int8 dot products of 4-bit codes, BF16 dot products elsewhere",
                  "a CPU with AVX-512 BF16 and VNNI", has_bf16, false, N_AVX3::bf16_kernels()});
  sets.push_back({"avx512vnni", "int8 dot products of 4-bit codes, FP32 multiply-adds elsewhere",
                  "a CPU with AVX-512 VNNI", has_vnni, true, N_AVX3::vnni_kernels()});
  sets.push_back({"avx512", "FP32 multiply-adds, 16 lanes", "a CPU with AVX-512 (F, BW, CD, DQ, VL)", has<HWY_AVX3>,
                  true, N_AVX3::fma_kernels()});
#endif
#if HWY_TARGETS & HWY_AVX2
  sets.push_back(
      {"avx2", "FP32 multiply-adds, 8 lanes", "a CPU with AVX2 and FMA", has<HWY_AVX2>, true, N_AVX2::fma_kernels()});
#endif
#if HWY_TARGETS & HWY_NEON
  sets.push_back(
      {"neon", "FP32 multiply-adds, 4 lanes", "a CPU with NEON and AES", has<HWY_NEON>, true, N_NEON::fma_kernels()});
#endif
  // Highway takes one of the two, as the compiler allows.
#if HWY_TARGETS & HWY_EMU128
  sets.push_back({"scalar", "FP32 without vector instructions", "", always, true, N_EMU128::fma_kernels()});
#elif HWY_TARGETS & HWY_SCALAR
  sets.push_back({"scalar", "FP32 without vector instructions", "", always, true, N_SCALAR::fma_kernels()});
#endif
  return sets;
}

}  // namespace

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = make_sets();
  return sets;
}

}  // namespace mxflash::cpu
#endif  // HWY_ONCE
