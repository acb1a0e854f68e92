// The CUDA engine's stages one by one: schedule, quantization, forward, by events around the launches of
// src/cuda/kernels.hpp. Checks an answer through the public call first.
//   cuda_stages --workload 4x16384,8192+32x256,131072x1 --heads 16 --kv-heads 16 --repeats 20
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "arguments.hpp"
#include "cuda/memory.hpp"
#include "cuda/plan.hpp"
#include "cuda/runtime.hpp"
#include "random_tensor.hpp"
#include "workloads.hpp"

namespace mxflash::tool {
namespace {

struct Settings {
  std::string workload = "16x1024,4x4096,2x16384,4x16384";
  std::string recipe = "mxfp8";
  std::int64_t heads = 16;
  std::int64_t kv_heads = 16;
  std::int64_t head_dim = 128;
  int repeats = 20;
};
constexpr int kWarmup = 3;

/// BF16, causal, queries and keys of the same tokens.
struct Data {
  std::vector<std::int32_t> offsets = {0};
  Tensor q, k, v;
};

Data make_data(const Settings& settings, const std::vector<std::int64_t>& lengths) {
  Data data;
  for (const std::int64_t length : lengths)
    data.offsets.push_back(data.offsets.back() + static_cast<std::int32_t>(length));
  const std::int64_t tokens = data.offsets.back();
  data.q = normal_tensor(DType::bf16, {tokens, settings.heads, settings.head_dim}, {0, 0, {}});
  data.k = normal_tensor(DType::bf16, {tokens, settings.kv_heads, settings.head_dim}, {0, 1, {}});
  data.v = normal_tensor(DType::bf16, {tokens, settings.kv_heads, settings.head_dim}, {0, 2, {}});
  return data;
}

/// A small packing on the device and on the CPU: another order of the sums and no more (1e-2 in relative L2 is what
/// the tests of the engine allow).
Status check_answer(const Settings& settings, const Recipe& recipe) {
  const Data data = make_data(settings, {300, 1, 129, 70});
  const Result<Packing> packing = Packing::make(data.offsets, data.offsets, data.offsets.back(), data.offsets.back());
  if (!packing) return packing.error();
  const Problem problem{*packing, Mask::causal(), std::nullopt};
  const Inputs inputs{*data.q.view("q"), *data.k.view("k"), *data.v.view("v"), std::nullopt};
  std::vector<Tensor> outputs;
  for (const char* engine : {"cuda", "cpu"}) {
    Options options;
    options.engine = engine;
    Result<ForwardResult> result = attention_forward(problem, recipe, inputs, options);
    if (!result) return result.error();
    outputs.push_back(std::move(result->o));
  }
  double error = 0, size = 0;
  for (std::int64_t i = 0; i < outputs[0].elements(); ++i) {
    error += std::pow(outputs[0].at(i) - outputs[1].at(i), 2);
    size += std::pow(outputs[1].at(i), 2);
  }
  const double relative = std::sqrt(error / size);
  if (!(relative <= 1e-2)) return invalid(fmt::format("o differs from the CPU engine's by {} (relative L2)", relative));
  fmt::print("checked: o within {:.1e} of the CPU engine's (relative L2)\n", relative);
  return {};
}

/// Sorted milliseconds.
struct Samples {
  std::vector<double> ms;
  [[nodiscard]] double median() const { return ms[ms.size() / 2]; }
  [[nodiscard]] std::string text() const {
    return fmt::format("{:.4f} ({:.4f}..{:.4f})", median(), ms.front(), ms.back());
  }
};

using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>,
                              decltype([](cudaEvent_t event) { static_cast<void>(cudaEventDestroy(event)); })>;

/// Milliseconds of each step on the default stream; a step returns CUDA's code.
template <class... Steps>
Result<std::vector<Samples>> time_steps(const Settings& settings, const Steps&... steps) {
  std::vector<Event> events;
  for (std::size_t i = 0; i <= sizeof...(steps); ++i) {
    cudaEvent_t event = nullptr;
    if (Status status = cuda::status_of(cudaEventCreate(&event), "making an event"); !status) return status.error();
    events.emplace_back(event);
  }
  std::vector<Samples> samples(sizeof...(steps));
  for (int i = -kWarmup; i < settings.repeats; ++i) {
    std::size_t at = 0;
    int code = cudaEventRecord(events[at].get());
    ((code = code != 0 ? code : steps(), code = code != 0 ? code : cudaEventRecord(events[++at].get())), ...);
    if (code == 0) code = cudaDeviceSynchronize();
    if (Status status = cuda::status_of(static_cast<cudaError_t>(code), "a launch"); !status) return status.error();
    for (std::size_t step = 0; i >= 0 && step < samples.size(); ++step) {
      float ms = 0;
      static_cast<void>(cudaEventElapsedTime(&ms, events[step].get(), events[step + 1].get()));
      samples[step].ms.push_back(ms);
    }
  }
  for (Samples& sample : samples) std::ranges::sort(sample.ms);
  return samples;
}

Status measure(const Settings& settings, const Recipe& recipe, const Workload& workload) {
  const Data data = make_data(settings, workload.lengths);
  const auto tokens = static_cast<std::int64_t>(data.offsets.back());
  TensorView views[] = {*data.q.view("q"), *data.k.view("k"), *data.v.view("v")};
  std::vector<cuda::DeviceMemory> memory;
  const auto own = [&memory](Result<cuda::DeviceMemory> made) -> Status {
    if (!made) return made.error();
    memory.push_back(*std::move(made));
    return {};
  };
  for (TensorView& view : views) {
    const std::size_t bytes = static_cast<std::size_t>(view.tokens() * view.heads() * view.dims()) * 2;
    if (Status status = own(cuda::upload(std::span(view.data, bytes), "an input")); !status) return status;
    view.data = memory.back().get();
  }
  if (Status status = own(cuda::upload(std::as_bytes(std::span(data.offsets)), "cu_seqlens")); !status) return status;
  const auto* offsets = reinterpret_cast<const std::int32_t*>(memory.back().get());
  if (Status status = own(cuda::allocate(data.q.data.size(), "o")); !status) return status;
  if (Status status = own(cuda::allocate(static_cast<std::size_t>(tokens * settings.heads) * 4, "lse")); !status)
    return status;
  const cuda::ForwardCall call{
      {offsets, offsets, static_cast<std::int64_t>(workload.lengths.size()), Mask::causal(), std::nullopt},
      {views[0], views[1], views[2], std::nullopt},
      {memory[4].get(), reinterpret_cast<float*>(memory[5].get())}};
  const Result<std::size_t> bytes = cuda::workspace_bytes(call, recipe);
  if (!bytes) return bytes.error();
  if (Status status = own(cuda::allocate(*bytes, "the workspace")); !status) return status;
  const cuda::Execution execution{memory[6].get(), *bytes, nullptr};
  const Result<cuda::Launches> launches = cuda::prepare(call, recipe, execution);
  if (!launches) return launches.error();
  if (launches->embedded) {
    return unsupported(
        fmt::format("recipe: {} given, one that FP8 products run allowed, whose stages these are", recipe.name));
  }
  const Result<std::vector<Samples>> samples = time_steps(
      settings, [&] { return cuda::launch_schedule(launches->schedule, nullptr); },
      [&] { return cuda::launch_quantize(launches->quantize, nullptr); },
      [&] { return cuda::launch_forward(launches->forward, nullptr); },
      [&] { return cudaMemcpyAsync(memory[4].get(), memory[0].get(), data.q.data.size(), cudaMemcpyDeviceToDevice); });
  if (!samples) return samples.error();
  if (Status status = cuda::check(execution); !status) return status;

  double pairs = 0;
  for (const std::int64_t length : workload.lengths) pairs += static_cast<double>(length * (length + 1) / 2);
  const auto heads = static_cast<double>(settings.heads);
  const double flops = 4 * heads * pairs * static_cast<double>(settings.head_dim);
  const double moved = 1.5 * static_cast<double>(data.q.data.size() + data.k.data.size() + data.v.data.size());
  const double copied = 2 * static_cast<double>(data.q.data.size());
  const std::vector<Samples>& of = *samples;
  fmt::print("{} documents, {} tokens ({})\n", workload.lengths.size(), tokens, workload.name);
  fmt::print("  schedule {} ms\n", of[0].text());
  fmt::print("  quantize {} ms, {:.0f} GB/s\n", of[1].text(), moved / of[1].median() / 1e6);
  fmt::print("  forward  {} ms, {:.0f} TFLOP/s\n", of[2].text(), flops / of[2].median() / 1e9);
  fmt::print("  copy of q to o {} ms, {:.0f} GB/s\n", of[3].text(), copied / of[3].median() / 1e6);
  return {};
}

Status run(const Settings& settings) {
  const Result<Recipe> recipe = load_recipe(settings.recipe);
  if (!recipe) return recipe.error();
  const Result<std::vector<Workload>> chosen = find_workloads(settings.workload, 1024);
  if (!chosen) return chosen.error();
  if (Status status = cuda::available(); !status) return status;
  if (Status status = check_answer(settings, *recipe); !status) return status;
  fmt::print("recipe {}, BF16, causal, heads {}/{}, dims {}; ms: median (least..most) of {} after {}\n", recipe->name,
             settings.heads, settings.kv_heads, settings.head_dim, settings.repeats, kWarmup);
  for (const Workload& workload : *chosen) {
    if (Status status = measure(settings, *recipe, workload); !status) return status;
  }
  return {};
}

}  // namespace
}  // namespace mxflash::tool

int main(int argc, char** argv) {
  using namespace mxflash::tool;
  Settings settings;
  CLI::App app("Times the stages of the CUDA engine's forward, after a check of its answer");
  app.add_option("--workload", settings.workload, "Lists of lengths separated by commas")->capture_default_str();
  app.add_option("--recipe", settings.recipe, "A name or a JSON file")->capture_default_str();
  app.add_option("--heads", settings.heads)->capture_default_str();
  app.add_option("--kv-heads", settings.kv_heads)->capture_default_str();
  app.add_option("--head-dim", settings.head_dim)->capture_default_str();
  app.add_option("--repeats", settings.repeats)->check(CLI::Range(1, 1000))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const mxflash::Status status = run(settings);
  if (!status) fmt::print(stderr, "cuda_stages: {}\n", status.error().message);
  return status ? 0 : 1;
}
