// The backward of recipes that are embedded in BF16: its sums are FP32's, so hardly anything separates it from the
// reference, codes and random bits least of all. Built with CUDA alone: it reads the tables back.
#include "cuda/arguments.hpp"
#include "cuda/backward_plan.hpp"
#include "cuda/embed_plan.hpp"
#include "mxflash/quantize.hpp"
#include "quantize/scales.hpp"
#include "unit/capture_support.hpp"
#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::Case;

std::vector<Recipe> embedded_recipes() {
  std::vector<Recipe> all = test::backward_recipes();
  std::erase_if(all, [](const Recipe& recipe) { return cuda::multiplies_codes_backward(recipe); });
  return all;
}

/// Skips too where MXFLASH_TEST_RECIPE leaves no recipe that is embedded.
class CudaEmbedBackward : public test::BackwardOnDevice {
 protected:
  void SetUp() override {
    test::BackwardOnDevice::SetUp();
    if (IsSkipped() || !embedded_recipes().empty()) return;
    GTEST_SKIP() << "MXFLASH_TEST_RECIPE: " << std::getenv("MXFLASH_TEST_RECIPE") << " is not embedded in BF16";
  }
};

/// As cpu_test.cpp: a logit or dP that is off by FP32's noise crosses a tie of P or dS in one row of 200, which moves
/// it by a step of its weight. `seed`: of stochastic rounding, which a wrong bit would move far beyond that.
void expect_near_reference(const Case& c, const Recipe& recipe, const std::string& where, std::uint64_t seed = 0) {
  Options options = test::on_engine("cuda");
  options.seed = seed;
  const BackwardResult got = test::backward(c, recipe, options);
  options.engine = "reference";
  const BackwardResult want = test::backward(c, recipe, options);
  const bool floors = recipe.o.weights.rule == ScaleRule::floor;
  const double step = floors ? 0.25 : std::max(test::step_of(recipe.o.weights), 0x1p-7);
  const auto wants = test::gradients_of(want);
  const auto gots = test::gradients_of(got);
  for (std::size_t i = 0; i < wants.size(); ++i) {
    const std::string what = fmt::format("{} of {}, {}", wants[i].first, recipe.name, where);
    EXPECT_EQ(gots[i].second->dtype, wants[i].second->dtype) << what;
    EXPECT_TRUE(test::within(*gots[i].second, *wants[i].second, step * test::largest(*wants[i].second))) << what;
    EXPECT_LE(test::relative_l2(*gots[i].second, *wants[i].second), floors ? 5e-2 : 4e-3) << what;
  }
}

TEST_F(CudaEmbedBackward, ShapesMasksAndTypes) {
  const Packing packing = test::pack({{70, 70}, {33, 97}, {40, 9}, {0, 5}, {6, 0}, {1, 1}, {200, 260}});
  for (const Recipe& recipe : embedded_recipes()) {
    const auto check = [&](const test::Sizes& sizes, const Mask& mask, DType dtype) {
      Case c = test::random_case(packing, sizes, dtype, 11);
      c.problem.mask = mask;
      if (sizes.value_dim != 128) c = test::with_dlse(std::move(c));
      expect_near_reference(
          c, recipe, fmt::format("dims {}/{} window ({}, {})", sizes.head_dim, sizes.value_dim, mask.left, mask.right));
    };
    check({4, 2, 128, 128}, Mask::causal(), DType::bf16);
    check({2, 2, 64, 16}, Mask::full(), DType::f32);
    check({1, 1, 40, 72}, Mask::window(40, 0), DType::f16);
    check({3, 1, 192, 256}, Mask::window(7, 50), DType::bf16);
    check({2, 1, 16, 32}, Mask::window(200, -8), DType::f32);
  }
}

TEST_F(CudaEmbedBackward, EveryPairOfLengthsAroundTheBlocks) {
  std::vector<test::Lengths> lengths;
  for (const std::int32_t q : {0, 1, 31, 32, 33, 65, 129}) {
    for (const std::int32_t k : {0, 1, 31, 32, 33, 65, 129}) lengths.push_back({q, k});
  }
  for (const Recipe& recipe : embedded_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(3, -1), Mask::window(0, 33)}) {
      Case c = test::with_dlse(test::random_case(test::pack(lengths), {1, 1, 16, 8}, DType::f32, 23));
      c.problem.mask = mask;
      expect_near_reference(c, recipe, fmt::format("window ({}, {})", mask.left, mask.right));
    }
  }
}

/// Exponents from token to token that span what P and dS do not; V of zero in every fifth token; dO as a capture has
/// it.
TEST_F(CudaEmbedBackward, UnevenTokens) {
  for (const Recipe& recipe : embedded_recipes()) {
    for (const int spread : {12, 30}) {
      Case c = test::with_dlse(test::random_case(test::pack_self({150, 40}), {2, 1, 64, 64}, DType::f32, 3));
      for (Tensor* tensor : {&c.v, &c.dout}) {
        const std::int64_t row = tensor->shape[1] * tensor->shape[2];
        for (std::int64_t i = 0; i < tensor->elements(); ++i) {
          const auto exponent = static_cast<int>(test::uniform(17, 0, i / row) * spread) - 21;
          tensor->set(i, tensor == &c.v && i / row % 5 == 0 ? 0.0F : std::ldexp(tensor->at(i), exponent));
        }
      }
      for (std::int64_t i = 0; i < c.dlse->elements(); ++i) c.dlse->set(i, c.dlse->at(i) * 0x1p-30F);
      expect_near_reference(c, recipe, fmt::format("uneven by 2^{}", spread));
    }
  }
}

/// The only key of a row has D = dP, so dS = scale dLSE, whatever dP is; without dLSE zero. Noise in its place would be
/// quantized as large as it is, and move codes that are rounded by chance.
TEST_F(CudaEmbedBackward, ARowOfOneKeyHasDsOfDlseAlone) {
  for (const Recipe& recipe : embedded_recipes()) {
    for (const Mask& mask : {Mask::window(0, 0), Mask::window(-3, 3)}) {
      Case c = test::random_case(test::pack_self({1, 300, 1, 45}), {3, 3, 64, 128}, DType::f32, 19);
      c.problem.mask = mask;
      const std::string where = fmt::format("{}, window ({}, {})", recipe.name, mask.left, mask.right);
      const BackwardResult zero = test::device_backward(c, recipe);
      EXPECT_TRUE(test::all_zero(zero.dq)) << where;
      EXPECT_TRUE(test::all_zero(zero.dk)) << where;
      c = test::with_dlse(std::move(c));
      const BackwardResult got = test::device_backward(c, recipe);
      const BackwardResult want = test::backward(c, recipe, test::on_engine("reference"));
      const auto rounding = [](const Tensor& of) {
        return [&of](std::int64_t i) { return 0x1p-20 * std::fabs(static_cast<double>(of.at(i))); };
      };
      EXPECT_TRUE(test::within(got.dq, want.dq, rounding(want.dq))) << "dq of " << where;
      EXPECT_TRUE(test::within(got.dk, want.dk, rounding(want.dk))) << "dk of " << where;
    }
  }
}

bool rounds_by_chance(const Recipe& recipe) {
  const auto chance = [](const Operand& operand) { return operand.rounding == Rounding::stochastic; };
  return chance(recipe.dp.left) || chance(recipe.dv.tokens) || chance(recipe.dq.weights) || chance(recipe.dk.weights);
}

/// The rounding that kernels do without codes, against the codecs: every format, octave and share of a step.
TEST(CudaEmbedRounding, ByChanceIsTheCodecs) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m3, Format::e3m2, Format::e2m1}) {
    const cuda::RoundTo to = cuda::round_to(format);
    for (std::int64_t i = 0; i < 200'000; ++i) {
      const auto bits = random_bits(5, 1, static_cast<std::uint64_t>(i)) & detail::kAbsMask;
      float x = detail::float_of(bits);
      if (i % 4 != 0) x = std::ldexp(static_cast<float>(bits >> 7), static_cast<int>(bits % 40) - 44);
      if (i % 64 == 1) x = decode(format, static_cast<std::uint8_t>(bits));
      if (!(x >= 0) || std::isinf(x)) continue;
      const std::uint32_t random = i % 3 == 0 ? bits << 5 : random_bits(6, 1, static_cast<std::uint64_t>(i));
      ASSERT_EQ(cuda::rounded_by_chance(to, x, random), decode(format, encode_stochastic(format, x, random)))
          << x << " by " << random;
    }
  }
}

/// Each seed has the reference's bits, which are other ones.
TEST_F(CudaEmbedBackward, RandomBitsAreTheReferences) {
  for (const Recipe& recipe : embedded_recipes()) {
    if (!rounds_by_chance(recipe)) continue;
    const Case c = test::random_case(test::pack({{150, 150}, {140, 300}}), {4, 2, 64, 64}, DType::f32, 5);
    for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{0xFEDCBA9876543210U}}) {
      expect_near_reference(c, recipe, fmt::format("seed {}", seed), seed);
    }
    Options options = test::on_engine("cuda");
    options.seed = 1;
    const BackwardResult one = test::backward(c, recipe, options);
    options.seed = 2;
    EXPECT_GT(test::relative_l2(test::backward(c, recipe, options).dq, one.dq), 1e-2) << recipe.name;
  }
}

/// A recipe of the catalogue with something changed that the engine has no other test of.
template <class Change>
Recipe changed(std::string_view from, std::string name, const Change& change) {
  Recipe recipe = test::recipe_named(from);
  recipe.name = std::move(name);
  change(recipe);
  recipe.claims = derive_claims(recipe);
  EXPECT_TRUE(validate(recipe).ok()) << (validate(recipe).ok() ? "" : validate(recipe).error().message);
  return recipe;
}

std::vector<Recipe> recipes_of_ones_own() {
  const auto by_chance = [](std::initializer_list<Operand*> operands) {
    for (Operand* operand : operands) operand->rounding = Rounding::stochastic;
  };
  return {changed("mxfp8", "by-chance",
                  [&](Recipe& r) {
                    r.beta = 16;
                    by_chance({&r.dp.left, &r.dp.right, &r.dv.tokens, &r.dq.weights, &r.dk.weights, &r.dq.tokens,
                               &r.dk.tokens});
                  }),
          changed("mxfp8", "rows-by-chance",
                  [&](Recipe& r) {
                    r.dq.weights.block = r.dk.weights.block = Block::dims32();
                    by_chance({&r.dq.weights, &r.dk.weights});
                  }),
          changed("mxfp8", "codes-apart",
                  [&](Recipe& r) {
                    r.dk.weights.block = r.dv.weights.block = Block::channel32();
                    r.dq.tokens.block = Block::tokens32();
                    by_chance({&r.dk.weights});
                  }),
          changed("mxfp8", "other-formats",
                  [](Recipe& r) {
                    r.dq.weights.encoding = r.dk.weights.encoding = Encoding::e5m2;
                    r.dp.left.encoding = Encoding::e2m3;
                    r.dv.tokens.encoding = Encoding::e3m2;
                  }),
          changed("mxfp8", "bf16-weights",
                  [](Recipe& r) {
                    r.dv.weights.encoding = r.dq.weights.encoding = r.dk.weights.encoding = Encoding::bf16;
                  }),
          changed("fp4", "second-levels",
                  [&](Recipe& r) {
                    for (Operand* operand : {&r.dp.left, &r.dp.right, &r.dv.tokens, &r.dk.tokens}) {
                      operand->second_level = SecondLevel::adaptive;
                    }
                    by_chance({&r.dp.right, &r.dk.tokens});
                  }),
          changed("fp4", "half-sums-of-4-bits", [](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_sequence; }),
          changed("mxfp4-diagonal", "half-sums-of-cut-tiles",
                  [](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_causal; }),
          changed("fp4", "second-level-of-cut-tiles", [](Recipe& r) {
            r.dq.cut = WeightPair{r.dq.weights, r.dq.tokens};
            r.dq.weights.second_level = SecondLevel::fixed;
          })};
}

TEST_F(CudaEmbedBackward, RecipesOfOnesOwn) {
  for (const Recipe& recipe : recipes_of_ones_own()) {
    ASSERT_TRUE(cuda::supports_backward(recipe).ok()) << recipe.name;
    Case c = test::with_dlse(test::random_case(test::pack({{200, 260}, {33, 20}}), {2, 1, 128, 64}, DType::f32, 7));
    expect_near_reference(c, recipe, "causal", 3);
    c.problem.mask = Mask::window(40, 10);
    expect_near_reference(c, recipe, "window", 3);
  }
}

/// FP16 sums of dQ are no reason for these kernels, where every row's power of two is its own.
TEST(CudaEngine, HalfSumsStayOnCodes) {
  for (const char* name : {"mxfp8", "mxfp8-tokenblock"}) {
    Recipe halves = test::recipe_named(name);
    halves.dq_accumulation = DqAccumulation::f16_causal;
    EXPECT_TRUE(cuda::multiplies_codes_backward(halves)) << name;
    halves.dq_accumulation = DqAccumulation::f16_sequence;
    EXPECT_FALSE(cuda::multiplies_codes_backward(halves)) << name;
  }
}

/// These kernels quantize q, k and v anew, others do not.
TEST_F(CudaEmbedBackward, NullInputsAreRefused) {
  const Recipe recipe = test::recipe_named("bf16");
  const Case c = test::random_case(test::pack_self({40}), {2, 1, 64, 64}, DType::bf16, 3);
  for (const std::string name : {"q", "k", "v"}) {
    test::BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
    device.reserve(recipe);
    ASSERT_TRUE(device.forward.run(recipe).ok());
    Inputs& inputs = device.call.forward.inputs;
    (name == "q" ? inputs.q : name == "k" ? inputs.k : inputs.v).data = nullptr;
    EXPECT_TRUE(test::refused_with(device.run_backward(recipe), {name + ": null given"}));
    EXPECT_TRUE(device.gradients_untouched());
  }
}

// ---- Tables ----

template <class T>
std::vector<T> downloaded(const T* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  const auto* bytes = reinterpret_cast<const std::byte*>(from);
  EXPECT_TRUE(cuda::download(std::as_writable_bytes(std::span(to)), bytes, "a test").ok());
  return to;
}

/// A table of the backward and what the reference makes of the same operand.
struct Expected {
  std::string name;
  const Tensor* tensor = nullptr;
  QuantizeOptions options;
  cuda::TokenTable table;
  std::int64_t padded = 0;
  bool over_dims = false;
};

void expect_table(const Expected& of, const Case& c, const std::string& where) {
  const Result<Quantized> want = quantize(test::view(*of.tensor), c.problem.packing, of.options, 2);
  ASSERT_TRUE(want.ok()) << of.name;
  const std::int64_t tokens = of.tensor->shape[0];
  const std::int64_t heads = of.tensor->shape[1];
  const std::int64_t dims = of.tensor->shape[2];
  const bool folds = !of.over_dims && of.options.operand.folds();
  const std::vector<float> about = downloaded(of.table.about, tokens * heads);
  const std::vector<std::uint16_t> numbers = downloaded(of.table.values, tokens * heads * of.padded);
  for (std::int64_t row = 0; row < tokens * heads; ++row) {
    const std::string place = fmt::format("{} {} [{}, {}]", of.name, where, row / heads, row % heads);
    const auto at = static_cast<std::size_t>(row);
    const auto to = static_cast<std::size_t>(row % heads * tokens + row / heads);
    ASSERT_EQ(std::isnan(about[to]), want->poisoned[at] != 0) << place;
    if (std::isnan(about[to])) continue;
    if (!of.over_dims) {
      ASSERT_EQ(about[to], folds ? static_cast<float>(want->exponents[at]) : 0.0F) << place;
    }
    for (std::int64_t d = 0; d < dims; ++d) {
      const float number = decode_bf16(numbers[to * static_cast<std::size_t>(of.padded) + static_cast<std::size_t>(d)]);
      const float value = want->values[at * static_cast<std::size_t>(dims) + static_cast<std::size_t>(d)];
      ASSERT_EQ(of.over_dims ? number * about[to] : number, folds ? value : std::ldexp(value, want->exponents[at]))
          << place << " dim " << d;
    }
  }
}

/// Of all operands of the backward.
void expect_tables(const Case& c, const Recipe& recipe, const std::string& where) {
  constexpr std::uint64_t kSeed = 77;
  test::BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  device.call.seed = kSeed;
  ASSERT_TRUE(device.run(recipe).ok());
  ASSERT_TRUE(device.check().ok());
  const Result<cuda::BackwardLaunches> launches = cuda::prepare_backward(device.call, recipe, device.execution);
  ASSERT_TRUE(launches.ok() && launches->embedded) << recipe.name;
  const cuda::GradientTables& tables = launches->embedded->backward.tables;
  const cuda::Sizes& sizes = launches->embedded->backward.sizes;
  const std::int64_t values = std::int64_t{sizes.value_parts} * sizes.value_dims;
  const bool rotated = recipe.hadamard == Hadamard::at_128;
  const auto options = [&](const Operand& operand, Side side, bool hadamard, Stream stream) {
    return QuantizeOptions{operand, side, hadamard, kSeed, static_cast<std::uint64_t>(stream)};
  };
  std::vector<Expected> expected = {
      {"do in dp", &c.dout, options(recipe.dp.left, Side::query, false, Stream::dout_dp), tables.dout_rows, values,
       true},
      {"v in dp", &c.v, options(recipe.dp.right, Side::key, false, Stream::v_dp), tables.value_rows, values, true},
      {"do in dv", &c.dout, options(recipe.dv.tokens, Side::query, false, Stream::dout_dv), tables.dout, values},
      {"k in dq", &c.k, options(recipe.dq.tokens, Side::key, rotated, Stream::k_dq), tables.keys[cuda::kWholeTiles],
       sizes.key_dims},
      {"q in dk", &c.q, options(recipe.dk.tokens, Side::query, rotated, Stream::q_dk), tables.queries, sizes.key_dims}};
  if (recipe.dq.cut) {
    expected.push_back({"cut k in dq", &c.k, options(recipe.dq.cut->tokens, Side::key, rotated, Stream::k_dq),
                        tables.keys[cuda::kCutTiles], sizes.key_dims});
  }
  for (const Expected& of : expected) expect_table(of, c, fmt::format("{}, {}", recipe.name, where));
}

TEST_F(CudaEmbedBackward, TablesBitForBit) {
  std::vector<Recipe> all = embedded_recipes();
  for (Recipe& recipe : recipes_of_ones_own()) all.push_back(std::move(recipe));
  for (const Recipe& recipe : all) {
    Case c = test::random_case(test::pack({{150, 130}, {33, 300}, {0, 4}, {1, 1}}), {4, 2, 128, 40}, DType::f32, 9);
    for (Tensor* tensor : {&c.q, &c.k, &c.v, &c.dout}) {
      for (std::int64_t i = 0; i < tensor->elements(); ++i) {
        const auto exponent = static_cast<int>(test::uniform(17, 0, i / tensor->shape[2]) * 12) - 21;
        tensor->set(i, std::ldexp(tensor->at(i), exponent));
      }
      test::set_row(*tensor, 40, 1, NAN);
      test::set_row(*tensor, 60, 0, 0.0F);
    }
    expect_tables(c, recipe, "uneven");
  }
}

TEST_F(CudaEmbedBackward, TablesOfRealLayersBitForBit) {
  for (const test::Capture& capture : test::captures()) {
    for (const Recipe& recipe : embedded_recipes()) expect_tables(capture.c, recipe, "of " + capture.name);
  }
}

}  // namespace
}  // namespace mxflash
