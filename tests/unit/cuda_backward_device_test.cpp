// The backward on device pointers: it writes its gradients and workspace and nothing beside them, whatever they held
// before; malformed offsets are survived and reported; what the host can see is refused before anything is written.
#include <fmt/ranges.h>

#include <limits>

#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::BackwardDeviceCase;
using test::Case;
using test::Offsets;

class CudaBackwardDevice : public test::BackwardOnDevice {};

Case device_case(DType dtype = DType::bf16, std::int64_t dims = 64) {
  return test::with_dlse(test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {4, 0}, {33, 31}}),
                                           {4, 2, dims, dims}, dtype, 3));
}

BackwardResult run_guarded(const Case& c, const Recipe& recipe, std::uint8_t fill) {
  BackwardDeviceCase device(c, test::offsets_of(c.problem.packing), fill);
  device.reserve(recipe);
  const Status run = device.run(recipe);
  EXPECT_TRUE(run.ok()) << (run.ok() ? "" : run.error().message);
  const Status check = device.check();
  EXPECT_TRUE(check.ok()) << (check.ok() ? "" : check.error().message);
  device.expect_intact(fmt::format("of {} filled with {}", recipe.name, fill));
  device.expect_inputs_kept(c);
  return device.read();
}

TEST_F(CudaBackwardDevice, WritesItsGradientsWholeAndNothingBesideThem) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const auto& [dtype, dims] :
         {std::pair{DType::bf16, 64}, {DType::f16, 128}, {DType::f32, 40}, {DType::bf16, 256}}) {
      for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(7, -8)}) {
        Case c = device_case(dtype, dims);
        c.problem.mask = mask;
        const BackwardResult want = test::device_backward(c, recipe);
        // All ones are NaN in gradients, and whatever flag or counter there is in a workspace.
        for (const std::uint8_t fill : {std::uint8_t{0xFF}, std::uint8_t{0x00}, std::uint8_t{0xA5}}) {
          test::expect_same_gradients(run_guarded(c, recipe, fill), want,
                                      fmt::format("of {} in buffers of {}", recipe.name, fill));
        }
      }
    }
  }
}

/// A forward that keeps something for its backward has the outputs of one that does not.
TEST_F(CudaBackwardDevice, TrainingDoesNotMoveTheForward) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const auto& [dtype, dims] : {std::pair{DType::bf16, 64}, {DType::f16, 128}, {DType::f32, 256}}) {
      const Case c = device_case(dtype, dims);
      const ForwardResult want = test::device_forward(c, recipe);
      BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
      device.reserve(recipe);
      ASSERT_TRUE(device.run(recipe).ok());
      ASSERT_TRUE(device.forward.check().ok());
      test::expect_same_outputs(device.forward.read(), want, fmt::format("of {} dims {}", recipe.name, dims));
    }
  }
}

/// Workspaces of both passes serve again, and what the forward has saved serves two backwards.
TEST_F(CudaBackwardDevice, AWorkspaceServesAgain) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case c = device_case();
    const BackwardResult want = test::device_backward(c, recipe);
    BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
    device.reserve(recipe);
    for (int run = 0; run < 3; ++run) {
      ASSERT_TRUE((run == 1 ? device.run_backward(recipe) : device.run(recipe)).ok());
      ASSERT_TRUE(device.check().ok());
      test::expect_same_gradients(device.read(), want, fmt::format("of {} run {}", recipe.name, run));
    }
  }
}

/// The bits of contiguous tensors, from device memory as it lies there.
TEST_F(CudaBackwardDevice, C13_StridesOfDoAndDlse) {
  constexpr std::int64_t kGap = 3;  // Elements: rows that no 16-byte load takes.
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Case c = device_case(dtype);
      const BackwardResult want = test::device_backward(c, recipe);
      BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
      const auto spread = [&](const Tensor& tensor, TensorView& view) {
        const std::int64_t heads = tensor.shape[1];
        const std::int64_t dims = tensor.shape[2];
        Tensor wide = test::constant_tensor(tensor.dtype, {heads, tensor.shape[0], dims + kGap}, NAN);
        for (std::int64_t i = 0; i < tensor.elements(); ++i) {
          const std::int64_t row = i / dims;
          wide.set((row % heads * tensor.shape[0] + row / heads) * (dims + kGap) + i % dims, tensor.at(i));
        }
        Result<cuda::DeviceMemory> memory = cuda::upload(wide.data, "a test");
        EXPECT_TRUE(memory.ok());
        view.data = memory->get();
        view.stride = {dims + kGap, tensor.shape[0] * (dims + kGap), 1};
        return *std::move(memory);
      };
      Inputs& inputs = device.forward.call.inputs;
      const cuda::DeviceMemory dout = spread(c.dout, *inputs.dout);
      const cuda::DeviceMemory dlse = spread(*c.dlse, *inputs.dlse);
      device.reserve(recipe);
      ASSERT_TRUE(device.run(recipe).ok());
      ASSERT_TRUE(device.check().ok());
      test::expect_same_gradients(device.read(), want, recipe.name);
    }
  }
}

TEST_F(CudaBackwardDevice, TheWorkspaceDependsOnTotalsAlone) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case even = test::random_case(test::pack_self({100, 100, 100}), {2, 1, 64, 64}, DType::bf16, 5);
    const Case uneven = test::random_case(test::pack_self({0, 299, 1}), {2, 1, 64, 64}, DType::bf16, 5);
    BackwardDeviceCase first(even, test::offsets_of(even.problem.packing));
    BackwardDeviceCase second(uneven, test::offsets_of(uneven.problem.packing));
    first.reserve(recipe);
    second.reserve(recipe);
    EXPECT_EQ(first.execution.workspace_bytes, second.execution.workspace_bytes);
    EXPECT_EQ(first.forward.execution.workspace_bytes, second.forward.execution.workspace_bytes);
  }
}

TEST_F(CudaBackwardDevice, C12_MalformedOffsets) {
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const Case c = test::random_case(test::pack({{40, 50}, {60, 30}, {30, 60}}), {2, 1, 64, 64}, DType::bf16, 7);
  const Offsets good = test::offsets_of(c.problem.packing);
  const auto bad = [](std::int32_t end) {
    return std::vector<std::vector<std::int32_t>>{
        {1, 40, 100, end},        // does not start at 0
        {0, -40, 100, end},       // negative in the middle
        {0, 100, 40, end},        // decreases
        {0, 40, end + 1, end},    // beyond the end in the middle
        {0, 40, 100, end + 1},    // ends beyond the tokens
        {0, 40, 100, end - 1},    // ends before them
        {0, kMost, kLeast, end},  // a difference that overflows
        {0, 0, 0, 0},             // covers nothing
        {kMost, kMost, kMost, kMost},
    };
  };
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const bool query : {true, false}) {
      for (const std::vector<std::int32_t>& offsets : bad(query ? good.q.back() : good.k.back())) {
        const std::string name = query ? "cu_seqlens_q" : "cu_seqlens_k";
        const std::string where = fmt::format("{} [{}]", name, fmt::join(offsets, ", "));
        BackwardDeviceCase device(c, query ? Offsets{offsets, good.k} : Offsets{good.q, offsets}, 0);
        device.reserve(recipe);
        ASSERT_TRUE(device.run(recipe).ok()) << where;
        EXPECT_TRUE(test::refused_with(device.check(), {name})) << where;
        device.expect_intact(where);
        const BackwardResult got = device.read();
        for (const auto& [gradient, tensor] : test::gradients_of(got)) {
          for (std::int64_t i = 0; i < tensor->elements(); ++i) {
            ASSERT_TRUE(std::isnan(tensor->at(i))) << gradient << " " << where << " " << test::place_of(*tensor, i);
          }
        }
      }
    }
  }
}

/// Refused by the host, by the argument's name, with the gradients as they were.
TEST_F(CudaBackwardDevice, RefusesWhatTheHostSees) {
  const Recipe recipe = test::recipe_named("mxfp8");
  const Case c = device_case();
  BackwardDeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  ASSERT_TRUE(device.forward.run(recipe).ok());
  const cuda::BackwardCall call = device.call;
  const cuda::Execution execution = device.execution;
  const auto refused = [&](const std::vector<std::string>& words, const Recipe& by) {
    EXPECT_TRUE(test::refused_with(device.run_backward(by), words));
    EXPECT_TRUE(device.gradients_untouched()) << words.front();
    device.call = call;
    device.execution = execution;
  };
  // And by backward_workspace_bytes, before a workspace is asked for.
  const auto refused_call = [&](const std::vector<std::string>& words) {
    EXPECT_TRUE(test::refused_with(cuda::backward_workspace_bytes(device.call, recipe), words));
    refused(words, recipe);
  };

  device.execution.workspace_bytes -= 1;
  refused({"workspace"}, recipe);
  device.execution.workspace = static_cast<std::byte*>(execution.workspace) + 128;
  refused({"workspace", "256"}, recipe);
  device.execution.workspace = nullptr;
  refused({"workspace"}, recipe);

  device.call.saved = nullptr;
  refused_call({"saved", "256"});
  device.call.saved = static_cast<const std::byte*>(call.saved) + 16;
  refused_call({"saved", "256"});
  device.call.saved_bytes -= 1;
  refused({"saved_bytes"}, recipe);
  device.execution.workspace = device.forward.execution.workspace;
  refused({"workspace"}, recipe);
  device.call.gradients.dq += 2;
  refused_call({"dq", "16"});
  device.call.gradients.dk = nullptr;
  refused_call({"dk", "16"});
  device.call.gradients.dv += 8;
  refused_call({"dv", "16"});
  device.call.forward.training = false;
  refused_call({"training", "false"});
  device.call.forward.outputs.o = nullptr;
  refused_call({"o: ", "16"});

  Inputs& inputs = device.call.forward.inputs;
  inputs.dout.reset();
  refused_call({"do: none"});
  inputs.dout->data = nullptr;
  refused_call({"do: "});
  inputs.dout->shape[0] -= 1;
  refused_call({"do: shape"});
  inputs.dout->dtype = DType::f16;
  refused_call({"do: type", "F16"});
  inputs.dlse->shape[1] += 1;
  refused_call({"dlse: shape"});
  inputs.dlse->dtype = DType::bf16;
  refused_call({"dlse: type", "BF16"});
  inputs.dlse->data += 2;
  refused_call({"dlse: ", "4"});
  inputs.q.shape[2] = 12;
  inputs.k.shape[2] = 12;
  refused_call({"head_dim", "12"});
  device.call.forward.documents.documents = -1;
  refused_call({"documents", "-1"});
  device.call.forward.documents.cu_seqlens_k = nullptr;
  refused_call({"cu_seqlens_k"});

  for (const std::string_view name : {"bf16", "fp4", "mxattention"}) {
    const Recipe other = test::recipe_named(name);
    if (cuda::supports_backward(other).ok()) continue;
    EXPECT_TRUE(test::refused_with(cuda::backward_workspace_bytes(device.call, other), {std::string(name)}));
    refused({std::string(name)}, other);
    // A forward that is to be followed by it neither.
    EXPECT_TRUE(test::refused_with(cuda::workspace_bytes(device.call.forward, other), {std::string(name)}));
  }
  // q, k and v are not read.
  for (TensorView* view : {&inputs.q, &inputs.k, &inputs.v}) view->data = nullptr;
  ASSERT_TRUE(device.run_backward(recipe).ok());
  EXPECT_TRUE(device.check().ok());
  test::expect_same_gradients(device.read(), test::device_backward(c, recipe), "after refusals");
}

}  // namespace
}  // namespace mxflash
