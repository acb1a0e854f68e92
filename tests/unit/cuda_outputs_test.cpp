// The CUDA engine against the reference: shapes, types, masks, lengths.
#include <limits>

#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;

class CudaOutputs : public test::OnDevice {};

/// Lengths around the blocks of 32 and the tiles of 128 and 256, Lq != Lk both ways, documents without queries, without
/// keys and without both; every document after the first begins at an odd row or next to one.
Packing mixed_packing() {
  return test::pack({{1, 1},
                     {31, 31},
                     {0, 0},
                     {32, 32},
                     {33, 33},
                     {0, 5},
                     {127, 127},
                     {128, 128},
                     {6, 0},
                     {129, 129},
                     {255, 256},
                     {257, 255},
                     {1, 300},
                     {300, 1},
                     {70, 33},
                     {33, 97},
                     {256, 257},
                     {0, 0}});
}

constexpr test::Dims kDims[] = {{64, 64},   {128, 128}, {16, 16}, {40, 72},  {96, 96},
                                {192, 128}, {256, 256}, {8, 8},   {120, 104}};
constexpr Mask kMasks[] = {Mask::causal(),        Mask::full(),          Mask::window(40, 0),
                           Mask::window(7, 50),   Mask::window(0, 0),    Mask::window(200, -8),
                           Mask::window(-5, 20),  Mask::window(7, -8),   Mask::window(3, Mask::unbounded),
                           {Mask::unbounded, -3}, {Mask::unbounded, 33}, {130, 129}};

TEST_F(CudaOutputs, C10_HeadDimsAndTypes) {
  const Packing packing = mixed_packing();
  for (const Recipe& recipe : test::device_recipes()) {
    for (const test::Dims& dims : kDims) {
      if (!test::runs_at(recipe, dims.head)) continue;
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        const test::Sizes sizes{2, 2, dims.head, dims.value};
        const Case c = test::random_case(packing, sizes, dtype, 11);
        test::expect_like_reference(c, recipe, fmt::format("{} {}", test::name_of_sizes(sizes), name_of(dtype)));
      }
    }
  }
}

TEST_F(CudaOutputs, C5_C7_C8_Masks) {
  const Packing packing = mixed_packing();
  for (const Recipe& recipe : test::device_recipes()) {
    for (const test::Dims& dims : {test::Dims{64, 64}, {128, 128}, {64, 128}}) {
      for (const Mask& mask : kMasks) {
        Case c = test::random_case(packing, {2, 1, dims.head, dims.value}, DType::bf16, 7);
        c.problem.mask = mask;
        test::expect_like_reference(
            c, recipe, fmt::format("dims {}/{} window ({}, {})", dims.head, dims.value, mask.left, mask.right));
      }
    }
  }
}

/// What no recipe of the catalogue has: approximate exponentials, other formats, other kinds of P beside each other.
std::vector<Recipe> other_recipes() {
  Recipe mitchell = test::recipe_named("mxattention");
  mitchell.name = "mitchell";
  mitchell.exponential = Exponential::mitchell;
  Recipe schraudolph = mitchell;
  schraudolph.name = "schraudolph";
  schraudolph.exponential = Exponential::schraudolph;
  schraudolph.hadamard = Hadamard::at_128;
  schraudolph.beta = 16;
  schraudolph.o = {{.encoding = Encoding::e4m3, .block = Block::tensor()},
                   {.encoding = Encoding::e4m3, .block = Block::token()},
                   std::nullopt};
  Recipe mixed = mitchell;
  mixed.name = "mixed";
  mixed.exponential = Exponential::exact;
  mixed.hadamard = Hadamard::off;
  mixed.beta = 4;
  mixed.s = {{.encoding = Encoding::e5m2, .block = Block::tokens32()},
             {.encoding = Encoding::e2m3, .block = Block::dims32(), .rule = ScaleRule::floor}};
  mixed.o = {{.encoding = Encoding::e2m3, .block = Block::dims32()},
             {.encoding = Encoding::e3m2, .block = Block::channel32()},
             WeightPair{{.encoding = Encoding::e3m2, .block = Block::tensor()},
                        {.encoding = Encoding::e5m2, .block = Block::token()}}};
  std::vector<Recipe> all{mitchell, schraudolph, mixed};
  for (Recipe& recipe : all) {
    recipe.claims = derive_claims(recipe);
    const Status status = validate(recipe);
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  }
  return all;
}

TEST_F(CudaOutputs, RecipesOfOnesOwn) {
  for (const Recipe& recipe : other_recipes()) {
    ASSERT_TRUE(cuda::supports(recipe).ok()) << recipe.name;
    for (const test::Dims& dims : {test::Dims{64, 64}, {128, 128}, {256, 256}, {32, 72}}) {
      for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(40, 0), Mask::window(7, 50)}) {
        Case c = test::random_case(mixed_packing(), {2, 1, dims.head, dims.value}, DType::bf16, 51);
        c.problem.mask = mask;
        test::expect_like_reference(
            c, recipe, fmt::format("dims {}/{} window ({}, {})", dims.head, dims.value, mask.left, mask.right));
      }
    }
  }
}

TEST_F(CudaOutputs, C11_GroupsOfHeads) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {4, 1}, {6, 2}, {3, 3}, {8, 2}, {33, 11}}) {
      const test::Sizes sizes{heads, kv_heads, 64, 64};
      Case c = test::random_case(test::pack({{70, 70}, {33, 97}, {140, 9}}), sizes, DType::bf16, 5);
      test::expect_like_reference(c, recipe, test::name_of_sizes(sizes));
      if (recipe.row_sum == RowSum::unquantized) continue;  // Its rows do not add up to 1.
      // A constant V a head shows which head a query reads; O is that constant, up to a step of its format.
      for (std::int64_t token = 0; token < c.v.shape[0]; ++token) {
        for (std::int64_t head = 0; head < kv_heads; ++head) {
          test::set_row(c.v, token, head, std::ldexp(1.0F, static_cast<int>(head)));
        }
      }
      c.problem.mask = Mask::full();
      const ForwardResult got = test::device_forward(c, recipe);
      Tensor want = got.o;
      for (std::int64_t i = 0; i < want.elements(); ++i) {
        const std::int64_t head = i / 64 % heads;
        const std::int64_t kv_head = head / (heads / kv_heads);
        want.set(i, std::ldexp(1.0F, static_cast<int>(kv_head)));
      }
      EXPECT_TRUE(test::within(got.o, want, [&](std::int64_t i) { return 0x1p-4 * want.at(i); }))
          << recipe.name << " " << test::name_of_sizes(sizes);
    }
  }
}

/// Every pair of lengths around the blocks, all in one pack.
TEST_F(CudaOutputs, C9_EveryPairOfLengths) {
  constexpr std::int32_t kLengths[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  std::vector<test::Lengths> lengths;
  for (const std::int32_t q : kLengths) {
    for (const std::int32_t k : kLengths) lengths.push_back({q, k});
  }
  for (const Recipe& recipe : test::device_recipes()) {
    for (const test::Dims& dims : {test::Dims{64, 64}, {128, 128}}) {
      for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(3, -1), Mask::window(0, 33)}) {
        Case c = test::random_case(test::pack(lengths), {1, 1, dims.head, dims.value}, DType::bf16, 23);
        c.problem.mask = mask;
        test::expect_like_reference(c, recipe,
                                    fmt::format("dims {} window ({}, {})", dims.head, mask.left, mask.right));
      }
    }
  }
}

TEST_F(CudaOutputs, C9_LongDocuments) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const test::Dims& dims : {test::Dims{64, 64}, {128, 128}}) {
      Case c = test::random_case(test::pack({{2081, 2081}, {1023, 1025}, {1, 4100}}), {2, 1, dims.head, dims.value},
                                 DType::bf16, 29);
      test::expect_like_reference(c, recipe, fmt::format("long, dims {}", dims.head));
      c.problem.mask = Mask::window(1000, 40);
      test::expect_like_reference(c, recipe, fmt::format("long under a window, dims {}", dims.head));
    }
  }
}

/// One key has all of the weight: O is its code times its exponent, without a rounding.
TEST_F(CudaOutputs, C9_ManyDocumentsOfOneToken) {
  const Packing packing = test::pack_self(std::vector<std::int32_t>(131072, 1));
  for (const Recipe& recipe : test::device_recipes()) {
    const Case c = test::random_case(packing, {2, 2, 64, 64}, DType::bf16, 31);
    const ForwardResult got = test::device_forward(c, recipe);
    const ForwardResult want = test::forward(c, recipe, test::on_engine("reference"));
    EXPECT_TRUE(test::same_bits(got.o, want.o)) << recipe.name;
    test::expect_outputs_like(got, want, c, recipe, fmt::format("of {}, one-token documents", recipe.name));
  }
}

TEST_F(CudaOutputs, C5_RowsWithoutKeysAreZero) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::window(7, -8), Mask::window(-40, 60)}) {
      Case c = test::random_case(test::pack({{300, 40}, {6, 0}, {5, 5}, {0, 9}}), {2, 1, 128, 128}, DType::bf16, 37);
      c.problem.mask = mask;
      const ForwardResult got = test::device_forward(c, recipe);
      std::int64_t without = 0;
      for (const Document& document : c.problem.packing.documents()) {
        for (std::int64_t query = 0; query < document.q_length; ++query) {
          if (!visible_keys(document, mask, query).empty()) continue;
          const std::int64_t row = document.q_begin + query;
          const ForwardResult one = test::rows_of(got, row, row + 1);
          for (std::int64_t i = 0; i < one.o.elements(); ++i) ASSERT_EQ(test::element_bits(one.o, i), 0U) << row;
          for (std::int64_t i = 0; i < one.lse.elements(); ++i) {
            ASSERT_EQ(one.lse.at(i), -std::numeric_limits<float>::infinity()) << row;
          }
          ++without;
        }
      }
      EXPECT_GT(without, 6) << "the mask leaves every row a key: this tests nothing";
    }
  }
}

TEST_F(CudaOutputs, NothingAtAll) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const test::Lengths& lengths : {test::Lengths{0, 0}, {0, 7}, {7, 0}}) {
      const Case c = test::random_case(test::pack({lengths}), {2, 1, 64, 64}, DType::bf16, 41);
      test::expect_like_reference(c, recipe, fmt::format("{} queries, {} keys", lengths.q, lengths.k));
    }
  }
}

TEST_F(CudaOutputs, C10_Scales) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const float scale : {0.0F, 0.3F, -0.25F, 0.01F}) {
      for (const std::int64_t dims : {40, 128}) {
        if (!test::runs_at(recipe, dims)) continue;
        Case c = test::random_case(test::pack({{70, 70}, {140, 200}}), {2, 1, dims, dims}, DType::f32, 43);
        c.problem.scale = scale;
        test::expect_like_reference(c, recipe, fmt::format("scale {} dims {}", scale, dims));
      }
    }
  }
}

/// Slices of a fused tensor, an odd base offset, transposed strides: the bits of contiguous tensors.
TEST_F(CudaOutputs, C13_Strides) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Case c = test::random_case(test::pack({{33, 70}, {129, 40}}), {4, 2, 64, 40}, dtype, 47);
      const ForwardResult want = test::device_forward(c, recipe);
      const std::int64_t tokens = c.k.shape[0];
      const test::StridedCopy fused(c.q, {1000, 64, 1}, 3);
      const test::StridedCopy transposed(c.k, {1, 64 * tokens, tokens}, 1);
      const test::StridedCopy by_head(c.v, {41, 41 * tokens, 1}, 0);
      const Inputs inputs{fused.view(), transposed.view(), by_head.view(), std::nullopt};
      const Result<ForwardResult> got = attention_forward(c.problem, recipe, inputs, test::on_engine("cuda"));
      ASSERT_TRUE(got.ok()) << got.error().message;
      test::expect_same_outputs(*got, want, recipe.name);
    }
  }
}

}  // namespace
}  // namespace mxflash
