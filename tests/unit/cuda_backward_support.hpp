// What the tests of the CUDA engine's backward share: the recipes, how far gradients may be from the reference's, and
// calls on device memory that is guarded on both sides.
#pragma once

#include "unit/cuda_support.hpp"

namespace mxflash::test {

/// A recipe of E4M3 codes whose dQ adds up in FP16.
inline Recipe with_half_sums(Recipe recipe) {
  recipe.name += "-half-sums";
  recipe.dq_accumulation = DqAccumulation::f16_causal;
  recipe.claims = derive_claims(recipe);
  EXPECT_TRUE(validate(recipe).ok()) << recipe.name;
  return recipe;
}

/// Every recipe of the catalogue, at both levels of causality, and those that run on codes with FP16 sums of dQ.
inline std::vector<Recipe> every_recipe_and_half_sums() {
  std::vector<Recipe> all = every_recipe();
  for (const Recipe& recipe : every_recipe()) {
    if (recipe.name.starts_with("mxfp8")) all.push_back(with_half_sums(recipe));
  }
  return all;
}

/// How far dQ added up in another order may be, as relative_l2.
inline double order_noise(const Recipe& recipe) { return recipe.dq_accumulation == DqAccumulation::f32 ? 1e-5 : 1e-3; }

/// What the engine claims to run backward. MXFLASH_TEST_RECIPE: that one alone.
inline std::vector<Recipe> backward_recipes() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : every_recipe_and_half_sums()) {
    if (cuda::supports_backward(recipe).ok()) all.push_back(recipe);
  }
  for (const std::string_view name : {"mxfp8", "mxfp8-exact", "mxfp8-tokenblock", "mxfp8-half-sums",
                                      "mxfp8-exact-half-sums", "mxfp8-tokenblock-half-sums"}) {
    EXPECT_TRUE(std::ranges::any_of(all, [&](const Recipe& recipe) { return recipe.name == name; })) << name;
  }
  const char* one = std::getenv("MXFLASH_TEST_RECIPE");
  if (one != nullptr) std::erase_if(all, [&](const Recipe& recipe) { return recipe.name != one; });
  EXPECT_FALSE(all.empty()) << "MXFLASH_TEST_RECIPE: " << one << " has no backward on the device";
  return all;
}

/// Whether the recipe that MXFLASH_TEST_RECIPE asks for has a backward; the error says why not. A name of no recipe is
/// left to backward_recipes, which fails.
inline Status asked_for_backward() {
  const char* one = std::getenv("MXFLASH_TEST_RECIPE");
  if (one == nullptr) return {};
  const std::vector<Recipe> all = every_recipe_and_half_sums();
  const auto found = std::ranges::find_if(all, [&](const Recipe& recipe) { return recipe.name == one; });
  return found == all.end() ? Status{} : cuda::supports_backward(*found);
}

/// Skips too where MXFLASH_TEST_RECIPE leaves no recipe that has a backward.
class BackwardOnDevice : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    if (const Status status = asked_for_backward(); !status.ok()) GTEST_SKIP() << status.error().message;
  }
};

/// Sixteen heads of a group, documents of up to six key tiles.
inline Case large_group(const Mask& mask, std::int64_t dims, DType dtype) {
  const Packing packing = pack({{385, 385}, {384, 384}, {1, 1}, {420, 300}, {500, 660}, {600, 600}});
  Case c = with_dlse(random_case(packing, {16, 1, dims, dims}, dtype, 53));
  c.problem.mask = mask;
  return c;
}

inline BackwardResult device_backward(const Case& c, const Recipe& recipe) {
  return backward(c, recipe, on_engine("cuda"));
}

/// The three by name.
inline std::vector<std::pair<std::string, const Tensor*>> gradients_of(const BackwardResult& result) {
  return {{"dq", &result.dq}, {"dk", &result.dk}, {"dv", &result.dv}};
}

inline void expect_same_gradients(const BackwardResult& got, const BackwardResult& want, const std::string& where) {
  EXPECT_TRUE(same_bits(got.dq, want.dq)) << "dq " << where;
  EXPECT_TRUE(same_bits(got.dk, want.dk)) << "dk " << where;
  EXPECT_TRUE(same_bits(got.dv, want.dv)) << "dv " << where;
}

/// The terms whose sum an element of a gradient is, by their size.
class Terms {
 public:
  explicit Terms(const Tensor& like)
      : dims_(like.shape[2]), squares_(static_cast<std::size_t>(like.elements())), sums_(squares_) {}

  void add(std::int64_t row, std::int64_t dim, double size) {
    const auto at = static_cast<std::size_t>(row * dims_ + dim);
    squares_[at] += size * size;
    sums_[at] += size;
  }
  [[nodiscard]] double root(std::int64_t i) const { return std::sqrt(squares_[static_cast<std::size_t>(i)]); }
  [[nodiscard]] double sum(std::int64_t i) const { return sums_[static_cast<std::size_t>(i)]; }

 private:
  std::int64_t dims_;
  std::vector<double> squares_;
  std::vector<double> sums_;
};

/// How far an element may be from the reference's, from float64 attention on the inputs themselves.
///
/// A sum of FP8 products is off by about 2^-10 of its largest ones (cuda_support.hpp), which carries one weight in 90
/// over a tie of E4M3, P's or that of the operand made from it; dS likewise. Each moves one term of an element by up to
/// 1/8, so two by a quarter; moved ones are few and independent: a quarter of the root of the sum of the terms' squares
/// is what one term that stands alone can move by, and eleven deviations where there are many. D moves all of a row's
/// dS together, by a quarter of the root of its own terms. dP is off by 2^-9 |dO| |V|, which a dS that is next to zero
/// shows. The accumulators lose up to 2^-8 of the sum of the terms' sizes.
class GradientBounds {
 public:
  explicit GradientBounds(const Case& c)
      : c_(c),
        scale_(c.problem.scale ? static_cast<double>(*c.problem.scale)
                               : 1 / std::sqrt(static_cast<double>(c.q.shape[2]))),
        rows_{by_row(c.q), by_row(c.k), by_row(c.v), by_row(c.dout)},
        dq_(c.q),
        dk_(c.k),
        dv_(c.v) {
    for (const Document& document : c.problem.packing.documents()) {
      for (std::int64_t query = 0; query < document.q_length; ++query) {
        for (std::int64_t head = 0; head < c.q.shape[1]; ++head) add_row(document, query, head);
      }
    }
  }

  /// Prints the worst place where one is outside.
  void expect(const BackwardResult& got, const BackwardResult& want, const std::string& where) const {
    EXPECT_EQ(got.dq.dtype, want.dq.dtype) << where;
    EXPECT_TRUE(within(got.dq, want.dq, bound(want.dq, dq_))) << "dq " << where;
    EXPECT_TRUE(within(got.dk, want.dk, bound(want.dk, dk_))) << "dk " << where;
    EXPECT_TRUE(within(got.dv, want.dv, bound(want.dv, dv_))) << "dv " << where;
  }

 private:
  /// A tensor in double with what a rotation may spread of a row over its dims: codes are off by 2^-4.
  struct Rows {
    std::vector<double> values;
    std::vector<double> sizes;  ///< |value| + an eighth of the root mean square.
    std::vector<double> norms;  ///< By row.
    std::int64_t dims = 0;

    [[nodiscard]] const double* value(std::int64_t row) const { return values.data() + row * dims; }
    [[nodiscard]] const double* size(std::int64_t row) const { return sizes.data() + row * dims; }
    [[nodiscard]] double norm(std::int64_t row) const { return norms[static_cast<std::size_t>(row)]; }
  };

  static Rows by_row(const Tensor& tensor) {
    Rows rows;
    rows.dims = tensor.shape[2];
    for (std::int64_t row = 0; row < tensor.shape[0] * tensor.shape[1]; ++row) {
      double squares = 0;
      for (std::int64_t d = 0; d < rows.dims; ++d) {
        rows.values.push_back(static_cast<double>(tensor.at(row * rows.dims + d)));
        squares += rows.values.back() * rows.values.back();
      }
      rows.norms.push_back(std::sqrt(squares));
      const double share = rows.norms.back() / std::sqrt(static_cast<double>(rows.dims)) / 8;
      for (std::int64_t d = 0; d < rows.dims; ++d) rows.sizes.push_back(std::fabs(*(rows.value(row) + d)) + share);
    }
    return rows;
  }

  static double dot(const double* a, const double* b, std::int64_t dims) {
    double sum = 0;
    for (std::int64_t d = 0; d < dims; ++d) sum += a[d] * b[d];
    return sum;
  }

  void add_row(const Document& document, std::int64_t query, std::int64_t head) {
    const auto& [q, k, v, dout] = rows_;
    const KeyRange range = visible_keys(document, c_.problem.mask, query);
    if (range.empty()) return;
    const std::int64_t kv_heads = c_.k.shape[1];
    const std::int64_t row = (document.q_begin + query) * c_.q.shape[1] + head;
    const auto key_row = [&](std::size_t j) {
      return (document.k_begin + range.begin + static_cast<std::int64_t>(j)) * kv_heads +
             head / (c_.q.shape[1] / kv_heads);
    };
    std::vector<double> w(static_cast<std::size_t>(range.end - range.begin));
    std::vector<double> dp(w.size());
    for (std::size_t j = 0; j < w.size(); ++j) {
      w[j] = scale_ * dot(q.value(row), k.value(key_row(j)), q.dims);
      dp[j] = dot(dout.value(row), v.value(key_row(j)), v.dims);
    }
    const double largest = *std::ranges::max_element(w);
    double sum = 0;
    for (double& x : w) sum += x = std::exp(x - largest);
    double delta = 0;
    for (std::size_t j = 0; j < w.size(); ++j) delta += (w[j] /= sum) * dp[j];
    double of_delta = 0;  // Root of the sum of squares of D's own terms.
    for (std::size_t j = 0; j < w.size(); ++j) of_delta += std::pow(w[j] * (dp[j] - delta), 2);
    of_delta = std::sqrt(of_delta);

    const double dlse = c_.dlse ? static_cast<double>(c_.dlse->at(row)) : 0;
    std::vector<double> shared(static_cast<std::size_t>(q.dims));  // What a D that moved adds to dQ, as one term.
    for (std::size_t j = 0; j < w.size(); ++j) {
      const std::int64_t key = key_row(j);
      const double weight = w[j] + kFlushed;
      const double noise = kDpNoise * dout.norm(row) * v.norm(key);
      const double own = std::fabs(scale_) * weight * (std::fabs(dp[j] - delta + dlse) + noise);
      const double of_row = std::fabs(scale_) * weight * of_delta;
      for (std::int64_t d = 0; d < q.dims; ++d) {
        dq_.add(row, d, own * k.size(key)[d]);
        shared[static_cast<std::size_t>(d)] += of_row * k.size(key)[d];
        dk_.add(key, d, (own + of_row) * q.size(row)[d]);
      }
      for (std::int64_t d = 0; d < v.dims; ++d) dv_.add(key, d, weight * dout.size(row)[d]);
    }
    for (std::int64_t d = 0; d < q.dims; ++d) dq_.add(row, d, shared[static_cast<std::size_t>(d)]);
  }

  static std::function<double(std::int64_t)> bound(const Tensor& want, const Terms& terms) {
    // Both are rounded to the output's type.
    const double output = want.dtype == DType::bf16 ? 0x1p-7 : want.dtype == DType::f16 ? 0x1p-10 : 0x1p-22;
    const double least = want.dtype == DType::f16 ? 0x1p-24 : 0;
    return [&want, &terms, output, least](std::int64_t i) {
      return terms.root(i) / 4 + 0x1p-8 * terms.sum(i) + output * std::fabs(static_cast<double>(want.at(i))) + least;
    };
  }

  static constexpr double kFlushed = 0x1p-16;  ///< Weights that lose their mantissas: 2^-6 of a code of 256.
  static constexpr double kDpNoise = 0x1p-9;

  const Case& c_;
  double scale_;
  std::array<Rows, 4> rows_;
  Terms dq_, dk_, dv_;
};

/// Of a tensor as a whole: two terms in 64 moved by an eighth are 0.022 of it, and D's moves come to that.
inline constexpr double kGradientL2 = 3e-2;

/// Every element, and the tensors as wholes where there is enough in them.
inline void expect_gradients_like_reference(const Case& c, const Recipe& recipe, const std::string& where) {
  const std::string place = fmt::format("of {}, {}", recipe.name, where);
  const BackwardResult got = device_backward(c, recipe);
  const BackwardResult want = backward(c, recipe, on_engine("reference"));
  GradientBounds(c).expect(got, want, place);
  constexpr std::int64_t kEnough = 64;
  if (c.q.shape[0] < kEnough || c.k.shape[0] < kEnough) return;
  const auto wants = gradients_of(want);
  const auto gots = gradients_of(got);
  for (std::size_t i = 0; i < wants.size(); ++i) {
    EXPECT_LE(relative_l2(*gots[i].second, *wants[i].second), kGradientL2) << wants[i].first << " " << place;
  }
}

// ---- Calls on device memory ----

/// A forward that keeps what its backward reads, and that backward; gradients and workspace hold `fill` before it.
class BackwardDeviceCase {
 public:
  BackwardDeviceCase(const Case& c, const Offsets& offsets, std::uint8_t fill = 0xA5)
      : forward(c, offsets, fill),
        dout_(uploaded(c.dout.data)),
        dlse_(uploaded(c.dlse ? c.dlse->data : Bytes{})),
        result_{zeros_like(c.q), zeros_like(c.k), zeros_like(c.v), {}, {}},
        dq_(result_.dq.data.size(), fill),
        dk_(result_.dk.data.size(), fill),
        dv_(result_.dv.data.size(), fill),
        fill_(fill) {
    forward.call.training = true;
    forward.call.inputs.dout = on_device(c.dout, dout_);
    if (c.dlse) forward.call.inputs.dlse = on_device(*c.dlse, dlse_);
  }

  void reserve(const Recipe& recipe) {
    forward.reserve(recipe);
    call = {forward.call,
            forward.execution.workspace,
            forward.execution.workspace_bytes,
            {dq_.data(), dk_.data(), dv_.data()}};
    const Result<std::size_t> bytes = cuda::backward_workspace_bytes(call, recipe);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    workspace_.emplace_back(*bytes, fill_);
    execution = {workspace_.back().data(), *bytes, forward.execution.stream};
  }

  /// Both passes.
  [[nodiscard]] Status run(const Recipe& recipe) const {
    if (Status status = forward.run(recipe); !status.ok()) return status;
    return run_backward(recipe);
  }
  [[nodiscard]] Status run_backward(const Recipe& recipe) const { return cuda::backward(call, recipe, execution); }
  [[nodiscard]] Status check() const { return cuda::check(execution); }
  void on_stream(void* stream) {
    forward.execution.stream = stream;
    execution.stream = stream;
  }

  [[nodiscard]] BackwardResult read() const {
    BackwardResult result = result_;
    result.dq.data = dq_.read();
    result.dk.data = dk_.read();
    result.dv.data = dv_.read();
    return result;
  }
  void expect_intact(const std::string& where) const {
    forward.expect_intact(where);
    EXPECT_TRUE(dq_.intact()) << "dq " << where;
    EXPECT_TRUE(dk_.intact()) << "dk " << where;
    EXPECT_TRUE(dv_.intact()) << "dv " << where;
    for (const Guarded& workspace : workspace_) EXPECT_TRUE(workspace.intact()) << "workspace " << where;
  }
  [[nodiscard]] bool gradients_untouched() const { return dq_.untouched() && dk_.untouched() && dv_.untouched(); }
  void expect_inputs_kept(const Case& c) const {
    forward.expect_inputs_kept(c);
    Bytes now(c.dout.data.size());
    EXPECT_TRUE(cuda::download(now, dout_.get(), "a test").ok());
    EXPECT_TRUE(now == c.dout.data);
  }

 private:
  static Tensor zeros_like(const Tensor& tensor) { return Tensor::zeros(tensor.dtype, tensor.shape); }

 public:
  DeviceCase forward;

 private:
  cuda::DeviceMemory dout_, dlse_;
  BackwardResult result_;
  Guarded dq_, dk_, dv_;
  std::vector<Guarded> workspace_;
  std::uint8_t fill_;

 public:
  cuda::BackwardCall call;
  cuda::Execution execution;
};

}  // namespace mxflash::test
