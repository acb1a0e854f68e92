// What must not move a bit of the CUDA engine's outputs: another run, other documents in the pack, a document that goes
// on, later tokens whatever they hold.
#include <limits>

#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::rows_of;

class CudaBits : public test::OnDevice {};

/// The rows [begin, end) of q, k and v as one document.
Case document_of(const Case& c, std::int64_t begin, std::int64_t end) {
  Case part = c;
  part.problem.packing = Packing::single(end - begin, end - begin);
  part.q = rows_of(c.q, begin, end);
  part.k = rows_of(c.k, begin, end);
  part.v = rows_of(c.v, begin, end);
  return part;
}

TEST_F(CudaBits, C23_EveryRunIsTheSame) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const std::int64_t dims : {64, 128, 256}) {
      const Case c = test::random_case(test::pack({{700, 900}, {1, 1}, {33, 97}, {0, 4}, {512, 512}}),
                                       {4, 2, dims, dims}, DType::bf16, 3);
      const ForwardResult first = test::device_forward(c, recipe);
      for (int run = 0; run < 3; ++run) {
        test::expect_same_outputs(test::device_forward(c, recipe), first,
                                  fmt::format("of {} dims {} run {}", recipe.name, dims, run));
      }
    }
  }
}

/// A document alone, between others, behind many others.
TEST_F(CudaBits, C3_ADocumentDoesNotKnowItsPlaceInThePack) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(50, 7)}) {
      for (const std::int64_t dims : {64, 128}) {
        const std::vector<std::int32_t> lengths = {1, 70, 0, 131, 256, 33, 300, 2, 129};
        Case c = test::random_case(test::pack_self(lengths), {2, 1, dims, dims}, DType::bf16, 5);
        c.problem.mask = mask;
        const ForwardResult whole = test::device_forward(c, recipe);
        for (const Document& document : c.problem.packing.documents()) {
          const std::int64_t begin = document.q_begin;
          const std::int64_t end = begin + document.q_length;
          test::expect_same_outputs(test::device_forward(document_of(c, begin, end), recipe),
                                    test::rows_of(whole, begin, end),
                                    fmt::format("of {} dims {} rows {}..{} window ({}, {})", recipe.name, dims, begin,
                                                end, mask.left, mask.right));
        }
      }
    }
  }
}

/// The neighbours' values, however large.
TEST_F(CudaBits, C3_NeighboursDoNotReachADocument) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case before = test::random_case(test::pack_self({70, 131, 45}), {2, 1, 64, 64}, DType::bf16, 7);
    const ForwardResult was = test::device_forward(before, recipe);
    for (const float value : {3e38F, std::nanf(""), 0.0F}) {
      Case after = before;
      for (Tensor* tensor : {&after.q, &after.k, &after.v}) {
        for (std::int64_t token = 0; token < 246; ++token) {
          if (token >= 70 && token < 201) continue;
          for (std::int64_t head = 0; head < tensor->shape[1]; ++head) test::set_row(*tensor, token, head, value);
        }
      }
      test::expect_same_outputs(test::rows_of(test::device_forward(after, recipe), 70, 201),
                                test::rows_of(was, 70, 201), fmt::format("of {} beside {}", recipe.name, value));
    }
  }
}

/// A causal document that goes on keeps the bits of its first rows.
TEST_F(CudaBits, ADocumentThatGoesOnKeepsItsFirstRows) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::window(60, 0), Mask::window(90, -3)}) {
      for (const std::int64_t dims : {64, 128}) {
        Case c = test::random_case(Packing::single(700, 700), {2, 1, dims, dims}, DType::bf16, 11);
        c.problem.mask = mask;
        const ForwardResult whole = test::device_forward(c, recipe);
        for (const std::int64_t length : {1, 31, 32, 33, 127, 128, 129, 200, 255, 256, 257, 511, 699}) {
          const std::int64_t kept = test::kept_rows(recipe, length);
          const ForwardResult part = test::device_forward(document_of(c, 0, length), recipe);
          test::expect_same_outputs(test::rows_of(part, 0, kept), test::rows_of(whole, 0, kept),
                                    fmt::format("of {} dims {} of {} rows, window ({}, {})", recipe.name, dims, length,
                                                mask.left, mask.right));
        }
      }
    }
  }
}

/// Later tokens of the same document: other ones, huge ones, NaN, Inf, zeros.
TEST_F(CudaBits, C1_LaterTokensDoNotReachEarlierRows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Recipe& recipe : test::device_recipes()) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Case before = test::random_case(test::pack_self({300, 77}), {2, 1, 64, 64}, dtype, 13);
      const ForwardResult was = test::device_forward(before, recipe);
      for (const std::int64_t from : {1, 16, 31, 32, 33, 64, 100, 127, 128, 129, 160, 255, 256, 257, 299}) {
        for (const float value : {3e38F, -1e30F, 1e-30F, 7.0F, 0.0F, std::nanf(""), kInf}) {
          Case after = before;
          for (Tensor* tensor : {&after.q, &after.k, &after.v}) {
            for (std::int64_t token = from; token < 300; ++token) {
              for (std::int64_t head = 0; head < tensor->shape[1]; ++head) test::set_row(*tensor, token, head, value);
            }
          }
          test::expect_same_outputs(
              test::rows_of(test::device_forward(after, recipe), 0, test::kept_rows(recipe, from)),
              test::rows_of(was, 0, test::kept_rows(recipe, from)),
              fmt::format("of {} {} before {} from {} on", recipe.name, name_of(dtype), value, from));
        }
      }
    }
  }
}

/// The published case: V zero but for a tiny first token, before a large one in the same block or the next.
Case sparse_case() {
  Case c = test::random_case(Packing::single(128, 128), {1, 1, 64, 64}, DType::bf16, 17);
  c.q = c.k = test::constant_tensor(DType::bf16, c.q.shape, 1);
  c.v = Tensor::zeros(DType::bf16, c.v.shape);
  test::set_row(c.v, 0, 0, 0x1p-20F);
  return c;
}

/// One later token at a time, in one of the tensors, which a shared scale or exponent would spread.
TEST_F(CudaBits, C1_OneLaterTokenDoesNotReachEarlierRows) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case sparse = sparse_case();
    const Case dense = test::random_case(Packing::single(128, 128), {1, 1, 64, 64}, DType::bf16, 17);
    for (const Case& before : {sparse, dense}) {
      const ForwardResult was = test::device_forward(before, recipe);
      for (Tensor Case::* tensor : {&Case::q, &Case::k, &Case::v}) {
        for (const std::int64_t token : {1, 16, 31, 32, 63, 64, 127}) {
          for (const float value : {1.0F, 1e30F, 0x1p-30F}) {
            Case after = before;
            test::set_row(after.*tensor, token, 0, value);
            const std::int64_t kept = test::kept_rows(recipe, token);
            test::expect_same_outputs(test::rows_of(test::device_forward(after, recipe), 0, kept),
                                      test::rows_of(was, 0, kept),
                                      fmt::format("of {} before {} at token {}", recipe.name, value, token));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxflash
