// C26: memory of the host and of another device is refused, by the argument's name; a call runs on the current device,
// whichever that is, and on two at once. Built with CUDA alone: it asks the runtime for such memory.
#include <array>
#include <memory>
#include <thread>

#include "cuda/runtime.hpp"
#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::BackwardDeviceCase;
using test::Case;
using test::DeviceCase;

Case small_case() {
  return test::with_dlse(
      test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {33, 31}}), {4, 2, 64, 64}, DType::bf16, 3));
}

const std::int32_t* offsets_at(std::byte* memory) { return reinterpret_cast<const std::int32_t*>(memory); }

/// An argument of a call, and how it comes to point elsewhere.
template <class Device>
struct Argument {
  std::string name;
  void (*point)(Device& device, std::byte* to);
};

const Argument<DeviceCase> kForwardArguments[] = {
    {"cu_seqlens_q", [](DeviceCase& d, std::byte* to) { d.call.documents.cu_seqlens_q = offsets_at(to); }},
    {"cu_seqlens_k", [](DeviceCase& d, std::byte* to) { d.call.documents.cu_seqlens_k = offsets_at(to); }},
    {"q", [](DeviceCase& d, std::byte* to) { d.call.inputs.q.data = to; }},
    {"k", [](DeviceCase& d, std::byte* to) { d.call.inputs.k.data = to; }},
    {"v", [](DeviceCase& d, std::byte* to) { d.call.inputs.v.data = to; }},
    {"o", [](DeviceCase& d, std::byte* to) { d.call.outputs.o = to; }},
    {"lse", [](DeviceCase& d, std::byte* to) { d.call.outputs.lse = reinterpret_cast<float*>(to); }},
    {"workspace", [](DeviceCase& d, std::byte* to) { d.execution.workspace = to; }},
};

const Argument<BackwardDeviceCase> kBackwardArguments[] = {
    {"cu_seqlens_q",
     [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.documents.cu_seqlens_q = offsets_at(to); }},
    {"cu_seqlens_k",
     [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.documents.cu_seqlens_k = offsets_at(to); }},
    {"do", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.inputs.dout->data = to; }},
    {"dlse", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.inputs.dlse->data = to; }},
    {"o", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.outputs.o = to; }},
    {"saved", [](BackwardDeviceCase& d, std::byte* to) { d.call.saved = to; }},
    {"dq", [](BackwardDeviceCase& d, std::byte* to) { d.call.gradients.dq = to; }},
    {"dk", [](BackwardDeviceCase& d, std::byte* to) { d.call.gradients.dk = to; }},
    {"dv", [](BackwardDeviceCase& d, std::byte* to) { d.call.gradients.dv = to; }},
    {"workspace", [](BackwardDeviceCase& d, std::byte* to) { d.execution.workspace = to; }},
};
/// What a recipe reads that is embedded in BF16; of others these may point anywhere.
const Argument<BackwardDeviceCase> kReadInputs[] = {
    {"q", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.inputs.q.data = to; }},
    {"k", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.inputs.k.data = to; }},
    {"v", [](BackwardDeviceCase& d, std::byte* to) { d.call.forward.inputs.v.data = to; }},
};

class CudaResidence : public test::OnDevice {
 protected:
  /// Every argument in turn is refused in `words`, by its name and before anything is written; then the call runs.
  static void expect_refused(std::byte* elsewhere, const std::string& words) {
    const Case c = small_case();
    const test::Offsets offsets = test::offsets_of(c.problem.packing);
    for (const Recipe& recipe : {test::recipe_named("mxfp8"), test::recipe_named("bf16")}) {
      BackwardDeviceCase device(c, offsets);
      device.reserve(recipe);
      const DeviceCase& forward = device.forward;
      for (const auto& [name, point] : kForwardArguments) {
        const cuda::ForwardCall call = forward.call;
        const cuda::Execution execution = forward.execution;
        point(device.forward, elsewhere);
        EXPECT_TRUE(test::refused_with(forward.run(recipe), {name + ": ", words})) << recipe.name;
        EXPECT_TRUE(forward.outputs_untouched()) << name;
        device.forward.call = call;
        device.forward.execution = execution;
      }
      ASSERT_TRUE(forward.run(recipe).ok());
      std::vector<Argument<BackwardDeviceCase>> arguments(std::begin(kBackwardArguments), std::end(kBackwardArguments));
      if (cuda::backward_reads_inputs(recipe)) {
        arguments.insert(arguments.end(), std::begin(kReadInputs), std::end(kReadInputs));
      }
      for (const auto& [name, point] : arguments) {
        const cuda::BackwardCall call = device.call;
        const cuda::Execution execution = device.execution;
        point(device, elsewhere);
        EXPECT_TRUE(test::refused_with(device.run_backward(recipe), {name + ": ", words})) << recipe.name;
        EXPECT_TRUE(device.gradients_untouched()) << name;
        device.call = call;
        device.execution = execution;
      }
      ASSERT_TRUE(device.run_backward(recipe).ok());
      ASSERT_TRUE(device.check().ok());
      test::expect_same_gradients(device.read(), test::device_backward(c, recipe), "after refusals of " + recipe.name);
    }
  }
};

/// Whatever a case's buffers hold.
constexpr std::size_t kRoom = std::size_t{16} << 20U;

TEST_F(CudaResidence, HostMemoryIsRefused) {
  const std::unique_ptr<std::byte[], void (*)(std::byte*)> pageable(
      static_cast<std::byte*>(::operator new[](kRoom, std::align_val_t{256})),
      [](std::byte* memory) { ::operator delete[](memory, std::align_val_t{256}); });
  expect_refused(pageable.get(), "host memory given, device memory allowed");
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, kRoom), cudaSuccess);
  expect_refused(static_cast<std::byte*>(pinned), "host memory given, device memory allowed");
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

/// Which moves to the device that reads it, and memory of a pool.
TEST_F(CudaResidence, ManagedAndPooledMemoryIsTaken) {
  const Case c = small_case();
  const Recipe recipe = test::recipe_named("mxfp8");
  DeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  void* managed = nullptr;
  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocManaged(&managed, c.q.data.size()), cudaSuccess);
  ASSERT_EQ(cudaMallocAsync(&pooled, c.k.data.size(), nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(managed, c.q.data.data(), c.q.data.size(), cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(pooled, c.k.data.data(), c.k.data.size(), cudaMemcpyHostToDevice), cudaSuccess);
  device.call.inputs.q.data = static_cast<std::byte*>(managed);
  device.call.inputs.k.data = static_cast<std::byte*>(pooled);
  const Status status = device.run(recipe);
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  EXPECT_TRUE(device.check().ok());
  test::expect_same_outputs(device.read(), test::device_forward(c, recipe), "of managed and pooled memory");
  EXPECT_EQ(cudaFree(managed), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(pooled, nullptr), cudaSuccess);
}

/// A workspace that the graph itself allocates has an address while the stream captures, of which the runtime knows
/// nothing yet; pinned memory it knows then too.
TEST_F(CudaResidence, MemoryOfTheGraphItselfIsTaken) {
  const Case c = small_case();
  const Recipe recipe = test::recipe_named("mxfp8");
  DeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, kRoom), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  device.execution.stream = stream;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  device.execution.workspace = pinned;
  EXPECT_TRUE(test::refused_with(device.run(recipe), {"workspace: host memory given"}));
  EXPECT_EQ(cudaMallocAsync(&device.execution.workspace, device.execution.workspace_bytes, stream), cudaSuccess);
  const Status status = device.run(recipe);
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  EXPECT_EQ(cudaFreeAsync(device.execution.workspace, stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  test::expect_same_outputs(device.read(), test::device_forward(c, recipe), "in memory of the graph");
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

// ---- Two devices ----

class CudaTwoDevices : public CudaResidence {
 protected:
  void SetUp() override {
    CudaResidence::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < 2) GTEST_SKIP() << "one CUDA device, the test needs two";
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  void TearDown() override { static_cast<void>(cudaSetDevice(0)); }

  static void expect_current(int device) {
    int now = -1;
    EXPECT_EQ(cudaGetDevice(&now), cudaSuccess);
    EXPECT_EQ(now, device);
  }
};

TEST_F(CudaTwoDevices, C26_MemoryOfAnotherDeviceIsRefused) {
  for (const int current : {0, 1}) {
    ASSERT_EQ(cudaSetDevice(1 - current), cudaSuccess);
    void* there = nullptr;
    ASSERT_EQ(cudaMalloc(&there, kRoom), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(current), cudaSuccess);
    expect_refused(static_cast<std::byte*>(there),
                   fmt::format("memory of device {} given, of the current device, {}, allowed", 1 - current, current));
    expect_current(current);
    EXPECT_EQ(cudaFree(there), cudaSuccess);
  }
}

TEST_F(CudaTwoDevices, C26_TheSecondHasTheFirstsBits) {
  const Case c = small_case();
  for (const Recipe& recipe : test::device_recipes()) {
    const ForwardResult want = test::device_forward(c, recipe);
    const bool trains = cuda::supports_backward(recipe).ok();
    const BackwardResult gradients = trains ? test::device_backward(c, recipe) : BackwardResult{};
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    test::expect_same_outputs(test::device_forward(c, recipe), want, "of " + recipe.name);
    if (trains) test::expect_same_gradients(test::device_backward(c, recipe), gradients, "of " + recipe.name);
    expect_current(1);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
}

/// A stream of another device: an error, no crash, nothing written to the outputs.
TEST_F(CudaTwoDevices, C26_AStreamOfAnotherDeviceIsAnError) {
  const Case c = small_case();
  const Recipe recipe = test::recipe_named("mxfp8");
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  DeviceCase device(c, test::offsets_of(c.problem.packing));
  device.reserve(recipe);
  device.execution.stream = stream;
  EXPECT_TRUE(test::refused_with(device.run(recipe), {"cuda: "}));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(device.outputs_untouched());
  device.execution.stream = nullptr;
  ASSERT_TRUE(device.run(recipe).ok());
  EXPECT_TRUE(device.check().ok());
  test::expect_same_outputs(device.read(), test::device_forward(c, recipe), "after a stream of another device");
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

/// Both passes, again and again, in a thread for each device and a stream of its own.
void train(int device, const Case& c, const Recipe& recipe, const BackwardResult& want) {
  constexpr int kRuns = 20;
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  BackwardDeviceCase on_device(c, test::offsets_of(c.problem.packing));
  on_device.reserve(recipe);
  on_device.on_stream(stream);
  for (int run = 0; run < kRuns; ++run) {
    EXPECT_TRUE(on_device.run(recipe).ok());
    EXPECT_TRUE(on_device.check().ok());
    test::expect_same_gradients(on_device.read(), want, fmt::format("on device {}, run {}", device, run));
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(CudaTwoDevices, C26_BothAtOnce) {
  for (const Recipe& recipe : {test::recipe_named("mxfp8"), test::recipe_named("bf16")}) {
    const std::array<Case, 2> cases = {
        test::with_dlse(test::random_case(test::pack_self({300, 500, 77}), {4, 2, 64, 64}, DType::bf16, 3)),
        test::with_dlse(test::random_case(test::pack_self({900, 33}), {4, 2, 128, 128}, DType::bf16, 5))};
    const std::array<BackwardResult, 2> want = {test::device_backward(cases[0], recipe),
                                                test::device_backward(cases[1], recipe)};
    std::thread first([&] { train(0, cases[0], recipe, want[0]); });
    std::thread second([&] { train(1, cases[1], recipe, want[1]); });
    first.join();
    second.join();
    expect_current(0);
  }
}

}  // namespace
}  // namespace mxflash
