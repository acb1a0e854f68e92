// NaN and Inf in the CUDA engine's backward: they reach what depends on them, which is what they reach in the
// reference, and nothing else.
#include <limits>

#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::Case;

class CudaBackwardNan : public test::BackwardOnDevice {};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// One element of one of the inputs.
struct Poison {
  std::string name;
  std::int64_t token = 0;
  std::int64_t head = 0;
  float value = kNan;
};

Tensor& tensor_of(Case& c, const std::string& name) {
  if (name == "q") return c.q;
  if (name == "k") return c.k;
  if (name == "v") return c.v;
  return name == "do" ? c.dout : *c.dlse;
}

Case poisoned(Case c, const Poison& poison) {
  Tensor& tensor = tensor_of(c, poison.name);
  const std::int64_t dims = tensor.shape[2];
  tensor.set((poison.token * tensor.shape[1] + poison.head) * dims + dims / 3, poison.value);
  return c;
}

void expect_same_nans(const Tensor& got, const Tensor& want, const std::string& where) {
  ASSERT_EQ(got.shape, want.shape);
  std::int64_t different = 0;
  std::int64_t first = 0;
  for (std::int64_t i = want.elements(); i-- > 0;) {
    if (std::isnan(got.at(i)) == std::isnan(want.at(i))) continue;
    first = i;
    ++different;
  }
  EXPECT_EQ(different, 0) << where << ", first at " << test::place_of(want, first) << ": " << got.at(first)
                          << " instead of " << want.at(first);
}

bool any_nan(const BackwardResult& result) {
  for (const auto& [name, tensor] : test::gradients_of(result)) {
    for (std::int64_t i = 0; i < tensor->elements(); ++i) {
      if (std::isnan(tensor->at(i))) return true;
    }
  }
  return false;
}

/// The poisoned places are the reference's; the others are about what they are there, since a poisoned token takes no
/// part in the scales that it would have shared, and in the other documents what they are without it.
void expect_poison_stays(const Case& clean, const Poison& poison, const Recipe& recipe, const std::string& what) {
  const Case c = poisoned(clean, poison);
  const std::string where = fmt::format("of {}, {} in {}[{}, {}], {}", recipe.name, poison.value, poison.name,
                                        poison.token, poison.head, what);
  const BackwardResult was = test::device_backward(clean, recipe);
  const BackwardResult got = test::device_backward(c, recipe);
  const BackwardResult want = test::backward(c, recipe, test::on_engine("reference"));
  EXPECT_TRUE(any_nan(want)) << "nothing was poisoned: this tests nothing, " << where;
  const auto wases = test::gradients_of(was);
  const auto gots = test::gradients_of(got);
  const auto wants = test::gradients_of(want);
  for (std::size_t i = 0; i < wants.size(); ++i) {
    const Tensor& tensor = *gots[i].second;
    expect_same_nans(tensor, *wants[i].second, wants[i].first + " " + where);
    EXPECT_LE(test::relative_l2(tensor, *wants[i].second), test::kGradientL2) << wants[i].first << " " << where;
    for (const Document& document : clean.problem.packing.documents()) {
      const bool of_queries = poison.name == "q" || poison.name == "do" || poison.name == "dlse";
      const std::int64_t begin = of_queries ? document.q_begin : document.k_begin;
      const std::int64_t length = of_queries ? document.q_length : document.k_length;
      if (poison.token >= begin && poison.token < begin + length) continue;
      const std::int64_t first = i == 0 ? document.q_begin : document.k_begin;
      const std::int64_t end = first + (i == 0 ? document.q_length : document.k_length);
      EXPECT_TRUE(test::same_bits(test::rows_of(tensor, first, end), test::rows_of(*wases[i].second, first, end)))
          << wants[i].first << " of another document, " << where;
    }
  }
}

TEST_F(CudaBackwardNan, C20_ReachesWhatDependsOnItAlone) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(20, 10)}) {
      Case clean = test::with_dlse(
          test::random_case(test::pack({{40, 40}, {140, 150}, {33, 33}}), {4, 2, 64, 64}, DType::bf16, 3));
      clean.problem.mask = mask;
      const std::string what = fmt::format("window ({}, {})", mask.left, mask.right);
      for (const float value : {kNan, kInf, -kInf}) {
        for (const Poison& poison : {Poison{"q", 95, 2, value}, Poison{"k", 75, 1, value}, Poison{"v", 75, 0, value},
                                     Poison{"do", 95, 2, value}, Poison{"dlse", 95, 3, value}}) {
          expect_poison_stays(clean, poison, recipe, what);
        }
      }
      // The first and the last token of a document, whose tiles are those of its neighbours too.
      for (const char* name : {"q", "k", "v", "do", "dlse"}) {
        expect_poison_stays(clean, {name, 40, 1, kNan}, recipe, what);
        expect_poison_stays(clean, {name, 39, 0, kNan}, recipe, what);
      }
    }
  }
}

TEST_F(CudaBackwardNan, OfEveryTypeAndHeadDim) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const DType dtype : {DType::f16, DType::f32}) {
      for (const std::int64_t dims : {40, 128, 256}) {
        const Case clean = test::with_dlse(test::random_case(test::pack_self({70, 33}), {2, 1, dims, dims}, dtype, 5));
        for (const char* name : {"q", "k", "v", "do", "dlse"}) {
          expect_poison_stays(clean, {name, 41, 0, kNan}, recipe, fmt::format("{} dims {}", name_of(dtype), dims));
        }
      }
    }
  }
}

/// All of a document's tokens poisoned, which a maximum over exponents must not trip over.
TEST_F(CudaBackwardNan, OfEveryTokenOfADocument) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const char* name : {"q", "k", "v", "do"}) {
      Case c = test::random_case(test::pack_self({40, 70}), {1, 1, 64, 64}, DType::bf16, 7);
      const BackwardResult was = test::device_backward(c, recipe);
      for (std::int64_t token = 0; token < 40; ++token) test::set_row(tensor_of(c, name), token, 0, kNan);
      const BackwardResult got = test::device_backward(c, recipe);
      const BackwardResult want = test::backward(c, recipe, test::on_engine("reference"));
      const auto wases = test::gradients_of(was);
      const auto gots = test::gradients_of(got);
      const auto wants = test::gradients_of(want);
      for (std::size_t i = 0; i < wants.size(); ++i) {
        expect_same_nans(*gots[i].second, *wants[i].second, fmt::format("{}, all of {}", wants[i].first, name));
        EXPECT_TRUE(test::same_bits(test::rows_of(*gots[i].second, 40, 110), test::rows_of(*wases[i].second, 40, 110)))
            << wants[i].first << " of another document, all of " << name;
      }
    }
  }
}

/// A row that sees no key has no gradient for a NaN to reach; a masked key is not seen.
TEST_F(CudaBackwardNan, OfWhatNobodySeesReachesNothing) {
  for (const Recipe& recipe : test::backward_recipes()) {
    Case c = test::with_dlse(test::random_case(test::pack({{40, 8}, {6, 0}, {5, 40}}), {2, 1, 64, 64}, DType::bf16, 9));
    c.problem.mask = Mask::window(3, 0);
    const BackwardResult want = test::device_backward(c, recipe);
    for (const std::int64_t token : {0, 31, 43}) {
      for (const char* name : {"q", "do", "dlse"}) test::set_row(tensor_of(c, name), token, 1, kNan);
    }
    test::set_row(c.k, 8, 0, kNan);
    test::set_row(c.v, 15, 0, kInf);
    const BackwardResult got = test::device_backward(c, recipe);
    for (const auto& [name, tensor] : test::gradients_of(got)) {
      EXPECT_TRUE(test::all_finite(*tensor)) << name << " of " << recipe.name;
    }
    // dO's exponents are counted from the largest of the document, in which a poisoned one takes no part.
    EXPECT_TRUE(test::same_bits(got.dq, want.dq)) << "dq of " << recipe.name;
    EXPECT_TRUE(test::same_bits(got.dk, want.dk)) << "dk of " << recipe.name;
  }
}

/// dV is a function of q, k and dO.
TEST_F(CudaBackwardNan, InVAndDlseLeavesDv) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case clean = test::with_dlse(test::random_case(test::pack_self({70, 150}), {2, 1, 64, 64}, DType::bf16, 11));
    const BackwardResult want = test::device_backward(clean, recipe);
    const BackwardResult got = test::device_backward(poisoned(clean, {"dlse", 100, 1, kNan}), recipe);
    EXPECT_TRUE(test::same_bits(got.dv, want.dv)) << recipe.name;
    EXPECT_TRUE(test::all_finite(test::device_backward(poisoned(clean, {"v", 100, 0, kNan}), recipe).dv));
  }
}

}  // namespace
}  // namespace mxflash
