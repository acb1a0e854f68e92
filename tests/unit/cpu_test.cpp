// The CPU engine against the reference, on every instruction set of this machine: codes bit for bit, outputs within
// what FP32 sums can move.
#include <algorithm>
#include <bit>
#include <cmath>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "cpu/engine.hpp"
#include "cpu/kernels.hpp"
#include "mxflash/quantize.hpp"
#include "mxflash/safetensors.hpp"
#include "recipe/roles.hpp"
#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::Distribution;

// ---- Codes ----

std::vector<cpu::InstructionSet> sets_here() {
  std::vector<cpu::InstructionSet> here;
  for (const cpu::InstructionSet& set : cpu::instruction_sets()) {
    if (set.available()) here.push_back(set);
  }
  return here;
}

/// Every distinct token operand of every recipe, and the formats and rules that none of them uses.
std::vector<Operand> token_operands() {
  std::vector<Operand> all;
  const auto add = [&](const Operand& operand) {
    if (std::ranges::find(all, operand) == all.end()) all.push_back(operand);
  };
  for (const Recipe& recipe : recipes()) {
    for (const Place& place : places_of(recipe)) {
      if (place.role == Role::dims || place.role == Role::tokens) add(*place.operand);
    }
  }
  for (const Encoding encoding : {Encoding::e4m3, Encoding::e5m2, Encoding::e2m3, Encoding::e3m2, Encoding::e2m1}) {
    for (const Block block :
         {Block::token(), Block::tokens32(), Block::dims32(), Block::channel32(), Block::square32()}) {
      for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
        add({.encoding = encoding, .block = block, .rule = ScaleRule::floor, .rounding = rounding});
      }
    }
  }
  for (const Block block : {Block::dims16(), Block::channel16()}) {
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
      for (const SecondLevel level : {SecondLevel::fixed, SecondLevel::adaptive}) {
        add({.encoding = Encoding::nvfp4, .block = block, .rounding = rounding, .second_level = level});
      }
    }
  }
  return all;
}

/// Random values with everything that has a rule of its own: zero tokens and blocks, subnormals, tiny and huge values,
/// NaN and Inf.
Tensor odd_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor tensor = test::random_tensor(dtype, std::move(shape), Distribution::normal, seed);
  const std::int64_t row = tensor.shape[1] * tensor.shape[2];
  const auto scale = [&](std::int64_t token, float factor) {
    if (token >= tensor.shape[0]) return;
    for (std::int64_t i = token * row; i < (token + 1) * row; ++i) tensor.set(i, tensor.at(i) * factor);
  };
  scale(1, 0.0F);
  scale(2, 1e-39F);
  scale(3, 1e-20F);
  scale(4, dtype == DType::f16 ? 1e3F : 1e36F);
  scale(35, 1e-6F);
  for (std::int64_t i = 6 * row; i < std::min<std::int64_t>(8 * row, tensor.elements()); i += 5) tensor.set(i, 0.0F);
  if (tensor.shape[0] > 40) {
    tensor.set(40 * row + 3, std::nanf(""));
    tensor.set(37 * row, INFINITY);
  }
  return tensor;
}

/// Tokens whose values or exponent differ from the reference's.
class Mismatches {
 public:
  Mismatches(const TensorView& view, const Quantized& want) : view_(view), want_(want) {}

  /// Values [dims][32] and exponents of `lanes` tokens.
  void block(std::int64_t token, std::int64_t head, std::int64_t lanes, const float* values,
             const std::int32_t* exponents) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      if (same((token + lane) * view_.heads() + head, values + lane, exponents[lane])) continue;
      if (++count == 1) first = fmt::format("token {} head {}", token + lane, head);
    }
  }

  std::int64_t count = 0;
  std::string first;

 private:
  [[nodiscard]] bool same(std::int64_t row, const float* values, std::int32_t exponent) const {
    if (exponent != want_.exponents[static_cast<std::size_t>(row)]) return false;
    for (std::int64_t d = 0; d < view_.dims(); ++d) {
      const float value = values[d * kBlock] * want_.tensor_scale;
      if (value != want_.values[static_cast<std::size_t>(row * view_.dims() + d)]) return false;
    }
    return true;
  }

  const TensorView& view_;
  const Quantized& want_;
};

void expect_codes(const cpu::InstructionSet& set, const Tensor& tensor, const Packing& packing,
                  const QuantizeOptions& options) {
  const TensorView view = test::view(tensor);
  const Result<Quantized> want = quantize(view, packing, options, 1);
  ASSERT_TRUE(want.ok());
  cpu::Plan plan;
  plan.seed = options.seed;
  plan.rotation_shift = (std::countr_zero(static_cast<std::uint64_t>(view.dims())) + 1) / 2;
  cpu::TokenOperand operand;
  operand.tensor = &view;
  operand.operand = options.operand;
  operand.rotate = options.hadamard;
  operand.folds = options.operand.folds();
  operand.stream = options.stream;
  operand.tensor_scale = want->tensor_scale;
  cpu::Workspace workspace;
  Mismatches mismatches(view, *want);
  alignas(64) static float values[256 * 32];
  std::int32_t exponents[32];
  for (const Document& document : packing.documents()) {
    const bool query = options.side == Side::query;
    const std::int64_t begin = query ? document.q_begin : document.k_begin;
    const std::int64_t length = query ? document.q_length : document.k_length;
    for (std::int64_t head = 0; head < view.heads(); ++head) {
      for (std::int64_t row = 0; row < length; row += kBlock) {
        set.kernels.quantize(plan, operand, options.side, {&document, head, row, length, nullptr, 0}, head, values,
                             exponents, workspace);
        mismatches.block(begin + row, head, std::min(kBlock, length - row), values, exponents);
      }
    }
  }
  EXPECT_EQ(mismatches.count, 0) << set.name << " " << to_string(options.operand.encoding) << " "
                                 << to_string(options.operand.block) << " dims " << view.dims() << ", first "
                                 << mismatches.first;
}

TEST(Cpu, CodesAndExponentsAreTheReferences) {
  const Packing packing = test::pack({{1, 2}, {45, 33}, {130, 150}});
  for (const cpu::InstructionSet& set : sets_here()) {
    for (const auto& [dims, dtype] : {std::pair{8, DType::f32},
                                      {40, DType::bf16},
                                      {64, DType::bf16},
                                      {72, DType::f16},
                                      {128, DType::f32},
                                      {256, DType::f16}}) {
      const Tensor tensor = odd_tensor(dtype, {packing.tokens_q(), 1, dims}, 7);
      const bool hadamard = std::has_single_bit(static_cast<std::uint64_t>(dims));
      for (const Operand& operand : token_operands()) {
        expect_codes(set, tensor, packing, {operand, Side::query, hadamard, 99, 3});
      }
    }
  }
}

TEST(Cpu, EveryE4m3AndE2m1TieAndItsNeighboursRoundAsInTheReference) {
  // One token of 256 dims: 1 as its maximum, then ties of the format between its codes, a bit below and above.
  const Packing packing = Packing::single(64, 64);
  for (const Encoding encoding : {Encoding::e4m3, Encoding::e5m2, Encoding::e2m3, Encoding::e3m2, Encoding::e2m1}) {
    const Format format = *element_format(encoding);
    std::vector<float> values;
    for (int code = 0; code + 1 < code_count(format) / 2; ++code) {
      const float low = decode(format, static_cast<std::uint8_t>(code));
      const float high = decode(format, static_cast<std::uint8_t>(code + 1));
      if (!std::isfinite(high)) break;
      const float tie = (low + high) / 2;
      for (const float value : {low, tie, std::nextafter(tie, 0.0F), std::nextafter(tie, INFINITY)}) {
        values.push_back(value);
        values.push_back(-value);
      }
    }
    Tensor tensor = Tensor::zeros(DType::f32, {64, 1, 256});
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      const bool maximum = i % 256 == 0;
      tensor.set(i, maximum ? spec_of(format).max : values[static_cast<std::size_t>(i) % values.size()]);
    }
    for (const cpu::InstructionSet& set : sets_here()) {
      expect_codes(set, tensor, packing, {{.encoding = encoding, .block = Block::token()}, Side::query, false, 0, 0});
    }
  }
}

// ---- Outputs ----

/// FP32 moves a weight by up to e = 2^-19 of itself (32 to 256 products of the logit, then the exponential), which
/// crosses a tie of m mantissa bits with a probability of about e 2^(m + 1): 2^-15 for E4M3, so one row in 200 of 200
/// keys. Such a row moves by a step of its weight, at most step_of(...) of the largest |V|, typically a weight's share
/// of it. Rows apart from those agree to rounding. Over all of a tensor that is sqrt(1/200) 0.05 = 4e-3 in relative L2,
/// the weight that moved being a twentieth of its row or less; the gradients share the moved weights and have codes of
/// their own.
void expect_like_reference(const Case& c, const Recipe& recipe, const std::string& where) {
  Options reference = test::two_threads();
  reference.engine = "reference";
  const std::vector<test::Output> want = test::outputs(c, recipe, reference);
  // Where the floor rule saturates, a block's largest weight just below a power of two and just above it differ by 1/8.
  const bool floors = recipe.o.weights.rule == ScaleRule::floor;
  const double step = floors ? 0.25 : std::max(test::step_of(recipe.o.weights), 0x1p-7);
  for (const cpu::InstructionSet& set : sets_here()) {
    Options options = reference;
    options.engine = fmt::format("cpu:{}", set.name);
    options.statistics = false;
    const std::vector<test::Output> got = test::outputs(c, recipe, options);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double size = want[i].name == "o"     ? test::largest(c.v)
                          : want[i].name == "lse" ? 1
                                                  : test::largest(want[i].tensor);
      EXPECT_TRUE(test::within(got[i].tensor, want[i].tensor, step * size))
          << want[i].name << " " << recipe.name << " on " << options.engine << ", " << where;
      if (want[i].name == "o" && !floors) {
        // Three times the expected number, and three where hardly any is expected.
        const std::int64_t rows = want[i].tensor.elements() / std::max<std::int64_t>(want[i].tensor.shape.back(), 1);
        EXPECT_LE(test::rows_moved(got[i].tensor, want[i].tensor, size), 3 + rows * 3 / 200)
            << recipe.name << " on " << options.engine << ", " << where;
      }
      EXPECT_LE(test::relative_l2(got[i].tensor, want[i].tensor), floors ? 5e-2 : 4e-3)
          << want[i].name << " " << recipe.name << " on " << options.engine << ", " << where;
    }
  }
}

class CpuRecipes : public testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Cpu, CpuRecipes, testing::ValuesIn(test::every_recipe()), test::name_of_recipe);

TEST_P(CpuRecipes, ShapesAndMasks) {
  const Recipe& recipe = GetParam();
  const Packing packing = test::pack({{70, 70}, {33, 97}, {40, 9}, {0, 5}, {6, 0}, {1, 1}, {130, 140}});
  const auto check = [&](const test::Sizes& sizes, const Mask& mask) {
    Case c = test::random_case(packing, sizes, DType::bf16, 11);
    c.problem.mask = mask;
    if (sizes.value_dim != 128) c = test::with_dlse(std::move(c));
    expect_like_reference(c, recipe, fmt::format("head_dim {} window ({}, {})", sizes.head_dim, mask.left, mask.right));
  };
  check({2, 1, 128, 128}, Mask::causal());
  check({2, 2, 64, 16}, Mask::full());
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(40, 0), Mask::window(7, 50)}) {
    check({2, 1, 16, 32}, mask);
  }
}

TEST_P(CpuRecipes, HeadDimsAndTypes) {
  const Recipe& recipe = GetParam();
  const Packing packing = test::pack({{40, 66}});
  for (const std::int64_t dims : {8, 24, 40, 72, 80, 96, 120, 192, 256}) {
    if (recipe.hadamard == Hadamard::required && !std::has_single_bit(static_cast<std::uint64_t>(dims))) continue;
    const DType dtype = dims % 3 == 0 ? DType::f16 : dims % 5 == 0 ? DType::bf16 : DType::f32;
    const Case c = test::random_case(packing, {1, 1, dims, dims == 192 ? 128 : dims}, dtype, 5);
    expect_like_reference(c, recipe, fmt::format("head_dim {}", dims));
  }
}

TEST_P(CpuRecipes, UnevenTokensAndWideLogits) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({150, 40}), {2, 1, 64, 64}, DType::f32, 3);
  for (std::int64_t token = 0; token < c.v.shape[0]; ++token) {
    const auto factor = static_cast<float>(std::ldexp(1.0, static_cast<int>(test::uniform(17, 0, token) * 12)));
    for (Tensor* tensor : {&c.v, &c.k, &c.q, &c.dout}) {
      const std::int64_t row = tensor->shape[1] * tensor->shape[2];
      for (std::int64_t i = token * row; i < (token + 1) * row; ++i) {
        tensor->set(i, tensor->at(i) * (tensor == &c.v || tensor == &c.dout ? factor : std::sqrt(std::sqrt(factor))));
      }
    }
  }
  expect_like_reference(c, recipe, "uneven tokens");
  // As uneven as dP, some of it zero.
  c = test::with_dlse(std::move(c));
  for (std::int64_t i = 0; i < c.dlse->elements(); ++i) {
    const int exponent = static_cast<int>(test::uniform(18, 0, i) * 20);
    c.dlse->set(i, exponent == 0 ? 0.0F : std::ldexp(c.dlse->at(i), exponent));
  }
  expect_like_reference(c, recipe, "uneven tokens and gradients of lse");
}

/// Every pair of lengths around the blocks, all in one pack: its documents do not know each other.
TEST_P(CpuRecipes, EveryPairOfLengthsAroundTheBlocks) {
  std::vector<test::Lengths> lengths;
  for (const std::int32_t q : {0, 1, 2, 31, 32, 33, 63, 64, 65}) {
    for (const std::int32_t k : {0, 1, 2, 31, 32, 33, 63, 64, 65}) lengths.push_back({q, k});
  }
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(3, -1), Mask::window(0, 33)}) {
    Case c = test::random_case(test::pack(lengths), {1, 1, 16, 8}, DType::f32, 23);
    c.problem.mask = mask;
    expect_like_reference(c, GetParam(), fmt::format("window ({}, {})", mask.left, mask.right));
  }
}

/// Longer than an item of the backward: its parts add up to the reference's, in one order whatever the threads.
TEST(Cpu, LongDocumentsAddUpInOneOrder) {
  const Recipe recipe = test::recipe_named("mxfp8");
  Case c = test::random_case(test::pack_self({8300, 4100, 70}), {1, 1, 8, 8}, DType::f32, 31);
  c.problem.mask = Mask::window(300, 40);
  test::set_row(c.v, 4000, 0, std::nanf(""));  // reaches keys of two parts
  c = test::with_dlse(std::move(c));
  test::set_row(*c.dlse, 4096, 0, std::nanf(""));
  expect_like_reference(c, recipe, "long documents");
  Options options = test::two_threads();
  options.engine = "cpu";
  const std::vector<test::Output> two = test::outputs(c, recipe, options);
  for (const int threads : {1, 3, 8}) {
    options.threads = threads;
    test::expect_same(test::outputs(c, recipe, options), two, fmt::format("with {} threads", threads));
  }
}

double equal_share(const Tensor& got, const Tensor& want) {
  std::int64_t equal = 0;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    equal += got.at(i) == want.at(i) || (std::isnan(got.at(i)) && std::isnan(want.at(i))) ? 1 : 0;
  }
  return static_cast<double>(equal) / static_cast<double>(got.elements());
}

/// A window, so that the maxima over all keys, over those up to a row's last and over those it sees differ; dO, dLSE, K
/// and V uneven, and some of them poisoned.
TEST(Cpu, Fp16AccumulationOfDq) {
  for (const std::string_view name : {"mxfp8", "fp4", "mxfp4-diagonal", "fp8-tensor"}) {
    for (const DqAccumulation kind : {DqAccumulation::f16_sequence, DqAccumulation::f16_causal}) {
      Recipe recipe = test::recipe_named(name);
      recipe.dq_accumulation = kind;
      recipe.claims = derive_claims(recipe);
      ASSERT_TRUE(validate(recipe).ok());
      Case c = test::with_dlse(test::random_case(test::pack_self({500, 3}), {2, 1, 32, 64}, DType::f32, 53));
      c.problem.mask = Mask::window(290, 0);
      for (Tensor* tensor : {&c.k, &c.v, &c.dout}) {
        for (std::int64_t token = 0; token < 503; token += 7) {
          const std::int64_t row = tensor->shape[1] * tensor->shape[2];
          const float factor = std::ldexp(1.0F, static_cast<int>(token % 11) - 3);
          for (std::int64_t i = token * row; i < (token + 1) * row; ++i) tensor->set(i, factor * tensor->at(i));
        }
      }
      // In f16_sequence these rows fall below FP16's normal range: p shows.
      for (std::int64_t i = 0; i < c.dout.elements(); ++i) {
        if (i / 128 % 13 == 5) c.dout.set(i, 0x1p-20F * c.dout.at(i));
      }
      test::set_row(c.v, 470, 0, std::nanf(""));
      test::set_row(c.dout, 60, 0, std::nanf(""));
      c.dlse->set(140, INFINITY);
      expect_like_reference(c, recipe, fmt::format("dQ in FP16, {}", static_cast<int>(kind)));
      // FP32's noise is 2^-19 of a sum of four tiles or less, FP16's step 2^-11: one in 2^8 / 4 numbers may round to
      // the other side. A row with a moved code of dS is all different: one in a hundred. Sums in FP32 agree nowhere.
      Options options = test::two_threads();
      options.engine = "reference";
      const Tensor want = test::backward(c, recipe, options).dq;
      for (const cpu::InstructionSet& set : sets_here()) {
        options.engine = fmt::format("cpu:{}", set.name);
        EXPECT_GE(equal_share(test::backward(c, recipe, options).dq, want), 0.97)
            << name << " on " << set.name << ", " << static_cast<int>(kind);
      }
    }
  }
}

/// Mixtures that no recipe of the catalogue has, under a window, whose first tiles are cut.
TEST(Cpu, MixedOperandsOnCutTiles) {
  Recipe adaptive = test::recipe_named("fp4");
  adaptive.dq.cut = WeightPair{{.encoding = Encoding::bf16}, {.encoding = Encoding::bf16}};
  Recipe fixed_scale = test::recipe_named("mxattention");
  fixed_scale.beta = 4;
  fixed_scale.o.weights.block = fixed_scale.o.cut->weights.block = Block::tensor();
  fixed_scale.o.weights.rule = fixed_scale.o.cut->weights.rule = ScaleRule::ceil;
  Case c = test::with_dlse(test::random_case(test::pack_self({300}), {2, 1, 64, 64}, DType::f32, 41));
  c.problem.mask = Mask::window(100, 0);
  for (const Recipe& recipe : {adaptive, fixed_scale}) {
    const Status status = validate(recipe);
    ASSERT_TRUE(status.ok()) << status.error().message;
    expect_like_reference(c, recipe, "mixed operands");
  }
}

/// A later token whose products leave FP32 changes nothing before it: a masked weight of zero meets no Inf.
TEST(Cpu, C1_NoLeakOfATokenBeyondFp32) {
  for (const std::string_view name : {"bf16", "mxfp4-diagonal", "fp4"}) {
    const Recipe recipe = test::recipe_named(name);
    const Case before = test::random_case(test::pack_self({70}), {1, 1, 32, 32}, DType::f32, 43);
    Case after = before;
    test::set_row(after.v, 50, 0, 3.4e38F);
    test::set_row(after.k, 50, 0, 3.4e38F);
    for (const cpu::InstructionSet& set : sets_here()) {
      Options options = test::two_threads();
      options.engine = fmt::format("cpu:{}", set.name);
      const std::vector<test::Output> was = test::outputs(before, recipe, options);
      const std::vector<test::Output> is = test::outputs(after, recipe, options);
      for (std::size_t i = 0; i < 3; ++i) {  // o, lse, dq
        EXPECT_TRUE(test::same_bits(test::rows_of(is[i].tensor, 0, 50), test::rows_of(was[i].tensor, 0, 50)))
            << was[i].name << " " << name << " on " << options.engine;
      }
    }
  }
}

/// A tile may be multiplied as one integer sum or block by block, a group of tiles likewise, as the scales of all its
/// tokens allow: a later token decides, but no earlier row may show it.
TEST(Cpu, C1_EarlierRowsDoNotShowHowTheirTileWasMultiplied) {
  constexpr std::int64_t kLast = 254;  // in the last of eight blocks, which are two groups
  for (const std::string_view name : {"mxattention", "mxfp4-leaky", "mxfp4-diagonal"}) {
    const Recipe recipe = test::recipe_named(name);
    const bool exact = recipe.o.cut.has_value();
    Case before = test::random_case(test::pack_self({kLast + 1}), {2, 1, 128, 128}, DType::f32, 47);
    // The second group is small beside the first, so that its bits show in which order it was added.
    for (std::int64_t i = 0; i < std::int64_t{128} * 128; ++i) before.v.set(i, 1e5F * before.v.at(i));
    const auto changed = [&](float q, float k, float v) {
      Case after = before;
      // The same in all dims is one large element and small ones after the rotation: scales far apart.
      test::set_row(after.q, kLast, 0, q);
      test::set_row(after.k, kLast, 0, k);
      test::set_row(after.v, kLast, 0, v);
      after.q.set(kLast * 256 + 5, -q);
      after.k.set(kLast * 128 + 5, -k);
      return after;
    };
    std::vector<Case> cases{before,
                            changed(30, 1, 1),
                            changed(3e4F, 1, 1),
                            changed(1, 3e4F, 1),
                            changed(1, 1, 3e4F),
                            changed(1e-20F, 1e-20F, 1e-20F),
                            changed(0, 0, 0),
                            changed(1e30F, 1e30F, 1e30F)};
    // Wide logits under near scales of q: those of P lie apart, in the second half of the block.
    cases.push_back(before);
    for (std::int64_t i = kLast * 256; i < (kLast + 1) * 256; ++i) cases.back().q.set(i, 40.0F * before.q.at(i));
    for (const cpu::InstructionSet& set : sets_here()) {
      Options options = test::two_threads();
      options.engine = fmt::format("cpu:{}", set.name);
      // Statistics need the logits, so that every tile is multiplied the general way.
      Options general = options;
      general.statistics = true;
      options.statistics = false;
      const ForwardResult was = test::forward(before, recipe, options);
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const std::string where = fmt::format("{} on {}, case {}", name, options.engine, i);
        const ForwardResult is = test::forward(cases[i], recipe, options);
        const ForwardResult generally = test::forward(cases[i], recipe, general);
        EXPECT_TRUE(test::same_bits(is.o, generally.o)) << where;
        EXPECT_TRUE(test::same_bits(is.lse, generally.lse)) << where;
        // Where V is scaled along keys on cut tiles too, its later keys leak into their own block.
        const std::int64_t end = exact ? kLast : kLast / kBlock * kBlock;
        EXPECT_TRUE(test::same_bits(test::rows_of(is.o, 0, end), test::rows_of(was.o, 0, end))) << where;
        EXPECT_TRUE(test::same_bits(test::rows_of(is.lse, 0, kLast), test::rows_of(was.lse, 0, kLast))) << where;
      }
    }
  }
}

/// q, k, v and dO of a trained model: as many of its tokens as the slowest instruction set takes in a second.
TEST(Cpu, ARealLayer) {
  constexpr std::int64_t kTokens = 200;
  const Result<TensorFile> file = read_safetensors(std::string(MXFLASH_EXAMPLES) + "/gpt_small_l3.safetensors");
  ASSERT_TRUE(file.ok());
  const auto get = [&](const char* name) { return test::rows_of(file->tensors.at(name), 0, kTokens); };
  Case c{{}, get("q"), get("k"), get("v"), get("do")};
  c.problem.packing = Packing::single(kTokens, kTokens);
  c.problem.scale = std::stof(file->metadata.at("softmax_scale"));
  for (const std::string_view name : {"bf16", "mxfp8", "nvfp4", "fp4", "mxattention", "mxfp4-diagonal"}) {
    expect_like_reference(c, test::recipe_named(name), "a real layer");
  }
}

/// V_j = 1.5 e_j, exact in every format under every scale rule, makes O the weights of the forward, dO_i = e_i makes dV
/// those of the backward: their codes must be the same ones, however each multiplies and encodes. dV is made to round
/// its weights to BF16, 2^-8 of them, and nothing else; neighbouring codes of P are 2^-4 (E4M3) apart or more.
TEST_P(CpuRecipes, ForwardAndBackwardMakeTheSameP) {
  Recipe recipe = GetParam();
  if (!has_backward(recipe)) GTEST_SKIP() << "no backward";
  constexpr std::int64_t kTokens = 256;
  recipe.dv = {{.encoding = Encoding::bf16}, {.encoding = Encoding::bf16}, std::nullopt};
  recipe.claims = derive_claims(recipe);
  const Status status = validate(recipe);
  ASSERT_TRUE(status.ok()) << status.error().message;
  Case c = test::random_case(test::pack_self({kTokens}), {1, 1, 128, kTokens}, DType::f32, 59);
  for (std::int64_t i = 0; i < kTokens * kTokens; ++i) {
    c.v.set(i, i % kTokens == i / kTokens ? 1.5F : 0.0F);
    c.dout.set(i, i % kTokens == i / kTokens ? 1.0F : 0.0F);
  }
  for (const cpu::InstructionSet& set : sets_here()) {
    Options options = test::two_threads();
    options.engine = fmt::format("cpu:{}", set.name);
    options.statistics = false;
    const Tensor o = test::forward(c, recipe, options).o;
    const Tensor dv = test::backward(c, recipe, options).dv;
    std::int64_t apart = 0;
    for (std::int64_t query = 0; query < kTokens; ++query) {
      for (std::int64_t key = 0; key < kTokens; ++key) {
        const float of_forward = o.at(query * kTokens + key) / 1.5F;
        apart += std::fabs(of_forward - dv.at(key * kTokens + query)) > 0x1p-7F * of_forward ? 1 : 0;
      }
    }
    EXPECT_EQ(apart, 0) << recipe.name << " on " << options.engine;
  }
}

// ---- What every instruction set must agree on ----

TEST(Cpu, TheEngineNamedCpuIsTheBestHere) {
  const Recipe recipe = test::recipe_named("mxfp8");
  const Result<const Engine*> any = test::select("cpu", recipe);
  ASSERT_TRUE(any.ok());
  EXPECT_EQ((*any)->name(), fmt::format("cpu:{}", sets_here().front().name));
  // Nothing better has a backward.
  EXPECT_EQ(*test::select("auto", recipe, Pass::backward), *any);
  EXPECT_EQ(sets_here().back().name, "scalar");
}

#if defined(__aarch64__) && defined(__linux__)
/// The other tests here pass over a set that is not available; this one sees to it that it is not passed over wrongly.
TEST(Cpu, NeonIsThereWhereTheKernelReportsAes) {
  const std::vector<cpu::InstructionSet>& sets = cpu::instruction_sets();
  ASSERT_EQ(sets.size(), 2U);
  EXPECT_EQ(sets[0].name, "neon");
  EXPECT_EQ(sets[0].available(), (getauxval(AT_HWCAP) & HWCAP_AES) != 0);
  EXPECT_EQ(sets[1].name, "scalar");
}
#endif

TEST(Cpu, SaysWhatItDoesNotRun) {
  Recipe f32 = test::recipe_named("mxattention");
  f32.o.cut = WeightPair{};
  for (const cpu::InstructionSet& set : sets_here()) {
    EXPECT_EQ(cpu::supports(set, f32).ok(), set.exact_f32) << set.name;
  }
}

TEST(Cpu, StatisticsAreTheReferences) {
  for (const std::string_view name : {"mxfp8", "fp4", "naive-fp4"}) {
    const Recipe recipe = test::recipe_named(name);
    const Case c = test::random_case(test::pack_self({70, 33}), {2, 1, 32, 32}, DType::f32, 9);
    Options options = test::two_threads();
    options.engine = "reference";
    const ForwardResult want = test::forward(c, recipe, options);
    for (const cpu::InstructionSet& set : sets_here()) {
      options.engine = fmt::format("cpu:{}", set.name);
      const ForwardResult got = test::forward(c, recipe, options);
      // 6,112 visible pairs: a code that falls on the other side of a tie is 1.6e-4 of them; a handful may.
      EXPECT_NEAR(got.statistics.row_sum_mean, want.statistics.row_sum_mean, 1e-4) << set.name;
      EXPECT_NEAR(got.statistics.row_sum_min, want.statistics.row_sum_min, 1e-3) << set.name;
      EXPECT_NEAR(got.statistics.flushed_p, want.statistics.flushed_p, 1e-3) << set.name;
      if (!test::has_backward(recipe)) continue;
      const double flushed = test::backward(c, recipe, options).statistics.flushed_ds;
      Options reference = options;
      reference.engine = "reference";
      EXPECT_NEAR(flushed, test::backward(c, recipe, reference).statistics.flushed_ds, 2e-3) << set.name;
    }
  }
}

}  // namespace
}  // namespace mxflash
