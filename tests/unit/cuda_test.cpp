// The CUDA engine in the list of engines, and what it says where it cannot run. These run without a device too.
#include <nlohmann/json.hpp>

#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;

Case small_case() { return test::random_case(test::pack_self({5, 9}), {2, 1, 64, 64}, DType::bf16, 3); }

TEST(CudaEngine, IsTheFirstOfTheList) {
  ASSERT_FALSE(engines().empty());
  EXPECT_EQ(engines().front()->name(), "cuda");
  EXPECT_EQ(engines().front()->available().ok(), cuda::available().ok());
}

TEST(CudaEngine, WithoutADeviceSaysWhatIsMissing) {
  const Status available = cuda::available();
  if (available.ok()) GTEST_SKIP() << "there is a device";
  EXPECT_TRUE(test::refused_with(available, {"cuda", "needs"}));  // Of this machine, or of this build.
  EXPECT_EQ(available.error().kind, ErrorKind::unsupported);
  const Recipe recipe = test::recipe_named("mxfp8");
  const Result<const Engine*> selected = test::select("cuda", recipe);
  EXPECT_TRUE(test::refused_with(selected, {"engine: cuda cannot run recipe mxfp8 here", available.error().message}));
  EXPECT_EQ(selected.error().kind, ErrorKind::unsupported);
  const Case c = small_case();
  EXPECT_TRUE(test::refused_with(attention_forward(c.problem, recipe, c.inputs(), test::on_engine("cuda")),
                                 {"engine: cuda", available.error().message}));
  // What was asked for by name is never another engine; what was not is one that runs.
  EXPECT_NE((*test::select("auto", recipe))->name(), "cuda");
  EXPECT_TRUE(attention_forward(c.problem, recipe, c.inputs(), test::on_engine("auto")).ok());
}

/// Which recipes have one is no matter of the device.
TEST(CudaEngine, HasTheBackwardOfMostRecipes) {
  const Engine& engine = *engines().front();
  const Recipe recipe = test::recipe_named("mxfp8");
  if (!cuda::supports(recipe).ok()) GTEST_SKIP() << "this build has no CUDA engine";
  for (const Recipe& other : test::every_recipe()) {
    const bool has_one = test::has_backward(other) && other.name != "fp8-tensor";
    EXPECT_EQ(engine.supports(other, Pass::backward, {}).ok(), has_one) << other.name;
  }
  EXPECT_TRUE(test::refused_with(engine.supports(test::recipe_named("mxattention"), Pass::backward, {}),
                                 {"mxattention", "no backward"}));
  const auto changed_to = [&](const auto& change) {
    Recipe changed = recipe;
    changed.name = "changed";
    change(changed);
    changed.claims = derive_claims(changed);
    EXPECT_TRUE(validate(changed).ok()) << validate(changed).error().message;
    return engine.supports(changed, Pass::backward, {});
  };
  // What the kernels on E4M3 codes do not run.
  EXPECT_TRUE(changed_to([](Recipe& r) { r.beta = 16; }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dp.left.rounding = Rounding::stochastic; }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dv.weights.block = Block::channel32(); }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dk.tokens.encoding = Encoding::bf16; }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dq.weights.rounding = Rounding::stochastic; }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dq_accumulation = DqAccumulation::f16_sequence; }).ok());
  EXPECT_TRUE(changed_to([](Recipe& r) { r.dq.cut = WeightPair{r.dq.weights, {.encoding = Encoding::bf16}}; }).ok());
  // What no kernel runs.
  const Status status = changed_to([](Recipe& r) { r.dp.right.block = Block::tensor(); });
  EXPECT_TRUE(test::refused_with(
      status, {"cuda has no backward kernel for recipe changed", "dp.right is e4m3 tensor", "allowed"}));
  EXPECT_EQ(status.error().kind, ErrorKind::unsupported);
}

TEST(CudaEngine, WithoutADeviceHasNoBackwardHere) {
  if (cuda::available().ok()) GTEST_SKIP() << "there is a device";
  const Recipe recipe = test::recipe_named("mxfp8");
  EXPECT_NE((*test::select("auto", recipe, Pass::backward))->name(), "cuda");
  const Case c = small_case();
  const Result<BackwardResult> named = attention_backward(c.problem, recipe, c.inputs(), test::on_engine("cuda"));
  EXPECT_TRUE(test::refused_with(
      named, {"engine: cuda cannot run the backward of recipe mxfp8", cuda::available().error().message}));
  EXPECT_EQ(named.error().kind, ErrorKind::unsupported);
}

TEST(CudaEngine, CountsNoStatistics) {
  Options options;
  options.statistics = true;
  const Recipe recipe = test::recipe_named("mxfp8");
  EXPECT_TRUE(test::refused_with(engines().front()->supports(recipe, Pass::forward, options), {"statistics", "cuda"}));
  EXPECT_TRUE(test::refused_with(engines().front()->supports(recipe, Pass::backward, options), {"statistics", "cuda"}));
  EXPECT_NE((*select_engine(options, recipe, Pass::forward))->name(), "cuda");
}

TEST(CudaEngine, ListsWhatItRuns) {
  const auto list = nlohmann::json::parse(engines_json());
  ASSERT_EQ(list.size(), engines().size());
  const auto& cuda = list.front();
  EXPECT_EQ(cuda.at("name"), "cuda");
  const Status available = cuda::available();
  EXPECT_EQ(cuda.at("available"), available.ok());
  EXPECT_EQ(cuda.at("reason").is_null(), available.ok());
  ASSERT_EQ(cuda.at("recipes").size(), recipes().size());
  for (const auto& entry : cuda.at("recipes")) {
    const Recipe recipe = test::recipe_named(entry.at("name").get<std::string>());
    EXPECT_EQ(entry.at("runs"), available.ok() && cuda::supports(recipe).ok()) << recipe.name;
    const auto& backward = entry.at("backward");
    EXPECT_EQ(backward.at("runs"), available.ok() && cuda::supports_backward(recipe).ok()) << recipe.name;
    EXPECT_EQ(backward.at("reason").is_null(), backward.at("runs").get<bool>()) << recipe.name;
  }
}

}  // namespace
}  // namespace mxflash
