// C24: one graph, captured once, serves every packing of the same totals; and calls go to the stream that they are
// given.
#include <bit>

#include "cuda/runtime.hpp"
#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::BackwardDeviceCase;
using test::Case;
using test::DeviceCase;
using test::Offsets;

class CudaGraph : public test::OnDevice {
 protected:
  void SetUp() override {
    test::OnDevice::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (graph_ != nullptr) static_cast<void>(cudaGraphExecDestroy(graph_));
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }

  /// Of what `run` does; nothing of it runs.
  template <class Run>
  void capture(const Run& run) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = run();
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_EQ(cudaGraphInstantiate(&graph_, graph, 0), cudaSuccess);
    static_cast<void>(cudaGraphDestroy(graph));
  }

  static void overwrite(const std::int32_t* device, const std::vector<std::int32_t>& offsets) {
    ASSERT_EQ(cudaMemcpy(std::bit_cast<void*>(device), offsets.data(), offsets.size() * sizeof(std::int32_t),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

TEST_F(CudaGraph, C24_OneGraphServesEveryPackingOfTheSameTotals) {
  for (const Recipe& recipe : test::device_recipes()) {
    const std::vector<std::vector<std::int32_t>> lengths = {
        {200, 200, 200}, {600, 0, 0}, {1, 598, 1}, {0, 129, 471}, {33, 67, 500}};
    const Case first = test::random_case(test::pack_self(lengths[0]), {4, 2, 128, 128}, DType::bf16, 5);
    DeviceCase device(first, test::offsets_of(first.problem.packing));
    device.reserve(recipe);
    device.execution.stream = stream_;
    capture([&] { return device.run(recipe); });
    for (const std::vector<std::int32_t>& documents : lengths) {
      Case c = first;
      c.problem.packing = test::pack_self(documents);
      const Offsets offsets = test::offsets_of(c.problem.packing);
      overwrite(device.call.documents.cu_seqlens_q, offsets.q);
      overwrite(device.call.documents.cu_seqlens_k, offsets.k);
      ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
      ASSERT_TRUE(device.check().ok());
      test::expect_same_outputs(device.read(), test::device_forward(c, recipe),
                                fmt::format("of {} by one graph, the first document of {}", recipe.name, documents[0]));
      device.expect_intact("by a graph");
    }
    // Malformed offsets are found in a graph too, and leave nothing behind.
    overwrite(device.call.documents.cu_seqlens_q, {0, 300, 200, 600});
    ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
    EXPECT_TRUE(test::refused_with(device.check(), {"cu_seqlens_q"}));
    overwrite(device.call.documents.cu_seqlens_q, test::offsets_of(first.problem.packing).q);
    overwrite(device.call.documents.cu_seqlens_k, test::offsets_of(first.problem.packing).k);
    ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
    ASSERT_TRUE(device.check().ok());
    test::expect_same_outputs(device.read(), test::device_forward(first, recipe), "after malformed offsets");
    static_cast<void>(cudaGraphExecDestroy(graph_));
    graph_ = nullptr;
  }
}

/// Forward and backward in one graph.
TEST_F(CudaGraph, C24_OneGraphServesEveryPackingForwardAndBackward) {
  if (const Status status = test::asked_for_backward(); !status.ok()) GTEST_SKIP() << status.error().message;
  for (const Recipe& recipe : test::backward_recipes()) {
    const std::vector<std::vector<std::int32_t>> lengths = {
        {200, 200, 200}, {600, 0, 0}, {1, 598, 1}, {0, 129, 471}, {33, 67, 500}};
    const Case first =
        test::with_dlse(test::random_case(test::pack_self(lengths[0]), {4, 2, 128, 128}, DType::bf16, 5));
    BackwardDeviceCase device(first, test::offsets_of(first.problem.packing));
    device.reserve(recipe);
    device.on_stream(stream_);
    capture([&] { return device.run(recipe); });
    for (const std::vector<std::int32_t>& documents : lengths) {
      Case c = first;
      c.problem.packing = test::pack_self(documents);
      const Offsets offsets = test::offsets_of(c.problem.packing);
      overwrite(device.call.forward.documents.cu_seqlens_q, offsets.q);
      overwrite(device.call.forward.documents.cu_seqlens_k, offsets.k);
      ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
      ASSERT_TRUE(device.check().ok());
      test::expect_same_gradients(
          device.read(), test::device_backward(c, recipe),
          fmt::format("of {} by one graph, the first document of {}", recipe.name, documents[0]));
      device.expect_intact("by a graph");
    }
    overwrite(device.call.forward.documents.cu_seqlens_k, {0, 300, 200, 600});
    ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
    EXPECT_TRUE(test::refused_with(device.check(), {"cu_seqlens_k"}));
    overwrite(device.call.forward.documents.cu_seqlens_q, test::offsets_of(first.problem.packing).q);
    overwrite(device.call.forward.documents.cu_seqlens_k, test::offsets_of(first.problem.packing).k);
    ASSERT_EQ(cudaGraphLaunch(graph_, stream_), cudaSuccess);
    ASSERT_TRUE(device.check().ok());
    test::expect_same_gradients(device.read(), test::device_backward(first, recipe), "after malformed offsets");
    static_cast<void>(cudaGraphExecDestroy(graph_));
    graph_ = nullptr;
  }
}

}  // namespace
}  // namespace mxflash
