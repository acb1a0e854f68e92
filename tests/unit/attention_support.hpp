// A whole attention problem with its tensors, and every recipe as a test parameter.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "mxflash/attention.hpp"
#include "mxflash/engine.hpp"
#include "unit/support.hpp"

namespace mxflash {

/// For the test names that GoogleTest prints.
inline void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

}  // namespace mxflash

namespace mxflash::test {

/// Sizes of a random problem.
struct Sizes {
  std::int64_t heads = 2;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 32;
  std::int64_t value_dim = 32;
};

struct Case {
  Problem problem;
  Tensor q, k, v, dout;
  std::optional<Tensor> dlse = std::nullopt;  ///< [tokens, heads, 1]

  [[nodiscard]] Inputs inputs() const {
    Inputs all{view(q), view(k), view(v), view(dout)};
    if (dlse) all.dlse = view(*dlse);
    return all;
  }
};

inline Case random_case(const Packing& packing, const Sizes& sizes, DType dtype = DType::f32, std::uint64_t seed = 1) {
  const auto tensor = [&](std::int64_t tokens, std::int64_t heads, std::int64_t dims, std::uint64_t offset) {
    return random_tensor(dtype, {tokens, heads, dims}, Distribution::normal, 4 * seed + offset);
  };
  return {{packing, Mask::causal(), std::nullopt},
          tensor(packing.tokens_q(), sizes.heads, sizes.head_dim, 0),
          tensor(packing.tokens_k(), sizes.kv_heads, sizes.head_dim, 1),
          tensor(packing.tokens_k(), sizes.kv_heads, sizes.value_dim, 2),
          tensor(packing.tokens_q(), sizes.heads, sizes.value_dim, 3)};
}

/// The same with a gradient of lse as large as dO's.
inline Case with_dlse(Case c, std::uint64_t seed = 91) {
  c.dlse = random_tensor(DType::f32, {c.q.shape[0], c.q.shape[1], 1}, Distribution::normal, seed);
  return c;
}

inline bool has_backward(const Recipe& recipe) { return validate_backward(recipe).ok(); }

/// The engine that these tests are about: MXFLASH_TEST_ENGINE, or the reference. CMake registers them once an engine.
inline std::string tested_engine() {
  const char* name = std::getenv("MXFLASH_TEST_ENGINE");
  return name == nullptr ? "reference" : name;
}
inline bool is_reference() { return tested_engine() == "reference"; }

/// Where this machine has no such engine, says why and leaves with the exit code that ctest takes for a skipped test.
class EngineIsHere : public testing::Environment {
 public:
  void SetUp() override {
    constexpr int kSkipped = 77;
    for (const Engine* engine : engines()) {
      if (engine->name() != tested_engine()) continue;
      const Status status = engine->available();
      if (status.ok()) return;
      std::puts(status.error().message.c_str());
      std::exit(kSkipped);
    }
    FAIL() << tested_engine() << " is not part of this build";
  }
};
inline testing::Environment* const kEngineIsHere = testing::AddGlobalTestEnvironment(new EngineIsHere);

inline Options two_threads() {
  Options options;
  options.engine = tested_engine();
  options.threads = 2;
  options.statistics = true;
  return options;
}

/// The engine that `name` stands for.
inline Result<const Engine*> select(std::string_view name, const Recipe& recipe, Pass pass = Pass::forward) {
  Options options;
  options.engine = name;
  return select_engine(options, recipe, pass);
}

inline ForwardResult forward(const Case& c, const Recipe& recipe, const Options& options = two_threads()) {
  Result<ForwardResult> result = attention_forward(c.problem, recipe, c.inputs(), options);
  EXPECT_TRUE(result.ok()) << recipe.name << ": " << (result.ok() ? "" : result.error().message);
  return result.ok() ? *std::move(result) : ForwardResult{};
}

inline BackwardResult backward(const Case& c, const Recipe& recipe, const Options& options = two_threads()) {
  Result<BackwardResult> result = attention_backward(c.problem, recipe, c.inputs(), options);
  EXPECT_TRUE(result.ok()) << recipe.name << ": " << (result.ok() ? "" : result.error().message);
  return result.ok() ? *std::move(result) : BackwardResult{};
}

inline ForwardResult exact(const Case& c) {
  Result<ForwardResult> result = exact_forward(c.problem, c.inputs(), two_threads());
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
  return result.ok() ? *std::move(result) : ForwardResult{};
}

inline BackwardResult exact_gradients(const Case& c) {
  Result<BackwardResult> result = exact_backward(c.problem, c.inputs(), two_threads());
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
  return result.ok() ? *std::move(result) : BackwardResult{};
}

/// Every output by name; gradients where the recipe has them.
struct Output {
  std::string name;
  Tensor tensor;
};

inline std::vector<Output> outputs(const Case& c, const Recipe& recipe, const Options& options = two_threads()) {
  ForwardResult f = forward(c, recipe, options);
  std::vector<Output> all = {{"o", std::move(f.o)}, {"lse", std::move(f.lse)}};
  if (!test::has_backward(recipe)) return all;
  BackwardResult b = backward(c, recipe, options);
  all.push_back({"dq", std::move(b.dq)});
  all.push_back({"dk", std::move(b.dk)});
  all.push_back({"dv", std::move(b.dv)});
  return all;
}

inline void expect_same(const std::vector<Output>& got, const std::vector<Output>& want, const std::string& where) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same_bits(got[i].tensor, want[i].tensor)) << got[i].name << " " << where;
  }
}

inline bool all_finite(const Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    if (!std::isfinite(tensor.at(i))) return false;
  }
  return true;
}

inline bool all_zero(const Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    if (tensor.at(i) != 0.0F) return false;
  }
  return true;
}

/// How far one code of P that falls on the other side of a tie moves a row: its step, relative, times w (1 - w) <= 1/4
/// of the row, on both sides of it.
inline double step_of(const Operand& weights) {
  const std::optional<Format> format = element_format(weights.encoding);
  const double bits = format ? spec_of(*format).mantissa_bits : 7;
  return std::ldexp(1.0, -static_cast<int>(bits)) / 2;
}

/// Rows (tokens and heads) with an element off by more than the output's rounding and FP32's noise.
inline std::int64_t rows_moved(const Tensor& got, const Tensor& want, double size) {
  const std::int64_t dims = want.shape.back();
  std::int64_t moved = 0;
  for (std::int64_t row = 0; row < want.elements() / dims; ++row) {
    bool off = false;
    for (std::int64_t i = row * dims; i < (row + 1) * dims; ++i) {
      const auto a = static_cast<double>(got.at(i));
      const auto b = static_cast<double>(want.at(i));
      off = off || std::fabs(a - b) > 0x1p-7 * std::fabs(b) + 0x1p-12 * size;
    }
    moved += off ? 1 : 0;
  }
  return moved;
}

inline Recipe recipe_named(std::string_view name) { return *find_recipe(name); }

/// Every recipe, and those with a backward at its other level of causality too.
inline std::vector<Recipe> every_recipe() {
  std::vector<Recipe> all = recipes();
  for (const Recipe& recipe : recipes()) {
    if (recipe.purpose != Purpose::training || recipe.claims.backward == Causality::exact) continue;
    Result<Recipe> changed = with_causality(recipe, Causality::exact);
    if (!changed.ok()) continue;
    changed->name += "-exact";
    all.push_back(*std::move(changed));
  }
  return all;
}

inline std::string name_of_recipe(const testing::TestParamInfo<Recipe>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (c == '-') c = '_';
  }
  return name;
}

}  // namespace mxflash::test
