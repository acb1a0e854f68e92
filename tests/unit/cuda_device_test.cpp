// The interface on device pointers: it writes its outputs and workspace and nothing beside them, whatever they held
// before; malformed offsets are survived and reported; what the host can see is refused before anything is written.
#include <fmt/ranges.h>

#include <limits>

#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::DeviceCase;
using test::Offsets;

class CudaDevice : public test::OnDevice {};

Case device_case(DType dtype = DType::bf16, std::int64_t dims = 64) {
  return test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {33, 31}}), {4, 2, dims, dims}, dtype, 3);
}

/// Sets every offset's whole buffer and its guards to `fill`, runs, and looks at the guards.
ForwardResult run_guarded(const Case& c, const Recipe& recipe, std::uint8_t fill) {
  DeviceCase device(c, test::offsets_of(c.problem.packing), fill);
  device.reserve(recipe);
  const Status forward = device.run(recipe);
  EXPECT_TRUE(forward.ok()) << (forward.ok() ? "" : forward.error().message);
  const Status check = device.check();
  EXPECT_TRUE(check.ok()) << (check.ok() ? "" : check.error().message);
  device.expect_intact(fmt::format("of {} filled with {}", recipe.name, fill));
  device.expect_inputs_kept(c);
  return device.read();
}

TEST_F(CudaDevice, WritesItsOutputsWholeAndNothingBesideThem) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const auto& [dtype, dims] :
         {std::pair{DType::bf16, 64}, {DType::f16, 128}, {DType::f32, 40}, {DType::bf16, 256}}) {
      if (!test::runs_at(recipe, dims)) continue;
      for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(7, -8)}) {
        Case c = device_case(dtype, dims);
        c.problem.mask = mask;
        const ForwardResult want = test::device_forward(c, recipe);
        // All ones are NaN in outputs, and whatever flag or counter there is in a workspace.
        for (const std::uint8_t fill : {std::uint8_t{0xFF}, std::uint8_t{0x00}, std::uint8_t{0xA5}}) {
          test::expect_same_outputs(run_guarded(c, recipe, fill), want,
                                    fmt::format("of {} in buffers of {}", recipe.name, fill));
        }
      }
    }
  }
}

TEST_F(CudaDevice, AWorkspaceServesAgain) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case c = device_case();
    const ForwardResult want = test::device_forward(c, recipe);
    DeviceCase device(c, test::offsets_of(c.problem.packing));
    device.reserve(recipe);
    for (int run = 0; run < 3; ++run) {
      ASSERT_TRUE(device.run(recipe).ok());
      ASSERT_TRUE(device.check().ok());
      test::expect_same_outputs(device.read(), want, fmt::format("of {} run {}", recipe.name, run));
    }
  }
}

TEST_F(CudaDevice, TheWorkspaceDependsOnTotalsAlone) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case even = test::random_case(test::pack_self({100, 100, 100}), {2, 1, 64, 64}, DType::bf16, 5);
    const Case uneven = test::random_case(test::pack_self({0, 299, 1}), {2, 1, 64, 64}, DType::bf16, 5);
    const DeviceCase first(even, test::offsets_of(even.problem.packing));
    const DeviceCase second(uneven, test::offsets_of(uneven.problem.packing));
    const Result<std::size_t> bytes = cuda::workspace_bytes(first.call, recipe);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    EXPECT_EQ(*bytes, *cuda::workspace_bytes(second.call, recipe));
  }
}

TEST_F(CudaDevice, C12_MalformedOffsets) {
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const Case c = test::random_case(test::pack({{40, 50}, {60, 30}, {30, 60}}), {2, 1, 64, 64}, DType::bf16, 7);
  const Offsets good = test::offsets_of(c.problem.packing);
  const auto bad = [](std::int32_t end) {
    return std::vector<std::vector<std::int32_t>>{
        {1, 40, 100, end},        // does not start at 0
        {-1, 40, 100, end},       // negative
        {0, -40, 100, end},       // negative in the middle
        {0, 100, 40, end},        // decreases
        {0, end, 40, end},        // decreases from the end
        {0, 40, end + 1, end},    // beyond the end in the middle
        {0, 40, 100, end + 1},    // ends beyond the tokens
        {0, 40, 100, end - 1},    // ends before them
        {0, 40, 100, kMost},      // far beyond
        {0, kMost, kLeast, end},  // a difference that overflows
        {kLeast, 40, 100, end},   //
        {0, 0, 0, 0},             // covers nothing
        {kMost, kMost, kMost, kMost},
    };
  };
  for (const Recipe& recipe : test::device_recipes()) {
    for (const bool query : {true, false}) {
      for (const std::vector<std::int32_t>& offsets : bad(query ? good.q.back() : good.k.back())) {
        const std::string name = query ? "cu_seqlens_q" : "cu_seqlens_k";
        const std::string where = fmt::format("{} [{}]", name, fmt::join(offsets, ", "));
        DeviceCase device(c, query ? Offsets{offsets, good.k} : Offsets{good.q, offsets}, 0);
        device.reserve(recipe);
        const Status forward = device.run(recipe);
        ASSERT_TRUE(forward.ok()) << where << ": " << forward.error().message;
        EXPECT_TRUE(test::refused_with(device.check(), {name})) << where;
        device.expect_intact(where);
        const ForwardResult got = device.read();
        for (const Tensor* tensor : {&got.o, &got.lse}) {
          for (std::int64_t i = 0; i < tensor->elements(); ++i) {
            ASSERT_TRUE(std::isnan(tensor->at(i))) << where << " at " << test::place_of(*tensor, i);
          }
        }
      }
    }
  }
}

/// The error is that of the last call in the workspace, not of one before.
TEST_F(CudaDevice, C12_AWorkspaceRecovers) {
  for (const Recipe& recipe : test::device_recipes()) {
    const Case c = test::random_case(test::pack_self({40, 60}), {2, 1, 64, 64}, DType::bf16, 9);
    DeviceCase good(c, test::offsets_of(c.problem.packing));
    DeviceCase bad(c, {{0, 60, 40}, {0, 40, 100}});
    good.reserve(recipe);
    bad.execution = good.execution;
    const ForwardResult want = test::device_forward(c, recipe);
    for (int round = 0; round < 2; ++round) {
      ASSERT_TRUE(bad.run(recipe).ok());
      EXPECT_TRUE(test::refused_with(bad.check(), {"cu_seqlens_q"}));
      ASSERT_TRUE(good.run(recipe).ok());
      EXPECT_TRUE(good.check().ok());
      test::expect_same_outputs(good.read(), want, fmt::format("of {} after malformed offsets", recipe.name));
    }
  }
}

/// Refused by the host, by the argument's name, with the outputs as they were.
TEST_F(CudaDevice, RefusesWhatTheHostSees) {
  const Recipe recipe = test::recipe_named("mxfp8");
  const Case c = device_case();
  DeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  const cuda::ForwardCall call = device.call;
  const cuda::Execution execution = device.execution;
  const auto refused = [&](const std::vector<std::string>& words) {
    EXPECT_TRUE(test::refused_with(device.run(recipe), words));
    EXPECT_TRUE(device.outputs_untouched()) << words.front();
    device.call = call;
    device.execution = execution;
  };
  // And by workspace_bytes, before a workspace is asked for.
  const auto refused_call = [&](const std::vector<std::string>& words) {
    EXPECT_TRUE(test::refused_with(cuda::workspace_bytes(device.call, recipe), words));
    refused(words);
  };

  device.execution.workspace_bytes -= 1;
  refused({"workspace"});
  device.execution.workspace = static_cast<std::byte*>(execution.workspace) + 128;
  refused({"workspace", "256"});
  device.execution.workspace = nullptr;
  refused({"workspace"});
  device.call.outputs.o += 2;
  refused({"o", "16"});

  device.call.inputs.q.shape[2] = 12;
  device.call.inputs.k.shape[2] = 12;
  refused_call({"head_dim", "12"});
  device.call.inputs.q.shape[2] = 264;
  device.call.inputs.k.shape[2] = 264;
  refused_call({"head_dim", "264"});
  device.call.inputs.v.shape[2] = 4;
  refused_call({"value_dim", "4"});
  device.call.inputs.k.shape[2] = 72;
  refused_call({"k", "72"});
  device.call.inputs.q.shape[1] = 3;
  refused_call({"q", "3"});
  device.call.inputs.v.shape[0] -= 1;
  refused_call({"v"});
  device.call.inputs.k.dtype = DType::f16;
  refused_call({"k", "F16"});
  device.call.inputs.q.dtype = DType::i32;
  refused_call({"q", "I32"});
  device.call.documents.documents = -1;
  refused_call({"documents", "-1"});
  device.call.documents.scale = std::numeric_limits<float>::quiet_NaN();
  refused_call({"scale", "nan"});

  const Result<Recipe> other = find_recipe("fp8-tensor");
  ASSERT_TRUE(other.ok());
  ASSERT_FALSE(cuda::supports(*other).ok()) << "take another recipe here";
  EXPECT_TRUE(test::refused_with(cuda::workspace_bytes(device.call, *other), {"recipe"}));
  EXPECT_TRUE(test::refused_with(device.run(*other), {"recipe"}));
  EXPECT_TRUE(device.outputs_untouched());
  // Nothing of that has spoiled the next call.
  ASSERT_TRUE(device.run(recipe).ok());
  EXPECT_TRUE(device.check().ok());
}

}  // namespace
}  // namespace mxflash
