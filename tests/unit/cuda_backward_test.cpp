// The CUDA engine's backward against the reference and against float64: shapes, types, masks, lengths.
#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::Case;

class CudaBackward : public test::BackwardOnDevice {};

/// As in cuda_outputs_test.cpp.
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
                     {63, 65},
                     {257, 255},
                     {1, 300},
                     {300, 1},
                     {70, 33},
                     {33, 97},
                     {64, 192},
                     {0, 0}});
}

std::string name_of_mask(const Mask& mask) { return fmt::format("window ({}, {})", mask.left, mask.right); }

/// As far from float64 as the reference, and hardly further: the reference differs from it by what quantization does.
void expect_as_near_the_truth(const Case& c, const Recipe& recipe, const std::string& where) {
  const BackwardResult truth = test::exact_gradients(c);
  const auto truths = test::gradients_of(truth);
  const BackwardResult device = test::device_backward(c, recipe);
  const BackwardResult reference = test::backward(c, recipe, test::on_engine("reference"));
  const auto got = test::gradients_of(device);
  const auto want = test::gradients_of(reference);
  for (std::size_t i = 0; i < truths.size(); ++i) {
    const double own = test::relative_l2(*got[i].second, *truths[i].second);
    const double allowed = test::relative_l2(*want[i].second, *truths[i].second);
    EXPECT_LE(own, 1.05 * allowed + 1e-4) << truths[i].first << " of " << recipe.name << ", " << where;
  }
}

TEST_F(CudaBackward, NearTheTruthAsTheReferenceIs) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const auto check = [&](std::int64_t dims, const Mask& mask) {
      Case c = test::random_case(test::pack_self({300, 517}), {2, 2, dims, dims}, DType::bf16, 7);
      c.problem.mask = mask;
      const std::string where = fmt::format("dims {} {}", dims, name_of_mask(mask));
      expect_as_near_the_truth(c, recipe, where);
      expect_as_near_the_truth(test::with_dlse(std::move(c)), recipe, where + " with dlse");
    };
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(60, 0)}) check(64, mask);
    for (const std::int64_t dims : {128, 256}) check(dims, Mask::causal());
  }
}

TEST_F(CudaBackward, C10_HeadDimsAndTypes) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const test::Dims& dims : {test::Dims{64, 64},
                                   {128, 128},
                                   {16, 16},
                                   {40, 72},
                                   {96, 96},
                                   {192, 128},
                                   {64, 256},
                                   {256, 256},
                                   {8, 8},
                                   {120, 104},
                                   {128, 64}}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        const test::Sizes sizes{2, 2, dims.head, dims.value};
        const Case c = test::random_case(mixed_packing(), sizes, dtype, 11);
        test::expect_gradients_like_reference(c, recipe,
                                              fmt::format("{} {}", test::name_of_sizes(sizes), name_of(dtype)));
      }
    }
  }
}

TEST_F(CudaBackward, C5_C7_C8_Masks) {
  constexpr Mask kMasks[] = {Mask::causal(),        Mask::full(),          Mask::window(40, 0),
                             Mask::window(7, 50),   Mask::window(0, 0),    Mask::window(200, -8),
                             Mask::window(-5, 20),  Mask::window(7, -8),   Mask::window(3, Mask::unbounded),
                             {Mask::unbounded, -3}, {Mask::unbounded, 33}, {130, 129}};
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const test::Dims& dims : {test::Dims{64, 64}, {128, 128}}) {
      for (const Mask& mask : kMasks) {
        Case c = test::random_case(mixed_packing(), {2, 1, dims.head, dims.value}, DType::bf16, 7);
        c.problem.mask = mask;
        c = test::with_dlse(std::move(c));
        test::expect_gradients_like_reference(c, recipe, fmt::format("dims {} {}", dims.head, name_of_mask(mask)));
      }
    }
  }
}

TEST_F(CudaBackward, C11_GroupsOfHeads) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {4, 1}, {6, 2}, {3, 3}, {8, 2}, {33, 11}}) {
      const test::Sizes sizes{heads, kv_heads, 64, 64};
      Case c = test::random_case(test::pack({{70, 70}, {33, 97}, {140, 9}}), sizes, DType::bf16, 5);
      test::expect_gradients_like_reference(c, recipe, test::name_of_sizes(sizes));
    }
  }
}

/// A head of a group whose dO is zero, or far smaller, has another unit of dV's sums, or none.
TEST_F(CudaBackward, C11_HeadsOfAGroupFarApart) {
  for (const Recipe& recipe : test::backward_recipes()) {
    // The last three: 127 to 129 octaves apart, where their quotient leaves FP32.
    for (const auto& [one, other] : {std::pair{1.0F, 0.0F},
                                     {1.0F, 0x1p-4F},
                                     {1.0F, 0x1p-8F},
                                     {1.0F, 0x1p-90F},
                                     {0x1p30F, 0x1p-97F},
                                     {0x1p30F, 0x1p-98F},
                                     {0x1p30F, 0x1p-99F}}) {
      for (std::int64_t head = 0; head < 4; ++head) {
        Case c = test::random_case(test::pack({{70, 70}, {33, 97}, {140, 9}}), {4, 1, 64, 64}, DType::f32, 5);
        for (std::int64_t i = 0; i < c.dout.elements(); ++i) {
          c.dout.set(i, c.dout.at(i) * (i / 64 % 4 == head ? one : other));
        }
        test::expect_gradients_like_reference(c, recipe,
                                              fmt::format("dO of head {} times {}, of others {}", head, one, other));
      }
    }
  }
}

/// Keys that the head with large dO does not weigh have their dV of the other head alone: in a unit of its own.
TEST_F(CudaBackward, C11_LightHeadsKeepTheirDv) {
  constexpr std::int64_t kLength = 640;
  constexpr std::int64_t kDims = 64;
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const float light : {0x1p-4F, 0x1p-8F, 0x1p-70F}) {
      Case c = test::random_case(test::pack_self({kLength}), {2, 1, kDims, kDims}, DType::f32, 61);
      for (std::int64_t i = 0; i < c.dout.elements(); ++i) {
        const bool late = i / (2 * kDims) >= kLength / 2;
        c.dout.set(i, i / kDims % 2 == 1 ? c.dout.at(i) * light : late ? 0.0F : c.dout.at(i));
      }
      const Tensor got = test::device_backward(c, recipe).dv;
      const Tensor want = test::backward(c, recipe, test::on_engine("reference")).dv;
      double error = 0;
      double size = 0;
      for (std::int64_t i = kLength / 2 * kDims; i < got.elements(); ++i) {
        error += std::pow(static_cast<double>(got.at(i)) - want.at(i), 2);
        size += std::pow(static_cast<double>(want.at(i)), 2);
      }
      EXPECT_LE(std::sqrt(error / size), test::kGradientL2) << recipe.name << ", dO of the light head times " << light;
    }
  }
}

/// Logits whose references a record of a tile does not hold. So large, a sum of codes that lacks its low bits moves
/// weights between keys: only where few rows have two that are near, so the whole is compared. 0.1 is not derived: it
/// is far from the 1 that a reference held at the record's bound would make of rows whose weights all leave E4M3.
TEST_F(CudaBackward, C4_LogitsBeyondSixteenBits) {
  for (const Recipe& recipe : test::backward_recipes()) {
    Case c = test::random_case(test::pack({{70, 70}, {140, 200}}), {2, 1, 64, 64}, DType::f32, 67);
    c.problem.scale = 2048;
    c = test::with_dlse(std::move(c));
    const BackwardResult got = test::device_backward(c, recipe);
    const BackwardResult want = test::backward(c, recipe, test::on_engine("reference"));
    EXPECT_LE(test::relative_l2(got.dq, want.dq), 0.1) << recipe.name;
    EXPECT_LE(test::relative_l2(got.dk, want.dk), 0.1) << recipe.name;
    EXPECT_LE(test::relative_l2(got.dv, want.dv), 0.1) << recipe.name;
  }
}

/// More planes than take a tile together.
TEST_F(CudaBackward, C9_ManyPlanes) {
  for (const Recipe& recipe : test::backward_recipes()) {
    test::expect_gradients_like_reference(
        test::with_dlse(test::random_case(test::pack_self({150, 7, 200}), {140, 140, 16, 16}, DType::bf16, 71)), recipe,
        "140 heads");
  }
}

/// Every pack of up to three documents of few lengths, each a call of its own.
TEST_F(CudaBackward, C9_EveryPackOfFewSmallDocuments) {
  constexpr std::int32_t kLengths[] = {0, 1, 2, 33};
  std::vector<std::vector<std::int32_t>> packs = {{}};
  for (std::size_t at = 0; at < packs.size(); ++at) {
    if (packs[at].size() == 3) continue;
    for (const std::int32_t length : kLengths) {
      std::vector<std::int32_t> longer = packs[at];
      longer.push_back(length);
      packs.push_back(std::move(longer));
    }
  }
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const std::vector<std::int32_t>& lengths : packs) {
      if (lengths.empty()) continue;
      Case c = test::with_dlse(test::random_case(test::pack_self(lengths), {2, 1, 16, 16}, DType::f32, 23));
      const std::string where = fmt::format("{} documents, the last of {}", lengths.size(), lengths.back());
      test::expect_gradients_like_reference(c, recipe, where);
      c.problem.mask = Mask::full();
      test::expect_gradients_like_reference(c, recipe, where + ", full");
    }
  }
}

/// Every pair of lengths around the blocks, all in one pack.
TEST_F(CudaBackward, C9_EveryPairOfLengths) {
  constexpr std::int32_t kLengths[] = {0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  std::vector<test::Lengths> lengths;
  for (const std::int32_t q : kLengths) {
    for (const std::int32_t k : kLengths) lengths.push_back({q, k});
  }
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(3, -1), Mask::window(0, 33)}) {
      Case c = test::random_case(test::pack(lengths), {1, 1, 64, 64}, DType::bf16, 23);
      c.problem.mask = mask;
      test::expect_gradients_like_reference(c, recipe, name_of_mask(mask));
    }
  }
}

/// Many key tiles that add to the same dQ, many tiles of queries that one key tile walks.
TEST_F(CudaBackward, C9_LongDocuments) {
  const Packing packing = test::pack({{1100, 1100}, {1, 2100}, {2100, 1}});
  for (const Recipe& recipe : test::backward_recipes()) {
    Case c = test::random_case(packing, {2, 2, 64, 64}, DType::bf16, 29);
    test::expect_gradients_like_reference(c, recipe, "long");
    c.problem.mask = Mask::window(500, 40);
    test::expect_gradients_like_reference(c, recipe, "long under a window");
    test::expect_gradients_like_reference(test::random_case(packing, {2, 1, 128, 128}, DType::bf16, 31), recipe,
                                          "long, dims 128");
  }
}

TEST_F(CudaBackward, C9_C11_SixteenHeadsOfAGroup) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const std::int64_t dims : {16, 72}) {
      for (const Mask& mask : {Mask::causal(), Mask::window(420, 50)}) {
        test::expect_gradients_like_reference(test::large_group(mask, dims, DType::bf16), recipe,
                                              fmt::format("dims {} {}", dims, name_of_mask(mask)));
      }
    }
  }
}

/// A row of one key has dS = scale dLSE; dV is the codes of dO.
TEST_F(CudaBackward, C9_ManyDocumentsOfOneToken) {
  const Packing packing = test::pack_self(std::vector<std::int32_t>(131072, 1));
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case c = test::with_dlse(test::random_case(packing, {2, 2, 16, 16}, DType::bf16, 31));
    test::expect_gradients_like_reference(c, recipe, "one-token documents");
  }
}

/// A key that no query sees and a row that sees no key have zeros, whatever dO and dLSE are.
TEST_F(CudaBackward, C5_WhatMeetsNothingIsZero) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::window(7, -8), Mask::window(-40, 60)}) {
      Case c = test::random_case(test::pack({{300, 40}, {6, 0}, {5, 5}, {0, 9}, {40, 300}}), {2, 1, 128, 128},
                                 DType::bf16, 37);
      c.problem.mask = mask;
      c = test::with_dlse(std::move(c));
      const BackwardResult got = test::device_backward(c, recipe);
      std::vector<bool> seen(static_cast<std::size_t>(c.k.shape[0]));
      std::int64_t nothing = 0;
      for (const Document& document : c.problem.packing.documents()) {
        for (std::int64_t query = 0; query < document.q_length; ++query) {
          const KeyRange range = visible_keys(document, mask, query);
          for (std::int64_t key = range.begin; key < range.end; ++key) {
            seen[static_cast<std::size_t>(document.k_begin + key)] = true;
          }
          if (!range.empty()) continue;
          const std::int64_t row = document.q_begin + query;
          ASSERT_TRUE(test::all_zero(test::rows_of(got.dq, row, row + 1))) << "dq " << row;
          ++nothing;
        }
      }
      for (std::int64_t key = 0; key < c.k.shape[0]; ++key) {
        if (seen[static_cast<std::size_t>(key)]) continue;
        ASSERT_TRUE(test::all_zero(test::rows_of(got.dk, key, key + 1))) << "dk " << key;
        ASSERT_TRUE(test::all_zero(test::rows_of(got.dv, key, key + 1))) << "dv " << key;
        ++nothing;
      }
      EXPECT_GT(nothing, 6) << "the mask leaves everything something: this tests nothing";
    }
  }
}

TEST_F(CudaBackward, NothingAtAll) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const test::Lengths& lengths : {test::Lengths{0, 0}, {0, 7}, {7, 0}, {0, 300}}) {
      const Case c = test::random_case(test::pack({lengths}), {2, 1, 64, 64}, DType::bf16, 41);
      test::expect_gradients_like_reference(c, recipe, fmt::format("{} queries, {} keys", lengths.q, lengths.k));
    }
  }
}

TEST_F(CudaBackward, C10_Scales) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const float scale : {0.0F, 0.3F, -0.25F, 0.01F}) {
      for (const std::int64_t dims : {40, 128}) {
        Case c = test::random_case(test::pack({{70, 70}, {140, 200}}), {2, 1, dims, dims}, DType::f32, 43);
        c.problem.scale = scale;
        test::expect_gradients_like_reference(test::with_dlse(std::move(c)), recipe,
                                              fmt::format("scale {} dims {}", scale, dims));
      }
    }
  }
}

/// dO of captures is tiny (rms 3e-7), or huge; the gradients are linear in it. A weight near a tie may be met on
/// another path.
TEST_F(CudaBackward, C2_GradientsOfEverySize) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case plain = test::random_case(test::pack({{150, 150}, {70, 40}}), {2, 1, 64, 64}, DType::f32, 47);
    const BackwardResult one = test::device_backward(plain, recipe);
    for (const int exponent : {-60, -21, 40, 90}) {
      Case c = plain;
      c.dout = test::scaled(std::move(c.dout), std::ldexp(1.0F, exponent));
      const BackwardResult got = test::device_backward(c, recipe);
      const auto wants = test::gradients_of(one);
      const auto gots = test::gradients_of(got);
      for (std::size_t i = 0; i < wants.size(); ++i) {
        const Tensor back = test::scaled(*gots[i].second, std::ldexp(1.0F, -exponent));
        EXPECT_LE(test::relative_l2(back, *wants[i].second), 1e-3)
            << wants[i].first << " of " << recipe.name << ", dO times 2^" << exponent;
        EXPECT_TRUE(test::all_finite(*gots[i].second)) << wants[i].first << " of " << recipe.name;
      }
    }
  }
}

/// Exponents that differ from token to token, which fold into P and dS.
TEST_F(CudaBackward, UnevenTokens) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const int spread : {6, 14}) {
      Case c = test::random_case(test::pack_self({150, 290}), {2, 1, 64, 64}, DType::f32, 17);
      for (Tensor* tensor : {&c.v, &c.dout}) {
        const std::int64_t row = tensor->shape[1] * tensor->shape[2];
        for (std::int64_t i = 0; i < tensor->elements(); ++i) {
          const auto exponent = static_cast<int>(test::uniform(18, 0, i / row) * spread);
          tensor->set(i, std::ldexp(tensor->at(i), exponent));
        }
      }
      expect_as_near_the_truth(c, recipe, fmt::format("v and do uneven by 2^{}", spread));
    }
  }
}

TEST_F(CudaBackward, C2_OutlierColumns) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const std::int64_t dims : {64, 128}) {
      for (Tensor Case::* tensor : {&Case::q, &Case::k, &Case::v, &Case::dout}) {
        Case c = test::random_case(test::pack_self({150, 270}), {2, 1, dims, dims}, DType::bf16, 29);
        (c.*tensor) = test::random_tensor(DType::bf16, (c.*tensor).shape, test::Distribution::outliers, 31);
        c.problem.scale = 0.02F;  // Else rows are one key's.
        expect_as_near_the_truth(c, recipe, fmt::format("an outlier column, dims {}", dims));
      }
    }
  }
}

/// Slices of a fused tensor, an odd base offset, transposed strides: the bits of contiguous tensors.
TEST_F(CudaBackward, C13_Strides) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Case c = test::with_dlse(test::random_case(test::pack({{33, 70}, {129, 40}}), {4, 2, 64, 40}, dtype, 47));
      const BackwardResult want = test::device_backward(c, recipe);
      const std::int64_t tokens = c.q.shape[0];
      const test::StridedCopy fused(c.q, {1000, 64, 1}, 3);
      const test::StridedCopy transposed(c.k, {1, 64 * c.k.shape[0], c.k.shape[0]}, 1);
      const test::StridedCopy by_head(c.dout, {41, 41 * tokens, 1}, 0);
      const test::StridedCopy dlse(*c.dlse, {1, tokens, 1}, 5);
      const Inputs inputs{fused.view(), transposed.view(), test::view(c.v), by_head.view(), dlse.view()};
      const Result<BackwardResult> got = attention_backward(c.problem, recipe, inputs, test::on_engine("cuda"));
      ASSERT_TRUE(got.ok()) << got.error().message;
      test::expect_same_gradients(*got, want, recipe.name);
    }
  }
}

/// Zeros for dLSE are as none.
TEST_F(CudaBackward, ADlseOfZeroIsNone) {
  for (const Recipe& recipe : test::backward_recipes()) {
    Case c = test::random_case(test::pack({{33, 70}, {129, 140}}), {4, 2, 64, 64}, DType::bf16, 53);
    const BackwardResult want = test::device_backward(c, recipe);
    c.dlse = Tensor::zeros(DType::f32, {c.q.shape[0], c.q.shape[1], 1});
    test::expect_same_gradients(test::device_backward(c, recipe), want, recipe.name);
  }
}

}  // namespace
}  // namespace mxflash
