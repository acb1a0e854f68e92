// A NaN or Inf reaches exactly the rows that mathematically depend on it.
#include "unit/attention_support.hpp"

namespace mxflash {
namespace {

using test::Case;

enum class Where { q, k, v, dout, dlse };

bool is_gradient(Where where) { return where == Where::dout || where == Where::dlse; }

/// A token in the middle of the second of three documents, in its second block of 32.
constexpr std::int64_t kPoisoned = 20 + 40;

class NotANumber : public testing::TestWithParam<Recipe> {
 protected:
  static Case clean_case() {
    return test::random_case(test::pack_self({20, 70, 33}), {.heads = 2, .kv_heads = 1, .head_dim = 32});
  }

  static Tensor& tensor_of(Case& c, Where where) {
    switch (where) {
      case Where::q: return c.q;
      case Where::k: return c.k;
      case Where::v: return c.v;
      case Where::dout: return c.dout;
      case Where::dlse: return *c.dlse;
    }
    return c.q;
  }

  static Case poisoned_case(Where where, float value) {
    Case c = where == Where::dlse ? test::with_dlse(clean_case()) : clean_case();
    Tensor& tensor = tensor_of(c, where);
    tensor.set(kPoisoned * tensor.shape[1] * tensor.shape[2] + (where == Where::dlse ? 0 : 5), value);
    return c;
  }

  static Case zeroed_case(Where where) {
    Case c = where == Where::dlse ? test::with_dlse(clean_case()) : clean_case();
    test::set_row(tensor_of(c, where), kPoisoned, 0, 0.0F);
    return c;
  }
};

INSTANTIATE_TEST_SUITE_P(Attention, NotANumber, testing::ValuesIn(test::every_recipe()), test::name_of_recipe);

std::string name_of(Where where) {
  switch (where) {
    case Where::q: return "q";
    case Where::k: return "k";
    case Where::v: return "v";
    case Where::dout: return "do";
    case Where::dlse: return "dlse";
  }
  return "";
}

/// By row of the last dimension (an element of lse is a row): whether it holds a NaN.
std::vector<bool> nan_rows(const Tensor& tensor) {
  const std::int64_t dims = tensor.shape.size() == 3 ? tensor.shape[2] : 1;
  std::vector<bool> rows;
  for (std::int64_t row = 0; row * dims < tensor.elements(); ++row) {
    bool nan = false;
    for (std::int64_t d = 0; d < dims; ++d) nan = nan || std::isnan(tensor.at(row * dims + d));
    rows.push_back(nan);
  }
  return rows;
}

std::vector<test::Output> exact_outputs(const Case& c, bool gradients) {
  ForwardResult f = test::exact(c);
  std::vector<test::Output> all = {{"o", std::move(f.o)}, {"lse", std::move(f.lse)}};
  if (!gradients) return all;
  BackwardResult b = test::exact_gradients(c);
  all.push_back({"dq", std::move(b.dq)});
  all.push_back({"dk", std::move(b.dk)});
  all.push_back({"dv", std::move(b.dv)});
  return all;
}

TEST_P(NotANumber, ReachesTheRowsThatDependOnItAndNoOther) {
  const Recipe& recipe = GetParam();
  const bool gradients = test::has_backward(recipe);
  for (const Where where : {Where::q, Where::k, Where::v, Where::dout, Where::dlse}) {
    if (is_gradient(where) && !gradients) continue;
    const Case c = poisoned_case(where, std::nanf(""));
    const std::vector<test::Output> got = test::outputs(c, recipe);
    const std::vector<test::Output> want = exact_outputs(c, gradients);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::vector<bool> got_rows = nan_rows(got[i].tensor);
      const std::vector<bool> want_rows = nan_rows(want[i].tensor);
      ASSERT_EQ(got_rows.size(), want_rows.size());
      for (std::size_t row = 0; row < got_rows.size(); ++row) {
        ASSERT_EQ(got_rows[row], want_rows[row]) << name_of(where) << " -> " << got[i].name << " row " << row;
      }
    }
  }
}

/// What is not NaN has the bits it has with zeros in the token's place, forward everywhere and backward in the other
/// documents; in its own document dS of a zero row may share a scale of 32 x 32, where that of a NaN row does not.
TEST_P(NotANumber, TakesNoPartInSharedScales) {
  const Recipe& recipe = GetParam();
  for (const Where where : {Where::q, Where::k, Where::v, Where::dout, Where::dlse}) {
    if (is_gradient(where) && !test::has_backward(recipe)) continue;
    const std::vector<test::Output> got = test::outputs(poisoned_case(where, std::nanf("")), recipe);
    const std::vector<test::Output> want = test::outputs(zeroed_case(where), recipe);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const bool forward = i < 2;
      const std::int64_t per_token = got[i].tensor.elements() / got[i].tensor.shape[0];
      for (std::int64_t e = 0; e < got[i].tensor.elements(); ++e) {
        const std::int64_t token = e / per_token;
        if (std::isnan(got[i].tensor.at(e)) || (!forward && token >= 20 && token < 90)) continue;
        ASSERT_EQ(test::element_bits(got[i].tensor, e), test::element_bits(want[i].tensor, e))
            << name_of(where) << " -> " << got[i].name << test::place_of(got[i].tensor, e);
      }
    }
  }
}

/// LSE and dV are functions of q, k (and dO): no NaN, and no other bit, comes from a NaN in v.
TEST_P(NotANumber, InVLeavesLseAndDv) {
  const Recipe& recipe = GetParam();
  const std::vector<test::Output> got = test::outputs(poisoned_case(Where::v, std::nanf("")), recipe);
  const std::vector<test::Output> want = test::outputs(zeroed_case(Where::v), recipe);
  EXPECT_TRUE(test::same_bits(got[1].tensor, want[1].tensor)) << "lse";
  if (got.size() > 2) {
    EXPECT_TRUE(test::same_bits(got[4].tensor, want[4].tensor)) << "dv";
  }
}

/// dV is a function of q, k and dO.
TEST_P(NotANumber, InDlseLeavesDv) {
  const Recipe& recipe = GetParam();
  if (!test::has_backward(recipe)) return;
  const BackwardResult got = test::backward(poisoned_case(Where::dlse, std::nanf("")), recipe);
  EXPECT_TRUE(test::same_bits(got.dv, test::backward(clean_case(), recipe).dv));
}

/// A row that sees no key has no gradient for a NaN to reach.
TEST_P(NotANumber, InDlseOfARowWithoutKeysReachesNothing) {
  const Recipe& recipe = GetParam();
  if (!test::has_backward(recipe)) return;
  Case c = test::with_dlse(test::random_case(test::pack({{40, 8}, {6, 0}}), {.heads = 2, .kv_heads = 1}));
  const auto set_rows = [&](float value) {
    for (const std::int64_t token : {0, 31, 43}) test::set_row(*c.dlse, token, 1, value);
  };
  set_rows(0.0F);
  const BackwardResult want = test::backward(c, recipe);
  for (const float value : {std::nanf(""), INFINITY, 1e38F}) {
    set_rows(value);
    const BackwardResult got = test::backward(c, recipe);
    EXPECT_TRUE(test::same_bits(got.dq, want.dq)) << "dq with " << value;
    EXPECT_TRUE(test::same_bits(got.dk, want.dk)) << "dk with " << value;
    EXPECT_TRUE(test::same_bits(got.dv, want.dv)) << "dv with " << value;
  }
}

TEST_P(NotANumber, AnInfIsTreatedLikeANan) {
  const Recipe& recipe = GetParam();
  for (const Where where : {Where::q, Where::k, Where::v, Where::dout, Where::dlse}) {
    if (is_gradient(where) && !test::has_backward(recipe)) continue;
    const std::vector<test::Output> nan = test::outputs(poisoned_case(where, std::nanf("")), recipe);
    for (const float inf : {INFINITY, -INFINITY}) {
      const std::vector<test::Output> got = test::outputs(poisoned_case(where, inf), recipe);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(nan_rows(got[i].tensor), nan_rows(nan[i].tensor)) << name_of(where) << " -> " << got[i].name;
      }
    }
  }
}

TEST_P(NotANumber, AMaskedTokenIsNotSeen) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack({{5, 40}}), {.heads = 1, .kv_heads = 1});
  c.problem.mask = Mask::window(3, 0);  // keys 32..39 are seen, 0..31 are not
  const std::vector<test::Output> clean = test::outputs(c, recipe);
  test::set_row(c.k, 31, 0, std::nanf(""));
  test::set_row(c.v, 7, 0, INFINITY);
  const std::vector<test::Output> got = test::outputs(c, recipe);
  const bool tensor_wide = recipe.s.right.block == Block::tensor();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(test::all_finite(got[i].tensor)) << got[i].name;
    if (!tensor_wide) {
      EXPECT_TRUE(test::same_bits(got[i].tensor, clean[i].tensor)) << got[i].name;
    }
  }
}

/// Two heads of one token: only one of them is poisoned.
TEST_P(NotANumber, StaysInItsHead) {
  const Recipe& recipe = GetParam();
  Case c = test::random_case(test::pack_self({40}), {.heads = 2, .kv_heads = 2});
  c.q.set(32, std::nanf(""));
  for (const test::Output& output : test::outputs(c, recipe)) {
    const std::vector<bool> rows = nan_rows(output.tensor);
    for (std::size_t row = 0; row < rows.size(); row += 2) {
      ASSERT_FALSE(rows[row]) << output.name << " token " << row / 2;
    }
    EXPECT_TRUE(rows[1]) << output.name;
  }
}

}  // namespace
}  // namespace mxflash
