// C14: more elements than 32 bits count.
#include "cuda/runtime.hpp"
#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;

class CudaLarge : public test::OnDevice {};

/// A tensor of NaN alone but for its last tokens.
std::byte* filled(const Tensor& last, std::int64_t tokens, std::vector<cuda::DeviceMemory>& memory) {
  const std::size_t bytes =
      last.data.size() / static_cast<std::size_t>(last.shape[0]) * static_cast<std::size_t>(tokens);
  Result<cuda::DeviceMemory> made = cuda::allocate(bytes, "a test");
  EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
  if (!made.ok()) return nullptr;
  memory.push_back(*std::move(made));
  std::byte* data = memory.back().get();
  EXPECT_EQ(cudaMemset(data, 0xFF, bytes), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(data + bytes - last.data.size(), last.data.data(), last.data.size(), cudaMemcpyHostToDevice),
            cudaSuccess);
  return data;
}

/// The last document among a million tokens of NaN has the bits that it has alone: no index has left its range on the
/// way to it. q, k, v and o have more than 2^31 elements each.
TEST_F(CudaLarge, C14_TheLastDocumentIsRight) {
  constexpr std::int64_t kTokens = (std::int64_t{1} << 20) + 4099;
  constexpr std::int64_t kHeads = 16;
  constexpr std::int64_t kDims = 128;
  static_assert((kTokens - 1000) * kHeads * kDims > std::int64_t{1} << 31);
  constexpr std::size_t kNeeded = std::size_t{64} << 30;
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < kNeeded) GTEST_SKIP() << free << " bytes of device memory are free, about " << kNeeded << " are needed";

  const Case alone = test::random_case(Packing::single(900, 900), {kHeads, kHeads, kDims, kDims}, DType::bf16, 3);
  std::vector<std::int32_t> offsets;
  for (std::int32_t begin = 0; begin < kTokens - 900; begin += 1000) offsets.push_back(begin);
  offsets.push_back(static_cast<std::int32_t>(kTokens - 900));
  offsets.push_back(static_cast<std::int32_t>(kTokens));
  for (const Recipe& recipe : test::device_recipes()) {
    std::vector<cuda::DeviceMemory> memory;
    Inputs inputs = alone.inputs();
    const std::pair<TensorView*, const Tensor*> views[] = {
        {&inputs.q, &alone.q}, {&inputs.k, &alone.k}, {&inputs.v, &alone.v}};
    for (const auto& [view, tensor] : views) {
      view->data = filled(*tensor, kTokens, memory);
      view->shape[0] = kTokens;
    }
    std::byte* o = filled(alone.q, kTokens, memory);
    std::byte* lse = filled(Tensor::zeros(DType::f32, {900, kHeads}), kTokens, memory);
    Result<cuda::DeviceMemory> on_device = cuda::upload(std::as_bytes(std::span(offsets)), "a test");
    ASSERT_TRUE(on_device.ok());
    const auto* begins = reinterpret_cast<const std::int32_t*>(on_device->get());
    const cuda::ForwardCall call{
        {begins, begins, static_cast<std::int64_t>(offsets.size()) - 1}, inputs, {o, reinterpret_cast<float*>(lse)}};
    const Result<std::size_t> bytes = cuda::workspace_bytes(call, recipe);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    const Result<cuda::DeviceMemory> workspace = cuda::allocate(*bytes, "a test");
    ASSERT_TRUE(workspace.ok()) << workspace.error().message;
    const cuda::Execution execution{workspace->get(), *bytes, nullptr};
    const Status status = cuda::forward(call, recipe, execution);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_TRUE(cuda::check(execution).ok());
    ForwardResult got = test::device_forward(alone, recipe);
    const ForwardResult want = got;
    const std::int64_t first = (kTokens - 900) * kHeads;
    ASSERT_TRUE(cuda::download(got.o.data, o + first * kDims * 2, "a test").ok());
    ASSERT_TRUE(cuda::download(got.lse.data, lse + first * 4, "a test").ok());
    test::expect_same_outputs(got, want, recipe.name + ", the last document");
    test::expect_outputs_like(got, test::forward(alone, recipe, test::on_engine("reference")), alone, recipe,
                              recipe.name);
  }
}

}  // namespace
}  // namespace mxflash
