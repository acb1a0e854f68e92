// How far off: every element against float64 attention within what the formats allow, whole captures within floors.
#include <algorithm>
#include <numbers>

#include "mxflash/quantize.hpp"
#include "mxflash/safetensors.hpp"
#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;

class EveryRecipe : public testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(AttentionNumbers, EveryRecipe, testing::ValuesIn(test::every_recipe()), test::name_of_recipe);

/// Largest relative rounding error of a normal number.
double unit_roundoff(Encoding encoding) {
  const auto format = element_format(encoding);
  return format ? std::ldexp(1.0, -1 - spec_of(*format).mantissa_bits) : std::ldexp(1.0, -8);  // else BF16
}

// ---- Row sums ----

/// 1.5 is exact in every format; what normalizes a row is what multiplies V.
TEST_P(EveryRecipe, AConstantVGivesItsValueExactly) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({70, 130}), {.heads = 2, .kv_heads = 1});
  c.v = test::constant_tensor(DType::f32, c.v.shape, 1.5F);
  const ForwardResult f = test::forward(c, recipe);
  const double mean = f.statistics.row_sum_mean;
  if (recipe.row_sum == RowSum::unquantized) {
    EXPECT_LT(mean, 0.999);
    EXPECT_LT(f.statistics.row_sum_min, mean);
    EXPECT_FALSE(test::within(f.o, test::constant_tensor(DType::f32, f.o.shape, 1.5F), 1e-3));
    return;
  }
  EXPECT_NEAR(mean, 1.0, 1e-12);
  EXPECT_NEAR(f.statistics.row_sum_min, 1.0, 1e-12);
  // A tensor-wide scale is no power of two: 1.5 = 448 (1.5 / 448) up to FP32's rounding.
  EXPECT_TRUE(test::within(f.o, test::constant_tensor(DType::f32, f.o.shape, 1.5F), 3e-7));
}

/// exp(S - LSE) adds up to 1, S made here from the documented codes of q and k, one of whose columns is 1e3.
TEST_P(EveryRecipe, C2_RowsAddUpToOneWithAHotColumn) {
  const Recipe& recipe = GetParam();
  const bool narrow = recipe.o.weights.quantized() && recipe.o.weights.encoding != Encoding::e4m3;
  const bool floor = recipe.o.weights.quantized() && recipe.o.weights.rule == ScaleRule::floor;
  for (int hot = 0; hot < 3; ++hot) {
    Case c = test::random_case(test::pack_self({64}), {.heads = 1, .kv_heads = 1});
    Tensor& tensor = hot == 0 ? c.q : hot == 1 ? c.k : c.v;
    for (std::int64_t t = 0; t < 64; ++t) tensor.set(t * 32 + 7, 1e3F);
    const bool rotated = recipe.hadamard == Hadamard::required;
    const auto codes = [&](const Tensor& x, const Operand& operand) {
      return *quantize(test::view(x), c.problem.packing, {.operand = operand, .hadamard = rotated}, 1);
    };
    const Quantized q = codes(c.q, recipe.s.left);
    const Quantized k = codes(c.k, recipe.s.right);
    const ForwardResult f = test::forward(c, recipe);
    const double scale = (rotated ? 2.0 : 1.0) / std::sqrt(32.0);  // 2^(2 ceil(5 / 2)) / 32 = 2
    for (std::int64_t i = 0; i < 64; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        double s = 0;
        for (std::int64_t d = 0; d < 32; ++d) {
          s += static_cast<double>(q.dequantized(i, 0, d)) * static_cast<double>(k.dequantized(j, 0, d));
        }
        sum += std::exp(s * scale - static_cast<double>(f.lse.at(i)));
      }
      // E4M3 rounds a weight by 2^-4 of itself; by the floor rule 448 stands for up to 512. In 4 bits it is a quarter,
      // and weights below a twelfth of the largest of 32 vanish. LSE itself is FP32, of logits of 1e3.
      ASSERT_NEAR(sum, 1.0, (narrow ? 1.0 : floor ? 1.0 / 8 : 1.0 / 16) + 1e-3) << hot << " row " << i;
    }
  }
}

/// Many equal maxima, then two; V of one sign. The signed error averages out where each alone does not.
TEST(AttentionNumbers, C22_TheMeanSignedErrorIsNearZero) {
  for (const std::string_view name : {"bf16", "mxfp8", "nvfp4", "fp4", "mxfp4-diagonal"}) {
    for (const bool two : {false, true}) {
      Case c = test::random_case(test::pack({{16, 1024}}), {1, 1, 32, 64});
      c.problem.mask = Mask::full();
      c.problem.scale = 1.0F;
      c.k = Tensor::zeros(DType::f32, {1024, 1, 32});
      for (const std::int64_t key : {5, 700}) test::set_row(c.k, key, 0, two ? 0.25F : 0.0F);
      c.q = test::constant_tensor(DType::f32, {16, 1, 32}, 0.75F);  // two logits of 6 among zeros
      for (std::int64_t i = 0; i < c.v.elements(); ++i) {
        c.v.set(i, static_cast<float>(1 + test::uniform(3, 7, i)));
      }
      const ForwardResult f = test::forward(c, test::recipe_named(name));
      const ForwardResult want = test::exact(c);
      double mean = 0;
      for (std::int64_t i = 0; i < f.o.elements(); ++i) {
        mean += static_cast<double>(f.o.at(i) / want.o.at(i) - 1) / static_cast<double>(f.o.elements());
      }
      // V is in [1, 2): E4M3's mean of 1024 x 64 roundings of at most 2^-4 is near 1e-4. NVFP4's codes 4, 6 are uneven.
      const bool four_bits = name == "fp4" || name == "mxfp4-diagonal";
      EXPECT_LT(std::fabs(mean), four_bits ? 0.03 : 2e-3) << name << (two ? " two maxima" : " equal logits");
    }
  }
}

// ---- Every element, for operands that every format holds exactly ----

/// q, k: E2M1 numbers with a 6 at the head of each 16 (scale 1 in every format); v, dO: 6 times a power of two. Logits
/// so close together that no weight is below half the largest: all in the normal range.
Case representable(const Mask& mask) {
  constexpr float kMagnitudes[] = {0.5F, 1, 1.5F, 2, 3, 4, 6};
  Case c = test::random_case(test::pack({{64, 96}}), {2, 1, 64, 64});
  c.problem.mask = mask;
  c.problem.scale = 0.0005F;
  const auto sign = [](std::int64_t i) { return test::uniform(5, 1, i) < 0.5 ? -1.0F : 1.0F; };
  for (Tensor* tensor : {&c.q, &c.k}) {
    for (std::int64_t i = 0; i < tensor->elements(); ++i) {
      const auto pick = static_cast<std::size_t>(test::uniform(5, tensor == &c.q ? 2 : 3, i) * 7);
      tensor->set(i, i % 16 == 0 ? 6.0F : sign(i) * kMagnitudes[pick]);
    }
  }
  for (Tensor* tensor : {&c.v, &c.dout}) {
    for (std::int64_t i = 0; i < tensor->elements(); ++i) {
      const int shift = static_cast<int>(test::uniform(5, tensor == &c.v ? 4 : 6, i) * 3);
      tensor->set(i, sign(i) * std::ldexp(6.0F, -shift));
    }
  }
  return c;
}

Tensor magnitudes(Tensor tensor) {
  for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, std::fabs(tensor.at(i)));
  return tensor;
}

bool holds_representable(const Recipe& recipe) {
  return recipe.s.left.block != Block::tensor() && recipe.hadamard != Hadamard::required;
}

/// A weight is P(1 + a) / sum P(1 + b) with |a|, |b| <= u: at most 2u / (1 - u) of itself off.
TEST_P(EveryRecipe, OutputsAreWithinTheRoundingOfP) {
  const Recipe& recipe = GetParam();
  if (!holds_representable(recipe)) GTEST_SKIP() << "its operands are not exact";
  const double u = unit_roundoff(recipe.o.weights.encoding);
  for (const Mask& mask : {Mask::full(), Mask::causal()}) {
    const Case c = representable(mask);
    Case absolute = c;
    absolute.v = magnitudes(c.v);
    const Tensor size = test::exact(absolute).o;
    EXPECT_TRUE(test::within(test::forward(c, recipe).o, test::exact(c).o, [&](std::int64_t i) {
      return 2.001 * u / (1 - u) * static_cast<double>(size.at(i)) + 1e-6;
    }));
  }
}

/// And once more for P against dO: 2u / (1 - u) of the weight, then its own rounding.
TEST_P(EveryRecipe, ValueGradientsAreWithinTheRoundingOfP) {
  const Recipe& recipe = GetParam();
  if (!test::has_backward(recipe) || !holds_representable(recipe)) GTEST_SKIP() << "no such backward";
  const double u = unit_roundoff(recipe.o.weights.encoding);
  const Case c = representable(Mask::full());
  Case absolute = c;
  absolute.dout = magnitudes(c.dout);
  const Tensor size = test::exact_gradients(absolute).dv;
  EXPECT_TRUE(test::within(test::backward(c, recipe).dv, test::exact_gradients(c).dv, [&](std::int64_t i) {
    const double own = unit_roundoff(recipe.dv.weights.encoding);
    const double weights = (1 + 2 * u / (1 - u)) * (1 + own) - 1;
    return 1.001 * weights * static_cast<double>(size.at(i)) + 1e-6;
  }));
}

/// Sums of scale P (|dP| + sum P |dP|) |K| over keys, and of the same with |Q| over queries and the heads of the group:
/// what errors of dQ and of dK are measured against.
struct GradientSizes {
  Tensor dq;
  Tensor dk;
};

GradientSizes gradient_sizes(const Case& c) {
  GradientSizes size{Tensor::zeros(DType::f32, c.q.shape), Tensor::zeros(DType::f32, c.k.shape)};
  const ForwardResult f = test::exact(c);
  const std::int64_t heads = c.q.shape[1];
  const std::int64_t dims = c.q.shape[2];
  const auto scale = static_cast<double>(*c.problem.scale);
  const auto dot = [dims](const Tensor& a, std::int64_t row_a, const Tensor& b, std::int64_t row_b) {
    double sum = 0;
    for (std::int64_t d = 0; d < dims; ++d) {
      sum += static_cast<double>(a.at(row_a * dims + d)) * static_cast<double>(b.at(row_b * dims + d));
    }
    return sum;
  };
  const auto add = [dims](double weight, const Tensor& rows, std::int64_t row, Tensor& out, std::int64_t out_row) {
    for (std::int64_t d = 0; d < dims; ++d) {
      const std::int64_t at = out_row * dims + d;
      out.set(at, out.at(at) + static_cast<float>(weight) * std::fabs(rows.at(row * dims + d)));
    }
  };
  for (std::int64_t row = 0; row < c.q.shape[0] * heads; ++row) {
    std::vector<double> p;
    std::vector<double> dp;
    double mean = 0;
    for (std::int64_t key = 0; key < c.k.shape[0]; ++key) {
      p.push_back(std::exp(dot(c.q, row, c.k, key) * scale - static_cast<double>(f.lse.at(row))));
      dp.push_back(std::fabs(dot(c.dout, row, c.v, key)));
      mean += p.back() * dp.back();
    }
    for (std::size_t key = 0; key < p.size(); ++key) {
      const double weight = scale * p[key] * (dp[key] + mean);
      add(weight, c.k, static_cast<std::int64_t>(key), size.dq, row);
      add(weight, c.q, row, size.dk, static_cast<std::int64_t>(key));
    }
  }
  return size;
}

/// Weights are 2u / (1 - u) off in dS and in D, dS rounds by its own u, and what is below 2^-6 of a block's scale by
/// 2^-10 of it, far less than u of the block's largest. FP32's sums of the sizes are 2^-16 off.
TEST(AttentionNumbers, QueryAndKeyGradientsAreWithinTheRoundingOfPAndDs) {
  const Case c = representable(Mask::full());
  const GradientSizes sizes = gradient_sizes(c);
  const BackwardResult want = test::exact_gradients(c);
  for (const std::string_view name : {"bf16", "mxfp8", "mxfp8-tokenblock", "nvfp4"}) {
    const Recipe recipe = test::recipe_named(name);
    const double u = unit_roundoff(recipe.o.weights.encoding);
    const double weights = 2 * u / (1 - u);
    const BackwardResult got = test::backward(c, recipe);
    const auto allowed = [&](const Tensor& size, Encoding ds) {
      const double bound = (1 + weights) * (1 + weights) * (1 + unit_roundoff(ds)) - 1 + 0x1p-16;
      return [&size, bound](std::int64_t i) { return bound * static_cast<double>(size.at(i)); };
    };
    EXPECT_TRUE(test::within(got.dq, want.dq, allowed(sizes.dq, recipe.dq.weights.encoding))) << name;
    EXPECT_TRUE(test::within(got.dk, want.dk, allowed(sizes.dk, recipe.dk.weights.encoding))) << name;
  }
}

// ---- The truth itself ----

double loss(const Case& c) {
  const ForwardResult f = test::exact(c);
  double sum = 0;
  for (std::int64_t i = 0; i < f.o.elements(); ++i) {
    sum += static_cast<double>(f.o.at(i)) * static_cast<double>(c.dout.at(i));
  }
  return sum;
}

/// Central differences: h^2 / 6 of a third derivative of order 1, and FP32's 6e-8 of 80 outputs over 2h.
TEST(AttentionNumbers, ExactGradientsAreThoseOfTheExactForward) {
  Case c = test::random_case(test::pack({{2, 3}, {3, 2}}), {2, 1, 8, 8});
  const BackwardResult gradients = test::exact_gradients(c);
  const float h = 1.0F / 128;
  for (const auto& [tensor, gradient] :
       {std::pair{&c.q, &gradients.dq}, std::pair{&c.k, &gradients.dk}, std::pair{&c.v, &gradients.dv}}) {
    Tensor numeric = Tensor::zeros(DType::f32, tensor->shape);
    for (std::int64_t i = 0; i < tensor->elements(); ++i) {
      const float value = tensor->at(i);
      tensor->set(i, value + h);
      const double above = loss(c);
      tensor->set(i, value - h);
      const double below = loss(c);
      tensor->set(i, value);
      numeric.set(i, static_cast<float>((above - below) / (2 * static_cast<double>(h))));
    }
    EXPECT_TRUE(test::within(*gradient, numeric, 5e-4));
    EXPECT_FALSE(test::all_zero(*gradient));
  }
}

// ---- A real layer ----

struct Capture {
  Case c;
  ForwardResult forward;
  BackwardResult backward;
};

Capture read_capture() {
  const Result<TensorFile> file = read_safetensors(std::string(MXFLASH_EXAMPLES) + "/gpt_small_l3.safetensors");
  EXPECT_TRUE(file.ok());
  const auto get = [&](const char* name) { return file->tensors.at(name); };
  Capture capture{{{}, get("q"), get("k"), get("v"), get("do")}, {}, {}};
  capture.c.problem.packing = *Packing::from_tensors(get("cu_seqlens"), get("cu_seqlens"), 1024, 1024);
  capture.c.problem.scale = std::stof(file->metadata.at("softmax_scale"));
  capture.forward = test::exact(capture.c);
  capture.backward = test::exact_gradients(capture.c);
  return capture;
}

double cosine(const Tensor& a, const Tensor& b) {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  for (std::int64_t i = 0; i < a.elements(); ++i) {
    const auto x = static_cast<double>(a.at(i));
    const auto y = static_cast<double>(b.at(i));
    ab += x * y;
    aa += x * x;
    bb += y * y;
  }
  return ab / std::sqrt(aa * bb);
}

TEST(AttentionNumbers, ARealLayerIsAboveTheFloors) {
  const Capture capture = read_capture();
  struct Floors {
    Recipe recipe;
    double o, dq, dk, dv;
  };
  const Recipe mxfp8 = test::recipe_named("mxfp8");
  const std::vector<Floors> floors = {{mxfp8, .9990, .9940, .9965, .9985},
                                      {*with_causality(mxfp8, Causality::exact), .9990, .9940, .9965, .9985},
                                      {test::recipe_named("nvfp4"), .9940, .9530, .9650, .9850},
                                      {test::recipe_named("mxattention"), .9830, 0, 0, 0}};
  for (const auto& [recipe, o, dq, dk, dv] : floors) {
    EXPECT_GE(cosine(test::forward(capture.c, recipe).o, capture.forward.o), o) << recipe.name;
    if (!test::has_backward(recipe)) continue;
    const BackwardResult b = test::backward(capture.c, recipe);
    EXPECT_GE(cosine(b.dq, capture.backward.dq), dq) << recipe.name;
    EXPECT_GE(cosine(b.dk, capture.backward.dk), dk) << recipe.name;
    EXPECT_GE(cosine(b.dv, capture.backward.dv), dv) << recipe.name;
  }
}

// ---- Bit-level exponentials ----

/// mxattention without its rotation, or the forward of mxfp8, at inference.
Recipe approximate(Exponential kind) {
  Recipe recipe = test::recipe_named("mxattention");
  recipe.hadamard = Hadamard::off;
  if (kind == Exponential::schraudolph) {
    const Recipe mxfp8 = test::recipe_named("mxfp8");
    recipe.s = mxfp8.s;
    recipe.o = mxfp8.o;
    recipe.beta = mxfp8.beta;
  }
  recipe.exponential = kind;
  EXPECT_TRUE(validate(recipe).ok()) << validate(recipe).error().message;
  return recipe;
}

/// Relative error of the exponential alone: Mitchell's 4.7 %; Schraudolph's offset of 7/128 and half a unit of BF16.
double exponential_error(Exponential kind) { return kind == Exponential::mitchell ? 0.047 : 0.0625; }

TEST(AttentionNumbers, ApproximateExponentialsAreWithinTheirBounds) {
  for (const Exponential kind : {Exponential::mitchell, Exponential::schraudolph}) {
    const Recipe recipe = approximate(kind);
    Recipe exact_kind = recipe;
    exact_kind.exponential = Exponential::exact;
    const Case c = representable(Mask::full());
    // The exponential's error, then P's rounding of what came out, in either direction.
    const double each = (1 + exponential_error(kind)) * (1 + unit_roundoff(recipe.o.weights.encoding)) - 1;
    Case absolute = c;
    absolute.v = magnitudes(c.v);
    const Tensor size = test::exact(absolute).o;
    const ForwardResult f = test::forward(c, recipe);
    EXPECT_TRUE(test::within(f.o, test::exact(c).o,
                             [&](std::int64_t i) { return 2 * each / (1 - each) * static_cast<double>(size.at(i)); }));
    EXPECT_TRUE(test::within(f.lse, test::exact(c).lse, -std::log1p(-each)));
    const Case random = test::random_case(test::pack_self({40}), {});
    EXPECT_FALSE(test::same_bits(test::forward(random, recipe).lse, test::forward(random, exact_kind).lse)) << "unused";
  }
}

TEST(AttentionNumbers, C4_ApproximateExponentialsAreNeverNan) {
  Case c = test::random_case(test::pack_self({64}), {1, 1, 8, 8}, DType::bf16);
  c.problem.scale = 0.29F;
  c.q = c.k = Tensor::zeros(DType::bf16, {64, 1, 8});
  for (std::int64_t t = 0; t < 64; ++t) {
    c.q.set(t * 8, t % 2 == 0 ? -448.0F : 448.0F);
    c.k.set(t * 8, 1880 - 60 * static_cast<float>(t));  // logits from -2.45e5 to 2.45e5
  }
  for (const Exponential kind : {Exponential::mitchell, Exponential::schraudolph}) {
    const ForwardResult f = test::forward(c, approximate(kind));
    EXPECT_TRUE(test::all_finite(f.o));
    EXPECT_TRUE(test::all_finite(f.lse));
  }
}

// ---- FP16 accumulation of dQ ----

Recipe accumulating(DqAccumulation kind) {
  Recipe recipe = *with_causality(test::recipe_named("mxfp8"), Causality::exact);
  recipe.dq_accumulation = kind;
  recipe.claims = derive_claims(recipe);
  EXPECT_TRUE(validate(recipe).ok());
  return recipe;
}

TEST(AttentionNumbers, Fp16AccumulationIsCloseToFp32) {
  const Case c = test::random_case(test::pack_self({400, 33}), {.heads = 1, .kv_heads = 1});
  const Tensor f32 = test::backward(c, accumulating(DqAccumulation::f32)).dq;
  double largest = 0;
  for (std::int64_t i = 0; i < f32.elements(); ++i) largest = std::max(largest, std::fabs(double{f32.at(i)}));
  for (const DqAccumulation kind : {DqAccumulation::f16_sequence, DqAccumulation::f16_causal}) {
    const Tensor f16 = test::backward(c, accumulating(kind)).dq;
    EXPECT_FALSE(test::same_bits(f16, f32)) << "FP16 is not used";
    // Four tiles of 128 keys: a rounding of each, and one of each sum, at 2^-11 of it.
    EXPECT_TRUE(test::within(f16, f32, 8 * largest / 2048));
  }
}

TEST(AttentionNumbers, Fp16AccumulationFollowsAPowerOfTwoExactly) {
  Case c = test::random_case(test::pack_self({300}), {.heads = 1, .kv_heads = 1});
  for (const DqAccumulation kind : {DqAccumulation::f16_sequence, DqAccumulation::f16_causal}) {
    const Recipe recipe = accumulating(kind);
    Case small = c;
    small.dout = test::scaled(c.dout, std::ldexp(1.0F, -20));
    const Tensor want = test::scaled(test::backward(c, recipe).dq, std::ldexp(1.0F, -20));
    EXPECT_TRUE(test::same_bits(test::backward(small, recipe).dq, want));
    EXPECT_FALSE(test::all_zero(want));
  }
}

TEST(AttentionNumbers, OnlyTheRunningPrescaleIsCausal) {
  const Case c = test::random_case(test::pack_self({300}), {.heads = 1, .kv_heads = 1});
  Case later = c;
  test::set_row(later.k, 290, 0, 3e4F);
  test::set_row(later.v, 290, 0, 3e4F);
  test::set_row(later.dout, 290, 0, 3e4F);
  const auto earlier_rows = [&](const Case& x, DqAccumulation kind) {
    return test::rows_of(test::backward(x, accumulating(kind)).dq, 0, 290);
  };
  EXPECT_EQ(accumulating(DqAccumulation::f16_causal).claims.backward, Causality::exact);
  EXPECT_EQ(accumulating(DqAccumulation::f16_sequence).claims.backward, Causality::leaks);
  EXPECT_TRUE(
      test::same_bits(earlier_rows(later, DqAccumulation::f16_causal), earlier_rows(c, DqAccumulation::f16_causal)));
  EXPECT_FALSE(test::same_bits(earlier_rows(later, DqAccumulation::f16_sequence),
                               earlier_rows(c, DqAccumulation::f16_sequence)));
}

// ---- Statistics ----

TEST_P(EveryRecipe, StatisticsCountEveryVisiblePair) {
  const Recipe& recipe = GetParam();
  const Case c = test::random_case(test::pack_self({40, 33}), {.heads = 2, .kv_heads = 1});
  const auto total = [](const Octaves& octaves) {
    std::int64_t sum = 0;
    for (const auto& [octave, bin] : octaves.bins) {
      EXPECT_LE(bin.flushed, bin.count) << octave;
      sum += bin.count;
    }
    return sum;
  };
  const std::int64_t rows = 2L * (40 + 33);
  const std::int64_t pairs = 2L * (40 * 41 / 2 + 33 * 34 / 2);
  const WeightStatistics forward = test::forward(c, recipe).statistics;
  EXPECT_EQ(total(forward.p), pairs);
  EXPECT_GE(forward.flushed_p, 0);
  EXPECT_LT(forward.flushed_p, 0.7);
  EXPECT_LE(forward.p.bins.rbegin()->first, 0);  // weights of a row are at most 1
  if (!test::has_backward(recipe)) return;
  // dS twice, once for each of its products. It is 0 where P is, and where P leaves a row one key.
  const auto no_weight = static_cast<std::int64_t>(std::llround(forward.flushed_p * static_cast<double>(pairs)));
  const WeightStatistics backward = test::backward(c, recipe).statistics;
  EXPECT_LE(total(backward.ds), 2 * pairs);
  EXPECT_GE(total(backward.ds), 2 * (pairs - no_weight - rows));
  EXPECT_GE(backward.flushed_ds, 0);
  EXPECT_LT(backward.flushed_ds, 0.7);
}

}  // namespace
}  // namespace mxflash
