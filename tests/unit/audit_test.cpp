#include "mxflash/audit.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>

#include "mxflash/formats.hpp"

namespace mxflash {
namespace {

/// Three documents, one of them with other query than key counts, grouped heads, a few large channels in q and k.
struct Pack {
  Tensor q, k, v, dout;
  Problem problem;

  explicit Pack(Mask mask = Mask::causal(), DType dtype = DType::bf16)
      : problem{*Packing::make(std::vector<std::int32_t>{0, 70, 103, 203}, std::vector<std::int32_t>{0, 70, 103, 235},
                               203, 235),
                mask, std::nullopt} {
    q = random({203, 4, 32}, dtype, 1, 1.0F);
    k = random({235, 2, 32}, dtype, 2, 1.0F);
    v = random({235, 2, 32}, dtype, 3, 1.0F);
    dout = random({203, 4, 32}, dtype, 4, 1e-3F);
  }

  static Tensor random(std::vector<std::int64_t> shape, DType dtype, std::uint64_t stream, float size) {
    Tensor tensor = Tensor::zeros(dtype, std::move(shape));
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      const double u = (random_bits(7, stream, static_cast<std::uint64_t>(2 * i)) + 1.0) * 0x1p-32;
      const double w = random_bits(7, stream, static_cast<std::uint64_t>(2 * i + 1)) * 0x1p-32;
      const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * w);
      tensor.set(i, static_cast<float>(normal) * size * (i % 32 == 5 ? 4.0F : 1.0F));
    }
    return tensor;
  }

  [[nodiscard]] Inputs inputs() const { return {*q.view("q"), *k.view("k"), *v.view("v"), *dout.view("do")}; }
};

AuditOptions probes(int count) {
  AuditOptions options;
  options.probes = count;
  return options;
}

AttentionFunction exact_attention() {
  return [](const Problem& problem, const Inputs& inputs) -> Result<AttentionOutputs> {
    Result<ForwardResult> forward = exact_forward(problem, inputs, {});
    if (!forward.ok()) return forward.error();
    AttentionOutputs out{forward->o, forward->lse, std::nullopt};
    if (inputs.dout) {
      Result<BackwardResult> backward = exact_backward(problem, inputs, {});
      if (!backward.ok()) return backward.error();
      out.gradients = std::move(backward).value();
    }
    return out;
  };
}

class AuditRecipes : public testing::TestWithParam<std::string> {};

TEST_P(AuditRecipes, KeepsItsClaimOrIsCaught) {
  const Pack pack;
  const Recipe recipe = *find_recipe(GetParam());
  const Result<AuditReport> report = audit_recipe(recipe, pack.problem, pack.inputs(), probes(150), {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_TRUE(report->holds) << report->verdict;
  EXPECT_TRUE(report->deterministic);
  EXPECT_EQ(report->has_backward, validate_backward(recipe).ok());
  EXPECT_GT(report->forward.probes, 100);
  if (recipe.claims.forward == Causality::exact) {
    EXPECT_EQ(report->forward.leaks, 0);
  }
  if (recipe.claims.forward != Causality::leaks) {
    EXPECT_EQ(report->row_sum_error, 0.0);
  }
  if (recipe.purpose == Purpose::negative) {
    EXPECT_GT(report->forward.leaks, 0) << report->verdict;
  }
}

TEST_P(AuditRecipes, ExactCausalityHoldsWhereItIsAllowed) {
  const Pack pack;
  const Result<Recipe> recipe = with_causality(*find_recipe(GetParam()), Causality::exact);
  if (!recipe.ok()) return;  // the refusals are the recipe room's tests
  const Result<AuditReport> report = audit_recipe(*recipe, pack.problem, pack.inputs(), probes(100), {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->forward.leaks, 0);
  EXPECT_EQ(report->backward.leaks, 0) << "reach " << report->backward.reach_tokens;
  EXPECT_TRUE(report->holds) << report->verdict;
}

TEST_P(AuditRecipes, WindowsLeakNoMoreThanCausal) {
  const Pack pack(Mask::window(40, 0));
  const Recipe recipe = *find_recipe(GetParam());
  if (recipe.purpose == Purpose::negative) return;
  const Result<AuditReport> report = audit_recipe(recipe, pack.problem, pack.inputs(), probes(40), {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_TRUE(report->holds) << report->verdict;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Recipe& recipe : recipes()) names.push_back(recipe.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, AuditRecipes, testing::ValuesIn(recipe_names()), [](const auto& recipe) {
  std::string name = recipe.param;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
});

TEST(Audit, ExactAttentionIsExact) {
  const Pack pack;
  const Result<AuditReport> report = audit(exact_attention(), {}, pack.problem, pack.inputs(), probes(60));
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->holds) << report->verdict;
  EXPECT_GT(report->backward.probes, 50);
  EXPECT_EQ(report->documents.probes, 15);  // 2 kinds x (1 + 2 + 1 + 2 documents in the other half), and 3 moved
}

/// Wraps exact attention and spoils its outputs.
AttentionFunction spoiled(const std::function<void(const Problem&, const Inputs&, AttentionOutputs&)>& spoil) {
  return [spoil](const Problem& problem, const Inputs& inputs) -> Result<AttentionOutputs> {
    Result<AttentionOutputs> out = exact_attention()(problem, inputs);
    if (out.ok()) spoil(problem, inputs, *out);
    return out;
  };
}

TEST(Audit, FindsAMaximumOverTheSequence) {
  const Pack pack;
  // What a scale from the whole document does: its last value reaches the first row.
  const auto function = spoiled([](const Problem& problem, const Inputs& inputs, AttentionOutputs& out) {
    for (const Document& document : problem.packing.documents()) {
      const std::int64_t place = document.q_begin * out.o.shape[1] * out.o.shape[2];
      out.o.set(place, out.o.at(place) + 1e-3F * inputs.v.at(document.k_begin + document.k_length - 1, 0, 0));
    }
  });
  const Result<AuditReport> report = audit(function, {}, pack.problem, pack.inputs(), probes(60));
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->holds);
  EXPECT_GT(report->forward.leaks, 0);
  EXPECT_EQ(report->forward.worst.position, 0);
  EXPECT_EQ(report->forward.worst.output, "o");
  EXPECT_GT(report->forward.reach_tokens, kBlock);
  EXPECT_EQ(report->backward.leaks, 0);
  EXPECT_EQ(report->documents.leaks, 0);
}

TEST(Audit, FindsALeakInDqAlone) {
  const Pack pack;
  const auto function = spoiled([](const Problem& problem, const Inputs& inputs, AttentionOutputs& out) {
    if (!out.gradients) return;
    for (const Document& document : problem.packing.documents()) {
      for (std::int64_t row = document.q_begin; row + 1 < document.q_begin + document.q_length; ++row) {
        out.gradients->dq.set(row * 4 * 32, inputs.q.at(row + 1, 0, 0));
      }
    }
  });
  const Result<AuditReport> report = audit(function, {}, pack.problem, pack.inputs(), probes(256));
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->forward.leaks, 0);
  EXPECT_GT(report->backward.leaks, 0);
  EXPECT_EQ(report->backward.reach_tokens, 1);
  // One token back: a recipe that claims `block` is allowed that, one that claims `exact` is not.
  EXPECT_FALSE(report->holds);
  EXPECT_TRUE(audit(function, {Causality::exact, Causality::block}, pack.problem, pack.inputs(), probes(256))->holds);
}

TEST(Audit, ProbesTheGradientOfLse) {
  const Pack pack;
  const Tensor dlse = Pack::random({203, 4, 1}, DType::f32, 5, 1e-3F);
  Inputs inputs = pack.inputs();
  inputs.dlse = *dlse.view("dlse");
  for (const std::string_view name : {"bf16", "mxfp8", "fp4"}) {
    const Result<AuditReport> report = audit_recipe(*find_recipe(name), pack.problem, inputs, probes(30), {});
    ASSERT_TRUE(report.ok());
    EXPECT_TRUE(report->holds) << name << ": " << report->verdict;
  }
  const auto later = spoiled([](const Problem& problem, const Inputs& with, AttentionOutputs& out) {
    if (!out.gradients) return;
    for (const Document& document : problem.packing.documents()) {
      for (std::int64_t row = document.q_begin; row + 1 < document.q_begin + document.q_length; ++row) {
        out.gradients->dq.set(row * 4 * 32, with.dlse->at(row + 1, 0, 0));
      }
    }
  });
  const Result<AuditReport> report = audit(later, {}, pack.problem, inputs, probes(256));
  ASSERT_TRUE(report.ok());
  EXPECT_GT(report->backward.leaks, 0);
  EXPECT_FALSE(report->holds);
}

TEST(Audit, FindsNeighboursAndPlaces) {
  const Pack pack;
  const auto neighbour = spoiled([](const Problem&, const Inputs& inputs, AttentionOutputs& out) {
    out.o.set(out.o.elements() - 1, inputs.v.at(0, 0, 0));
  });
  Result<AuditReport> report = audit(neighbour, {}, pack.problem, pack.inputs(), probes(30));
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->holds);
  EXPECT_GE(report->documents.leaks, 3);  // With either kind, though 0 and 2 are both even, and at another place.

  const auto place = spoiled([](const Problem& problem, const Inputs&, AttentionOutputs& out) {
    out.lse.set(0, static_cast<float>(problem.packing.documents()[0].q_length));
  });
  report = audit(place, {}, pack.problem, pack.inputs(), probes(30));
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->holds);
  EXPECT_EQ(report->documents.worst.output, "lse");
}

TEST(Audit, FindsOtherBitsTheSecondTime) {
  const Pack pack;
  std::atomic<int> calls{0};
  const auto function = spoiled([&calls](const Problem&, const Inputs&, AttentionOutputs& out) {
    if (++calls == 2) out.lse.set(3, 0.0F);
  });
  const Result<AuditReport> report = audit(function, {}, pack.problem, pack.inputs(), probes(30));
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->deterministic);
  EXPECT_FALSE(report->holds);
}

TEST(Audit, FindsRowsThatMissTheirNormalizer) {
  const Pack pack;
  const Result<AuditReport> report =
      audit_recipe(*find_recipe("naive-fp4"), pack.problem, pack.inputs(), probes(30), {});
  ASSERT_TRUE(report.ok());
  EXPECT_GT(report->row_sum_error, 0.05);
  EXPECT_TRUE(report->holds);
}

TEST(Audit, ANegativeThatIsNotCaughtDoesNotHold) {
  const Pack pack;
  const Result<AuditReport> report =
      audit(exact_attention(), {Causality::leaks, Causality::leaks}, pack.problem, pack.inputs(), probes(30));
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->holds);
}

TEST(Audit, FullMaskHasNoEarlierRows) {
  const Pack pack(Mask::full());
  const Result<AuditReport> report = audit(exact_attention(), {}, pack.problem, pack.inputs(), probes(30));
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->forward.probes, 0);
  EXPECT_EQ(report->documents.leaks, 0);
  EXPECT_TRUE(report->holds);
}

TEST(Audit, PositionsCoverEveryResidue) {
  // One long document, and what each run was fed tells where it was changed.
  Pack pack;
  pack.q = Pack::random({600, 1, 8}, DType::f32, 1, 1.0F);
  pack.k = Pack::random({600, 1, 8}, DType::f32, 2, 1.0F);
  pack.v = Pack::random({600, 1, 8}, DType::f32, 3, 1.0F);
  pack.problem.packing = Packing::single(600, 600);
  std::vector<bool> seen(256);
  const AttentionFunction function = [&](const Problem&, const Inputs& inputs) -> Result<AttentionOutputs> {
    for (std::int64_t t = 0; t < 600; ++t) {
      if (inputs.v.at(t, 0, 0) == pack.v.at(t * 8) && inputs.k.at(t, 0, 0) == pack.k.at(t * 8) &&
          inputs.q.at(t, 0, 0) == pack.q.at(t * 8)) {
        continue;
      }
      if (t != 0) seen[static_cast<std::size_t>(t % 256)] = true;  // t = 0: the constant V of the row sums
      break;
    }
    return AttentionOutputs{Tensor::zeros(DType::f32, {600, 1, 8}), Tensor::zeros(DType::f32, {600, 1}), std::nullopt};
  };
  Inputs inputs = pack.inputs();
  inputs.dout.reset();
  ASSERT_TRUE(audit(function, {}, pack.problem, inputs, probes(256)).ok());
  EXPECT_EQ(std::ranges::count(seen, true), 256);
}

TEST(Audit, ProbesAreRoundedUpToWholeRounds) {
  const Pack pack;
  for (const auto& [given, rounds] : {std::pair{1, 1}, {6, 1}, {7, 2}}) {
    const Result<AuditReport> report = audit(exact_attention(), {}, pack.problem, pack.inputs(), probes(given));
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->forward.probes, 6 * rounds) << given;  // three documents, two key/value heads
  }
}

TEST(Audit, RefusesNoProbes) {
  const Pack pack;
  const Result<AuditReport> report = audit(exact_attention(), {}, pack.problem, pack.inputs(), probes(0));
  ASSERT_FALSE(report.ok());
  EXPECT_NE(report.error().message.find("probes: 0 given"), std::string::npos);
}

}  // namespace
}  // namespace mxflash
