// What the tests of the CUDA engine share: a fixture that skips where there is no device, the comparison with the
// reference, and calls on device memory that is guarded on both sides.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/memory.hpp"
#include "mxflash/cuda.hpp"
#include "unit/attention_support.hpp"

namespace mxflash::test {

/// Says why where there is no device.
class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = cuda::available(); !status.ok()) GTEST_SKIP() << status.error().message;
  }
};

struct Dims {
  std::int64_t head = 0;
  std::int64_t value = 0;
};

inline std::string name_of_sizes(const Sizes& sizes) {
  return fmt::format("heads {}/{} dims {}/{}", sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim);
}

/// What the engine claims to run, the default among it. MXFLASH_TEST_RECIPE: that one alone, where time is short.
inline std::vector<Recipe> device_recipes() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : recipes()) {
    if (cuda::supports(recipe).ok()) all.push_back(recipe);
  }
  EXPECT_TRUE(std::ranges::any_of(all, [](const Recipe& recipe) { return recipe.name == "mxfp8"; }));
  const char* one = std::getenv("MXFLASH_TEST_RECIPE");
  if (one == nullptr) return all;
  std::erase_if(all, [&](const Recipe& recipe) { return recipe.name != one; });
  EXPECT_EQ(all.size(), 1U) << "MXFLASH_TEST_RECIPE: " << one << " does not run on the device";
  return all;
}

/// How many of the rows before `token` no later token may move.
inline std::int64_t rows_kept(const Recipe& recipe, std::int64_t token) {
  switch (recipe.claims.forward) {
    case Causality::exact: return token;
    case Causality::block: return token / kBlock * kBlock;
    case Causality::leaks: return 0;
  }
  return 0;
}

/// Whether products in FP8 run it, whose sums are coarser than FP32.
inline bool multiplies_fp8(const Recipe& recipe) {
  const auto e4m3 = [](const Operand& operand) { return operand.encoding == Encoding::e4m3 && operand.folds(); };
  return e4m3(recipe.s.left) && e4m3(recipe.s.right) && e4m3(recipe.o.tokens) && !recipe.o.cut;
}

/// A Hadamard transform needs a power of two.
inline bool runs_at(const Recipe& recipe, std::int64_t head_dim) {
  return recipe.hadamard != Hadamard::required || std::has_single_bit(static_cast<std::uint64_t>(head_dim));
}

inline Options on_engine(std::string_view name) {
  Options options;
  options.engine = name;
  return options;
}

inline ForwardResult device_forward(const Case& c, const Recipe& recipe) {
  return forward(c, recipe, on_engine("cuda"));
}

/// The largest finite |V| among the keys that a row sees, for rows in the order of lse.
inline std::vector<double> largest_visible_v(const Case& c) {
  const std::int64_t heads = c.q.shape[1];
  const std::int64_t kv_heads = c.v.shape[1];
  const std::int64_t dims = c.v.shape[2];
  std::vector<double> by_key;
  for (std::int64_t row = 0; row < c.v.shape[0] * kv_heads; ++row) {
    double value = 0;
    for (std::int64_t i = row * dims; i < (row + 1) * dims; ++i) {
      if (std::isfinite(c.v.at(i))) value = std::max(value, std::fabs(static_cast<double>(c.v.at(i))));
    }
    by_key.push_back(value);
  }
  std::vector<double> by_row(static_cast<std::size_t>(c.q.shape[0] * heads));
  for (const Document& document : c.problem.packing.documents()) {
    for (std::int64_t query = 0; query < document.q_length; ++query) {
      const KeyRange range = visible_keys(document, c.problem.mask, query);
      for (std::int64_t head = 0; head < heads; ++head) {
        double& value = by_row[static_cast<std::size_t>((document.q_begin + query) * heads + head)];
        for (std::int64_t key = range.begin; key < range.end; ++key) {
          const std::int64_t row = (document.k_begin + key) * kv_heads + head / (heads / kv_heads);
          value = std::max(value, by_key[static_cast<std::size_t>(row)]);
        }
      }
    }
  }
  return by_row;
}

/// How far outputs may be from the reference's.
struct Tolerance {
  double step = 0;    ///< Of a row of O, relative to the largest |V| that it sees.
  double l2 = 0;      ///< Of O, relative, over a tensor.
  double lse = 0;     ///< Of a row.
  bool rows = false;  ///< Whether hardly a row moves.
};

/// A product of FP8 on Hopper adds 32 products to its accumulator with about 13 fraction bits of the largest of them.
/// That moves a weight by up to e = 2^-10 of itself: one in 64 crosses a tie of E4M3's 3 mantissa bits (numerics.md,
/// section 6). A crossed tie moves its row by a step of its weight, 2^-4 of the largest |V| that the row sees, if all
/// of the row is that weight and another. Over a tensor most rows have many weights that move independently, each by
/// its share: below 1e-2 in relative L2. LSE moves by the logarithm of a step, which is an eighth of a weight at the
/// bottom of a binade, if the row is that weight alone: ln(9/8) and the weight's own e.
///
/// Products of BF16 numbers add up in FP32: what cpu_test.cpp says of the CPU engine. Of a row that is one weight, LSE
/// moves by ln(1 + 2^-m) at the bottom of a binade of m mantissa bits, ln 2 where the floor rule saturates.
inline Tolerance tolerance_of(const Recipe& recipe) {
  if (multiplies_fp8(recipe)) return {0x1p-4, 1e-2, 0.12, false};
  if (recipe.o.weights.rule == ScaleRule::floor) return {0.25, 5e-2, 0.7, false};
  const double step = std::max(step_of(recipe.o.weights), recipe.o.cut ? step_of(recipe.o.cut->weights) : 0.0);
  return {std::max(step, 0x1p-7), 4e-3, std::log1p(2 * step) + 0x1p-12, true};
}

/// Over all rows little remains of what one may move by.
inline void expect_lse_like(const Tensor& got, const Tensor& want, const Recipe& recipe, const std::string& where) {
  EXPECT_TRUE(within(got, want, tolerance_of(recipe).lse)) << "lse " << where;
  double sum = 0;
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    const double difference = std::fabs(static_cast<double>(got.at(i)) - static_cast<double>(want.at(i)));
    if (std::isfinite(difference)) sum += difference;
  }
  EXPECT_LE(sum / static_cast<double>(std::max<std::int64_t>(want.elements(), 1)), 1e-2) << "lse " << where;
}

inline void expect_outputs_like(const ForwardResult& got, const ForwardResult& want, const Case& c,
                                const Recipe& recipe, const std::string& where) {
  const std::vector<double> size = largest_visible_v(c);
  const Tolerance tolerance = tolerance_of(recipe);
  const std::int64_t dims = c.v.shape[2];
  const auto bound = [&](std::int64_t i) { return tolerance.step * size[static_cast<std::size_t>(i / dims)]; };
  EXPECT_EQ(got.o.dtype, want.o.dtype) << where;
  EXPECT_TRUE(within(got.o, want.o, bound)) << "o " << where;
  EXPECT_LE(relative_l2(got.o, want.o), tolerance.l2) << "o " << where;
  if (tolerance.rows) {
    // Three times the expected number, and three where hardly any is expected.
    const std::int64_t rows = want.o.elements() / std::max<std::int64_t>(dims, 1);
    EXPECT_LE(rows_moved(got.o, want.o, largest(c.v)), 3 + rows * 3 / 200) << "o " << where;
  }
  expect_lse_like(got.lse, want.lse, recipe, where);
}

inline void expect_like_reference(const Case& c, const Recipe& recipe, const std::string& where) {
  expect_outputs_like(device_forward(c, recipe), forward(c, recipe, on_engine("reference")), c, recipe,
                      fmt::format("of {}, {}", recipe.name, where));
}

inline void expect_same_outputs(const ForwardResult& got, const ForwardResult& want, const std::string& where) {
  EXPECT_TRUE(same_bits(got.o, want.o)) << "o " << where;
  EXPECT_TRUE(same_bits(got.lse, want.lse)) << "lse " << where;
}

/// Rows [begin, end) of both outputs.
inline ForwardResult rows_of(const ForwardResult& whole, std::int64_t begin, std::int64_t end) {
  ForwardResult part;
  part.o = rows_of(whole.o, begin, end);
  part.lse = rows_of(whole.lse, begin, end);
  return part;
}

// ---- Calls on device memory ----

inline constexpr std::size_t kGuard = 4096;
inline constexpr std::size_t kAlignment = 256;

/// Device memory of one byte's value throughout, `bytes` of it in use from a 256-byte boundary on.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::uint8_t fill) : bytes_(bytes), fill_(std::byte{fill}) {
    const std::vector<std::byte> all(bytes + 2 * kGuard + kAlignment, fill_);
    Result<cuda::DeviceMemory> memory = cuda::upload(all, "a test");
    EXPECT_TRUE(memory.ok()) << (memory.ok() ? "" : memory.error().message);
    if (!memory.ok()) return;
    memory_ = *std::move(memory);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    front_ = kGuard + (kAlignment - (address + kGuard) % kAlignment) % kAlignment;
    total_ = all.size();
  }

  [[nodiscard]] std::byte* data() const { return memory_.get() + front_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// The bytes in use.
  [[nodiscard]] Bytes read() const {
    const Bytes all = read_all();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(front_);
    return {begin, begin + static_cast<std::ptrdiff_t>(bytes_)};
  }
  /// Whether the bytes before and after those in use are what they were.
  [[nodiscard]] testing::AssertionResult intact() const {
    const Bytes all = read_all();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((i >= front_ && i < front_ + bytes_) || all[i] == fill_) continue;
      return testing::AssertionFailure() << "byte " << static_cast<std::int64_t>(i) - static_cast<std::int64_t>(front_)
                                         << " of " << bytes_ << " was written";
    }
    return testing::AssertionSuccess();
  }
  /// Whether nothing was written at all.
  [[nodiscard]] bool untouched() const {
    return std::ranges::all_of(read_all(), [this](std::byte byte) { return byte == fill_; });
  }

 private:
  [[nodiscard]] Bytes read_all() const {
    Bytes all(total_);
    const Status status = cuda::download(all, memory_.get(), "a test");
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
    return all;
  }

  std::size_t bytes_;
  std::byte fill_;
  std::size_t front_ = 0;
  std::size_t total_ = 0;
  cuda::DeviceMemory memory_;
};

/// What a DeviceCase reads: the case's tensors, and offsets that need not be well formed.
struct Offsets {
  std::vector<std::int32_t> q;
  std::vector<std::int32_t> k;
};

inline Offsets offsets_of(const Packing& packing) {
  Offsets offsets;
  for (const Document& document : packing.documents()) {
    offsets.q.push_back(static_cast<std::int32_t>(document.q_begin));
    offsets.k.push_back(static_cast<std::int32_t>(document.k_begin));
  }
  offsets.q.push_back(static_cast<std::int32_t>(packing.tokens_q()));
  offsets.k.push_back(static_cast<std::int32_t>(packing.tokens_k()));
  return offsets;
}

inline cuda::DeviceMemory uploaded(std::span<const std::byte> bytes) {
  Result<cuda::DeviceMemory> memory = cuda::upload(bytes, "a test");
  EXPECT_TRUE(memory.ok()) << (memory.ok() ? "" : memory.error().message);
  return memory.ok() ? *std::move(memory) : cuda::DeviceMemory{};
}
inline TensorView on_device(const Tensor& tensor, const cuda::DeviceMemory& memory) {
  TensorView of = view(tensor);
  of.data = memory.get();
  return of;
}

/// One call through the interface on device pointers, every buffer of which is guarded; outputs and workspace hold
/// `fill` before it.
class DeviceCase {
 public:
  DeviceCase(const Case& c, const Offsets& offsets, std::uint8_t fill = 0xA5)
      : q_(uploaded(c.q.data)),
        k_(uploaded(c.k.data)),
        v_(uploaded(c.v.data)),
        offsets_q_(uploaded(std::as_bytes(std::span(offsets.q)))),
        offsets_k_(uploaded(std::as_bytes(std::span(offsets.k)))),
        result_{Tensor::zeros(c.q.dtype, {c.q.shape[0], c.q.shape[1], c.v.shape[2]}),
                Tensor::zeros(DType::f32, {c.q.shape[0], c.q.shape[1]}),
                {},
                {}},
        o_(result_.o.data.size(), fill),
        lse_(result_.lse.data.size(), fill),
        fill_(fill),
        call{{reinterpret_cast<const std::int32_t*>(offsets_q_.get()),
              reinterpret_cast<const std::int32_t*>(offsets_k_.get()), static_cast<std::int64_t>(offsets.q.size()) - 1,
              c.problem.mask, c.problem.scale},
             {on_device(c.q, q_), on_device(c.k, k_), on_device(c.v, v_), std::nullopt},
             {o_.data(), reinterpret_cast<float*>(lse_.data())}} {}

  /// The workspace that `call` asks for; precondition of the others.
  void reserve(const Recipe& recipe) {
    const Result<std::size_t> bytes = cuda::workspace_bytes(call, recipe);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    workspace_.emplace_back(*bytes, fill_);
    execution = {workspace_.back().data(), *bytes, nullptr};
  }

  [[nodiscard]] Status run(const Recipe& recipe) const { return cuda::forward(call, recipe, execution); }
  [[nodiscard]] Status check() const { return cuda::check(execution); }

  /// What the outputs hold.
  [[nodiscard]] ForwardResult read() const {
    ForwardResult result = result_;
    result.o.data = o_.read();
    result.lse.data = lse_.read();
    return result;
  }
  void expect_intact(const std::string& where) const {
    EXPECT_TRUE(o_.intact()) << "o " << where;
    EXPECT_TRUE(lse_.intact()) << "lse " << where;
    for (const Guarded& workspace : workspace_) EXPECT_TRUE(workspace.intact()) << "workspace " << where;
  }
  [[nodiscard]] bool outputs_untouched() const { return o_.untouched() && lse_.untouched(); }
  /// Whether device memory still holds the case's tensors.
  void expect_inputs_kept(const Case& c) const {
    for (const auto& [memory, tensor] : {std::pair{&q_, &c.q}, {&k_, &c.k}, {&v_, &c.v}}) {
      Bytes now(tensor->data.size());
      EXPECT_TRUE(cuda::download(now, memory->get(), "a test").ok());
      EXPECT_TRUE(now == tensor->data);
    }
  }

 private:
  cuda::DeviceMemory q_, k_, v_, offsets_q_, offsets_k_;
  ForwardResult result_;
  Guarded o_, lse_;
  std::vector<Guarded> workspace_;
  std::uint8_t fill_;

 public:
  // Last, because they point into what is above.
  cuda::ForwardCall call;
  cuda::Execution execution;
};

}  // namespace mxflash::test
